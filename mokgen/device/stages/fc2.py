"""One tile of the down projection for the load warp: hidden rows and weights, both by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from mokgen.device import scheduler
from mokgen.device.sm90 import copy


@cute.jit
def load_tile(stages: copy.Stages, block: Int32, num_k_blocks: Int32, rows: list, weights: list, task: scheduler.Task):
    """All K blocks of the tile, by one warp.

    rows, weights: partitions of the hidden and the down maps, routed MLP first, with box coordinates (row block, K
    block) and (column tile, K block, expert). The rows were stored by TMA on other SMs; the caller has waited for their
    counter, and the fence orders these reads, made through the async proxy, after that wait.
    """
    which = scheduler.is_shared(task.kind)
    cute.arch.fence_proxy("async.global")
    for k_block in cutlass.range(num_k_blocks, unroll=1):
        stage = copy.acquire(stages, block + k_block)
        copy.expect_alone(stages, stage, copy.STAGE_A_BYTES + copy.STAGE_B_BYTES)
        copy.load_tile(rows, which, (task.row_block, k_block), stage, stages, stage)
        copy.load_tile(weights, which, (task.col_tile, k_block, task.expert), stage, stages, stage)
