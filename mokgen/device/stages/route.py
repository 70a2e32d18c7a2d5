"""From logits to expert ids and weights: one warp per token, expert e in register e // 32 of lane e % 32.

Exponentials and quotients are those torch compiles to, and the sum of a softmax runs over a lane's registers and then
across lanes, as torch's CUDA softmax sums up to 1024 values: scores have equal bits, near-ties fall alike. Choices are
compared as integers of the same order: ties go to the lowest expert, a NaN ranks as -inf, and what must not be chosen
ranks below that, so that ids are distinct and in range whatever the logits hold. A chosen NaN score gives a NaN weight.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr, range_constexpr

from mokgen.device import warp

LANES = warp.WARP_LANES
NEVER = -0x80000000  # key of what must not be chosen: absent experts, closed groups, earlier choices
NAN_KEY = NEVER + 0x7FFFFF  # the key of -inf
MINUS_INFINITY = -float("inf")
DENOMINATOR_GUARD = 1e-20  # DeepSeek-V3 adds it to the sum of the weights


@cute.jit
def key_of(choice: Float32):
    """int32 with the order of fp32: NaN = -inf < ... < -0 = +0 < ... < +inf; above NEVER."""
    bits = choice.bitcast(Int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = Int32(0) if choice == 0.0 else key
    return key if choice == choice else Int32(NAN_KEY)


@cute.jit
def value_of(key: Int32):
    """Inverse of `key_of`; not for NEVER."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).bitcast(Float32)


@cute.jit
def here(warps: Constexpr[int]):
    """Token of the calling warp, warp in the CTA, lane."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    index = cute.arch.make_warp_uniform(thread // LANES)
    return cta * warps + index, index, thread % LANES


@cute.jit
def load_row(rows: cute.Tensor, token: Int32, lane: Int32, width: Constexpr[int]):
    """Row `token` of (T, width) as fp32 registers; -inf past the end."""
    values = cute.make_rmem_tensor(warp.registers_for(width), Float32)
    for v in range_constexpr(warp.registers_for(width)):
        values[v] = Float32(MINUS_INFINITY)
        if v * LANES + lane < width:
            values[v] = Float32(rows[token, v * LANES + lane])
    return values


@cute.jit
def add_bias(values: cute.Tensor, bias: cute.Tensor, lane: Int32, width: Constexpr[int]):
    """values += bias (width,) fp32."""
    for v in range_constexpr(warp.registers_for(width)):
        if v * LANES + lane < width:
            values[v] = values[v] + bias[v * LANES + lane]


@cute.jit
def sigmoid(values: cute.Tensor):
    """values = 1 / (1 + exp(-values)), rounded as torch does; -inf gives 0."""
    for v in range_constexpr(cute.size(values)):
        values[v] = Float32(1.0) / (Float32(1.0) + cute.math.exp(-values[v], fastmath=False))


@cute.jit
def softmax(values: cute.Tensor):
    """values = softmax over all registers of all lanes, rounded as torch does; absent values are -inf."""
    peak = values[0]
    for v in range_constexpr(1, cute.size(values)):
        peak = cute.arch.fmax(peak, values[v])
    peak = warp.max_float(peak)
    total = Float32(0.0)
    for v in range_constexpr(cute.size(values)):
        values[v] = cute.math.exp(values[v] - peak, fastmath=False)
        total = total + values[v]
    total = warp.sum_float(total)
    for v in range_constexpr(cute.size(values)):
        values[v] = values[v] / total


@cute.jit
def keep(values: cute.Tensor, kept: cute.Tensor, lane: Int32, width: Constexpr[int]):
    """Registers to the warp's row (width,) of shared memory, for `gather`."""
    for v in range_constexpr(warp.registers_for(width)):
        if v * LANES + lane < width:
            kept[v * LANES + lane] = values[v]
    cute.arch.sync_warp()


@cute.jit
def gather(kept: cute.Tensor, chosen: cute.Tensor, lane: Int32, top_k: Constexpr[int], absent: Constexpr[float]):
    """Values of the chosen experts, slot k in register k // 32 of lane k % 32; `absent` past the last slot."""
    values = cute.make_rmem_tensor(warp.registers_for(top_k), Float32)
    for v in range_constexpr(warp.registers_for(top_k)):
        values[v] = Float32(absent)
        if v * LANES + lane < top_k:
            values[v] = kept[chosen[v]]
    return values


@cute.jit
def keys_of(values: cute.Tensor, lane: Int32, width: Constexpr[int]):
    """Choice keys of the registers; NEVER past the end."""
    keys = cute.make_rmem_tensor(warp.registers_for(width), Int32)
    for v in range_constexpr(warp.registers_for(width)):
        keys[v] = key_of(values[v]) if v * LANES + lane < width else Int32(NEVER)
    return keys


