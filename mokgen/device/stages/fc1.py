"""One tile of the gate/up projection for the load warps: gathered activation rows and two weight halves."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr, range_constexpr

from mokgen.device import scheduler
from mokgen.device.sm90 import copy


@cute.jit
def load_tile(
    stages: copy.Stages,
    block: Int32,
    num_k_blocks: Constexpr[int],
    rows: copy.Gather,
    weights: list,
    task: scheduler.Task,
    in_flight: Constexpr[int],
    loads_weights: Constexpr[bool],
):
    """A load warp's share of the tile: its rows of every A block; the warp that `loads_weights` brings gate and up too.

    weights: partitions of the gate|up maps, routed MLP first, with box coordinates (column tile, K block, half,
    expert); half 0 is gate, 1 is up. A block's rows are handed over once the copies of `in_flight` later blocks are
    under way.
    """
    which = scheduler.is_shared(task.kind)
    for k_block in cutlass.range(num_k_blocks, unroll=1):
        stage = copy.acquire(stages, block + k_block)
        if const_expr(loads_weights):
            copy.expect(stages, stage, copy.STAGE_B_BYTES)
            for half in range_constexpr(2):
                box = (task.col_tile, k_block, half, task.expert)
                copy.load_tile(weights, which, box, 2 * stage + half, stages, stage)
        copy.gather_rows(stages, stage, rows, k_block)
        if k_block >= in_flight:
            copy.hand_over(stages, block + k_block - in_flight, in_flight, rows.tid % 32)
    for flying in range_constexpr(min(in_flight, num_k_blocks) - 1, -1, -1):
        copy.hand_over(stages, block + num_k_blocks - 1 - flying, flying, rows.tid % 32)
