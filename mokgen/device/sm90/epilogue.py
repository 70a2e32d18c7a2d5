"""From accumulators to global memory on Hopper: activation or plain rounding, stmatrix, TMA store, signal.

A consumer warpgroup writes its 64 rows in chunks of 64 columns (64 x 64 bf16, 128-byte swizzle, 8 KB) and has room for
two, so that writing one overlaps the store of the other. Accumulator a of a thread of the 64 x 256 tile is row
(warp % 4) * 16 + lane / 4 + 8 * ((a / 2) % 2), column 8 * (a / 4) + 2 * (lane % 4) + a % 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, range_constexpr

from mokgen.device import scheduler, sync
from mokgen.device.formats import pack_bf16
from mokgen.device.sm90 import copy

CHUNK_BYTES = 64 * 64 * 2
CHUNK_SHAPE = (64, 64)
CHUNKS = 2  # per warpgroup
STEPS_PER_CHUNK = 4  # 16 columns a step
GROUP_THREADS = 128
FIRST_BARRIER = 1  # named barriers 1 and 2 belong to the two consumer warpgroups


class Output(NamedTuple):
    """A warpgroup's way out: its chunks and its place in the warpgroup."""

    group: Int32
    warp: Int32  # 0..3 in the warpgroup; warp 0 stores and signals
    lane: Int32
    address: Int32  # shared address of the warpgroup's first chunk


def output_of(smem_out: cute.Tensor, group, warp, lane) -> Output:
    return Output(group, warp % 4, lane, smem_out.iterator.toint() + group * (CHUNKS * CHUNK_BYTES))


@cute.jit
def store_matrix(address: Int32, words: list):
    """stmatrix of a 16 x 16 block: lane l gives the address of row l % 16, column half l / 16."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


@cute.jit
def open_chunk(output: Output):
    """Wait until the store that used this chunk's room has read it: all but the latest store."""
    if output.warp == 0:
        cute.arch.cp_async_bulk_wait_group(1, read=True)
    cute.arch.barrier(barrier_id=FIRST_BARRIER + output.group, number_of_threads=GROUP_THREADS)


@cute.jit
def close_chunk(output: Output, targets: list, task: scheduler.Task, column: Int32, chunk: Constexpr[int]):
    """Make the chunk visible to the async proxy and start its store to this warpgroup's box in column `column`."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=FIRST_BARRIER + output.group, number_of_threads=GROUP_THREADS)
    if output.warp == 0:
        box = (2 * task.row_block + output.group, column)
        copy.store_tile(targets, scheduler.is_shared(task.kind), box, output.group * CHUNKS + chunk % CHUNKS)


@cute.jit
def step_address(output: Output, step: Constexpr[int]):
    """Where this lane's row of the 16 columns of `step` goes; lane l serves row l % 16, column half l / 16."""
    row = output.warp * 16 + (output.lane & 15)
    swizzled = ((output.lane >> 4) ^ (output.lane & 7)) << 4
    chunk = (step // STEPS_PER_CHUNK) % CHUNKS
    return output.address + chunk * CHUNK_BYTES + row * 128 + (swizzled ^ ((step % STEPS_PER_CHUNK) * 32))


@cute.jit
def gated(
    acc: cute.Tensor,
    activation: Constexpr[Callable],
    alpha: Constexpr[float],
    clamp: Constexpr[float],
    output: Output,
    targets: list,
    task: scheduler.Task,
):
    """Activation of gate (columns 0..127) and up (128..255), stored to the task's two boxes of hidden rows."""
    for chunk in range_constexpr(2):
        open_chunk(output)
        for step in range_constexpr(chunk * STEPS_PER_CHUNK, (chunk + 1) * STEPS_PER_CHUNK):
            words = []
            for h in range_constexpr(4):  # (row half, 8-column half) = (h & 1, h >> 1)
                a = 4 * (2 * step + (h >> 1)) + 2 * (h & 1)
                low = activation(acc[a], acc[a + 64], alpha, clamp)
                high = activation(acc[a + 1], acc[a + 65], alpha, clamp)
                words.append(pack_bf16(low, high))
            store_matrix(step_address(output, step), words)
        close_chunk(output, targets, task, 2 * task.col_tile + chunk, chunk)


@cute.jit
def plain(acc: cute.Tensor, output: Output, targets: list, task: scheduler.Task):
    """Round 64 x 256 accumulators to bf16, stored to the task's four boxes of y rows."""
    for chunk in range_constexpr(4):
        open_chunk(output)
        for step in range_constexpr(chunk * STEPS_PER_CHUNK, (chunk + 1) * STEPS_PER_CHUNK):
            words = []
            for h in range_constexpr(4):
                a = 4 * (2 * step + (h >> 1)) + 2 * (h & 1)
                words.append(pack_bf16(acc[a], acc[a + 1]))
            store_matrix(step_address(output, step), words)
        close_chunk(output, targets, task, 4 * task.col_tile + chunk, chunk)


@cute.jit
def signal_stored(output: Output, counters: cute.Tensor, pending: Int32):
    """Wait until this warpgroup's stores are in global memory, then signal counter `pending` (none if negative)."""
    if output.warp == 0:
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_warp()
        if pending >= 0:
            with cute.arch.elect_one():
                sync.signal(counters.iterator + pending, Int32(1))


@cute.jit
def add_bias(
    acc: cute.Tensor,
    bias: cute.Tensor,
    first: Int32,
    stride: Constexpr[int],
    columns: Int32,
    part: Constexpr[int],
    lane: Int32,
):
    """Add bias[first + c * stride] to column c of half `part` (128 columns) of the accumulators, where c < columns."""
    for group in range_constexpr(16):
        for odd in range_constexpr(2):
            column = 8 * group + 2 * (lane % 4) + odd
            value = Float32(0.0)
            if column < columns:
                value = Float32(bias[first + column * stride])
            for half in range_constexpr(2):
                a = part * 64 + 4 * group + 2 * half + odd
                acc[a] = acc[a] + value


@cute.jit
def add_gate_up_bias(
    acc: cute.Tensor,
    bias: cute.Tensor,
    task: scheduler.Task,
    intermediate_size: Constexpr[int],
    column_stride: Constexpr[int],
    half_stride: Constexpr[int],
    lane: Int32,
):
    """Bias of 128 gate and 128 up columns; strides of the next column and of the up half in an expert's bias."""
    column = task.col_tile * 128
    first = task.expert * (2 * intermediate_size) + column * column_stride
    add_bias(acc, bias, first, column_stride, intermediate_size - column, 0, lane)
    add_bias(acc, bias, first + half_stride, column_stride, intermediate_size - column, 1, lane)


@cute.jit
def add_down_bias(acc: cute.Tensor, bias: cute.Tensor, task: scheduler.Task, hidden_size: Constexpr[int], lane: Int32):
    """Bias of 256 output columns."""
    column = task.col_tile * 256
    first = task.expert * hidden_size + column
    add_bias(acc, bias, first, 1, hidden_size - column, 0, lane)
    add_bias(acc, bias, first + 128, 1, hidden_size - column - 128, 1, lane)