@cute.jit
def take_largest(keys: cute.Tensor, lane: Int32):
    """Index of the largest key of the warp, the lowest among equals; its key becomes NEVER."""
    best, index = keys[0], lane
    for v in range_constexpr(1, cute.size(keys)):
        index = v * LANES + lane if keys[v] > best else index
        best = cutlass.max(best, keys[v])
    winner = warp.first_of_largest(best, index)
    for v in range_constexpr(cute.size(keys)):
        keys[v] = Int32(NEVER) if v * LANES + lane == winner else keys[v]
    return winner


@cute.jit
def choose(keys: cute.Tensor, lane: Int32, top_k: Constexpr[int]):
    """Indices of the top_k largest keys, descending; slot k in register k // 32 of lane k % 32. Consumes `keys`."""
    chosen = cute.make_rmem_tensor(warp.registers_for(top_k), Int32)
    for v in range_constexpr(warp.registers_for(top_k)):
        chosen[v] = Int32(0)
    for k in cutlass.range(top_k, unroll=1):
        winner = take_largest(keys, lane)
        for v in range_constexpr(warp.registers_for(top_k)):
            chosen[v] = winner if v * LANES + lane == k else chosen[v]
    return chosen


@cute.jit
def largest(first: Int32, second: Int32):
    """Group score `max`: key of the group's largest choice. Lanes hold their largest two keys of the group."""
    return warp.max_int(first)


@cute.jit
def top2_sum(first: Int32, second: Int32):
    """Group score `top2_sum`: key of the sum of the group's two largest choices (a group has two experts or more)."""
    top = warp.max_int(first)
    holds_top = first == top
    holders = warp.ballot(holds_top)
    runner_up = second if holds_top and warp.is_first_of(holders) else first
    return key_of(value_of(top) + value_of(warp.max_int(runner_up)))


@cute.jit
def top_two_of_group(keys: cute.Tensor, group: Constexpr[int], group_size: Constexpr[int], lane: Int32):
    """This lane's two largest keys among the experts of a group."""
    first, second = Int32(NEVER), Int32(NEVER)
    begin, end = group * group_size, (group + 1) * group_size
    for v in range_constexpr(begin // LANES, (end - 1) // LANES + 1):
        key = keys[v]
        if const_expr(v * LANES < begin or (v + 1) * LANES > end):  # the register's lanes are of several groups
            expert = v * LANES + lane
            key = key if expert >= begin and expert < end else Int32(NEVER)
        second = cutlass.max(second, cutlass.min(first, key))
        first = cutlass.max(first, key)
    return first, second


@cute.jit
def limit_groups(
    keys: cute.Tensor,
    lane: Int32,
    num_experts: Constexpr[int],
    num_groups: Constexpr[int],
    top_groups: Constexpr[int],
    group_score: Constexpr,
):
    """Set the keys of all experts outside the `top_groups` best groups to NEVER.

    Groups are equal runs of experts; `group_score` is `largest` or `top2_sum`; ties go to the lowest group.
    """
    group_size = num_experts // num_groups
    group_keys = cute.make_rmem_tensor(warp.registers_for(num_groups), Int32)
    for v in range_constexpr(warp.registers_for(num_groups)):
        group_keys[v] = Int32(NEVER)
    for group in range_constexpr(num_groups):
        first, second = top_two_of_group(keys, group, group_size, lane)
        key = group_score(first, second)
        word = group // LANES
        group_keys[word] = key if lane == group % LANES else group_keys[word]
    for _ in cutlass.range(top_groups, unroll=1):
        take_largest(group_keys, lane)
    open_groups = [
        warp.ballot(group_keys[v] == NEVER) for v in range(warp.registers_for(num_groups))
    ]  # taken groups, and the lanes past the last group
    for v in range_constexpr(warp.registers_for(num_experts)):
        for group in range_constexpr(v * LANES // group_size, min(((v + 1) * LANES - 1) // group_size + 1, num_groups)):
            expert = v * LANES + lane
            is_closed = (open_groups[group // LANES] >> (group % LANES)) & 1 == 0
            is_member = expert >= group * group_size and expert < (group + 1) * group_size
            keys[v] = Int32(NEVER) if is_closed and is_member else keys[v]


@cute.jit
def normalize(weights: cute.Tensor):
    """weights /= sum of the slots + 1e-20; absent slots are 0."""
    total = weights[0]
    for v in range_constexpr(1, cute.size(weights)):
        total = total + weights[v]
    total = warp.sum_float(total) + Float32(DENOMINATOR_GUARD)
    for v in range_constexpr(cute.size(weights)):
        weights[v] = weights[v] / total


@cute.jit
def scale(weights: cute.Tensor, factor: Constexpr[float]):
    """weights *= factor."""
    for v in range_constexpr(cute.size(weights)):
        weights[v] = weights[v] * Float32(factor)


@cute.jit
def store_row(rows: cute.Tensor, values: cute.Tensor, token: Int32, lane: Int32, width: Constexpr[int]):
    """Registers to row `token` of (T, width)."""
    for v in range_constexpr(warp.registers_for(width)):
        if v * LANES + lane < width:
            rows[token, v * LANES + lane] = values[v]
