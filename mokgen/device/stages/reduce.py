"""The weighted sum over a token's slots, as items of a second queue that single warps claim.

An item is (slab, token block): the slab's columns of the block's tokens. Items are claimed slab by slab, and a slab's
items wait until every fc2 tile of the slab is stored, so all but the last slab's reduction runs under the MMAs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, range_constexpr

from mokgen.device.activations import sigmoid
from mokgen.device.formats import pack_bf16, unpack_bf16

COLUMNS_PER_LANE = 8  # 16 bytes
WARP_COLUMNS = 32 * COLUMNS_PER_LANE


class Shape(NamedTuple):
    """Compile-time numbers of the reduction."""

    hidden_size: Constexpr
    top_k: Constexpr
    slab_columns: Constexpr
    slots_in_flight: Constexpr  # rows whose loads are issued before the first use
    shared: Constexpr  # "none" | "plain" | "sigmoid": what the shared expert adds first


class Rows(NamedTuple):
    """Operands of the reduction."""

    y: Int64  # address of (P_MAX, H) bf16
    slot_row: cute.Tensor  # (T_MAX * K,) int32, -1: no route
    weights: cute.Tensor  # (T, K)
    out: cute.Tensor  # (T, H) bf16
    shared_y: Int64 | None = None  # address of (tokens, H) bf16 where there is a shared expert
    shared_gate: cute.Tensor | None = None  # (T,) fp32 gate logits where the shared expert has a gate


@cute.jit
def load_row_chunk(address: Int64, row: Int32):
    """16 bytes of a row as four words; zeros without a read where row < 0.

    Not through the read-only path and not kept in L1: other SMs wrote the row in this launch, and it is read once.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred live; setp.ge.s32 live, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@live ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address, row],
    )


@cute.jit
def add_scaled(total: cute.Tensor, words: list, scale: Float32):
    """total[0..7] += scale * the eight bf16 values of four words, fp32."""
    for i in range_constexpr(4):
        low, high = unpack_bf16(words[i])
        total[2 * i] = total[2 * i] + scale * low
        total[2 * i + 1] = total[2 * i + 1] + scale * high


@cute.jit
def store_chunk(out: cute.Tensor, token: Int32, column: Int32, total: cute.Tensor, hidden_size: Constexpr[int]):
    address = out.iterator.toint() + (Int64(token) * hidden_size + column) * 2
    words = [pack_bf16(total[2 * i], total[2 * i + 1]) for i in range(4)]
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


@cute.jit
def add_slots(total: cute.Tensor, rows: Rows, token: Int32, column: Int32, shape: Constexpr):
    """total += sum over slots, in slot order, of weight * y[slot_row], fp32; routes without a row are not read."""
    for first in range_constexpr(0, shape.top_k, shape.slots_in_flight):
        count = min(shape.slots_in_flight, shape.top_k - first)
        route = token * shape.top_k + first
        chunks, live = [], []
        for j in range_constexpr(count):
            row = rows.slot_row[route + j]
            live.append(row)
            chunks.append(load_row_chunk(rows.y + (Int64(row) * shape.hidden_size + column) * 2, row))
        for j in range_constexpr(count):
            weight = Float32(0.0)
            if live[j] >= 0:
                weight = Float32(rows.weights[token, first + j])
            add_scaled(total, chunks[j], weight)


@cute.jit
def add_shared(total: cute.Tensor, rows: Rows, token: Int32, column: Int32, shape: Constexpr):
    """total += the shared expert's row, times sigmoid of its gate logit where it has a gate."""
    scale = Float32(1.0)
    if const_expr(shape.shared == "sigmoid"):
        scale = sigmoid(Float32(rows.shared_gate[token]))
    address = rows.shared_y + (Int64(token) * shape.hidden_size + column) * 2
    add_scaled(total, load_row_chunk(address, token), scale)


@cute.jit
def reduce_token(rows: Rows, token: Int32, slab: Int32, shape: Constexpr, lane: Int32):
    """One token's columns of a slab."""
    begin = slab * shape.slab_columns
    end = begin + shape.slab_columns
    if end > shape.hidden_size:
        end = Int32(shape.hidden_size)
    for first in cutlass.range(begin, end, WARP_COLUMNS, unroll=1):
        column = first + lane * COLUMNS_PER_LANE
        if column < end:
            total = cute.make_rmem_tensor(COLUMNS_PER_LANE, Float32)
            total.fill(0.0)
            if const_expr(shape.shared != "none"):
                add_shared(total, rows, token, column, shape)
            add_slots(total, rows, token, column, shape)
            store_chunk(rows.out, token, column, total, shape.hidden_size)
