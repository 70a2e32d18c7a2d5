"""Main loop of a consumer warpgroup on Hopper: 64 rows x 256 columns of fp32 accumulators, K in blocks of 64."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from mokgen.device import sync
from mokgen.device.sm90.copy import Stages

TILE_M, TILE_N, TILE_K = 128, 256, 64
GROUP_ROWS = 64  # rows of a consumer warpgroup
MMAS_PER_BLOCK = 4  # 64 of K in steps of 16
ACCUMULATE = warpgroup.Field.ACCUMULATE


class Operands(NamedTuple):
    """A warpgroup's view of the stages: shared-memory descriptors, not registers."""

    tiled_mma: cute.TiledMma
    a: cute.Tensor  # (MMA, MMA_M, MMA_K, stage)
    b: cute.Tensor  # (MMA, MMA_N, MMA_K, stage)


def tiled_mma():
    """Two warpgroups along M, each 64 x 256 x 16 per instruction, bf16 with fp32 accumulators."""
    k_major = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, (2, 1, 1), (64, TILE_N))


def layout_a(stages: int):
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, TILE_N, TILE_K), BFloat16, stages)


def layout_b(rows: int, stages: int):
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_M, rows, TILE_K), BFloat16, stages)


def layout_out(chunks: int):
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (64, 64, 64), BFloat16, chunks)


def operands(mma: cute.TiledMma, group: Int32, smem_a: cute.Tensor, smem_b: cute.Tensor) -> Operands:
    """Descriptors of consumer warpgroup `group`, uniform over its threads."""
    part = mma.get_slice(group * 128)
    return Operands(mma, mma.make_fragment_A(part.partition_A(smem_a)), mma.make_fragment_B(part.partition_B(smem_b)))


@cute.jit
def release(stages: Stages, block: Int32, lane: Int32):
    """Give the stage of the block-th K block back: one arrival per consumer warp."""
    sync.arrive(stages.empty.toint() + sync.slot_of(block, stages.count) * 8, Boolean(lane == 0))


@cute.jit
def wait_full(stages: Stages, block: Int32):
    stage = sync.slot_of(block, stages.count)
    cute.arch.mbarrier_wait(stages.full + stage, sync.phase_of(block, stages.count))


@cute.jit
def multiply_block(operands: Operands, acc: cute.Tensor, stage: Int32, accumulates: Boolean):
    """Issue the MMAs of one K block; without `accumulates` the first of them overwrites the accumulators."""
    warpgroup.fence()
    for step in range_constexpr(MMAS_PER_BLOCK):
        operands.tiled_mma.set(ACCUMULATE, accumulates if step == 0 else True)
        cute.gemm(
            operands.tiled_mma, acc, operands.a[(None, None, step, stage)], operands.b[(None, None, step, stage)], acc
        )
    warpgroup.commit_group()


@cute.jit
def accumulate(operands: Operands, stages: Stages, acc: cute.Tensor, block: Int32, num_blocks: Int32, lane: Int32):
    """acc = sum over num_blocks >= 1 K blocks of A * B^T, starting at this CTA's K block `block`.

    The MMAs of one block are in flight while the next is waited for; a stage is released when the MMAs that read it
    are done.
    """
    for i in cutlass.range(num_blocks, unroll=1):
        wait_full(stages, block + i)
        multiply_block(operands, acc, sync.slot_of(block + i, stages.count), Boolean(i > 0))
        warpgroup.wait_group(1)
        if i > 0:
            release(stages, block + i - 1, lane)
    warpgroup.wait_group(0)
    release(stages, block + num_blocks - 1, lane)


@cute.jit
def skip(stages: Stages, block: Int32, num_blocks: Int32, lane: Int32):
    """Pass over a tile whose rows are all padding for this warpgroup: no MMAs, the stages go straight back."""
    for i in cutlass.range(num_blocks, unroll=1):
        wait_full(stages, block + i)
        cute.arch.sync_warp()
        release(stages, block + i, lane)


@cute.jit
def lag(stages: Stages, block: Int32, num_blocks: Int32, blocks_behind: Constexpr[int]):
    """Hold the second warpgroup until the stage `blocks_behind` further is full.

    The two warpgroups then stay that far apart, and each one's epilogue runs under the other's MMAs.
    """
    if num_blocks > blocks_behind:
        wait_full(stages, block + blocks_behind)
