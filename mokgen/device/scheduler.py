"""Which tile a CTA computes next: ticket to task, and the ring that hands tasks to the other roles.

A scheduler warp claims tickets ahead of time, decodes them once and publishes records of eight words in shared
memory; load and mma warps read the records in order. Decoding needs no search: ticket // column tiles is a
row block of the ticket's expert, and `block_expert` names it.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Int32, range_constexpr

from mokgen.device import sync

ROW_BLOCK = 128  # rows
RECORD_WORDS = 8
TASK_WORDS = 5  # of a record, the fields of Task
END = -1  # kind of the record after the last task
SHARED_FC1, FC1, SHARED_FC2, FC2, REDUCE = 0, 1, 2, 3, 4
LOAD_ROLE, MMA_ROLE, SCHEDULER_ROLE, REDUCE_ROLE = 0, 1, 2, 3  # as post-mortems name them


class Task(NamedTuple):
    """One tile of the main queue."""

    kind: Int32  # one of the numbers above, or END
    expert: Int32
    row_block: Int32  # 128 rows of the pool (of the tokens for shared kinds)
    col_tile: Int32
    rows: Int32  # rows of the block that are not padding, 1..128


class Ring(NamedTuple):
    """Task records in shared memory with a full and an empty barrier per slot."""

    records: cute.Tensor  # (RECORD_WORDS, slots) int32
    full: cute.Pointer
    empty: cute.Pointer
    slots: Constexpr


class RowTables(NamedTuple):
    """The schedule's tables over the pool: what decodes a task and where a row comes from."""

    start: cute.Tensor  # (E + 1,) int32: prefix of row blocks per expert
    expert: cute.Tensor  # (B_MAX,) int32
    rows: cute.Tensor  # (B_MAX,) int32: rows of the block that are not padding
    token: cute.Tensor  # (P_MAX,) int32: token of each row, -1 for padding
    group_blocks: Constexpr  # row blocks that share their column tiles before the next row blocks are taken


def read_tables(workspace, offsets: tuple, num_experts: int, max_blocks: int, group_blocks: int) -> RowTables:
    """The tables at byte offsets (start, expert, rows, token) of the workspace."""
    sizes = (num_experts + 1, max_blocks, max_blocks, max_blocks * ROW_BLOCK)
    tables = [sync.words(workspace, offset, size) for offset, size in zip(offsets, sizes, strict=True)]
    return RowTables(*tables, group_blocks)


@cute.jit
def make_ring(smem, slots: Constexpr[int], full: Constexpr[int], empty: Constexpr[int]):
    """A ring of `slots` records in shared memory; `full` and `empty` are the arrivals of its barriers."""
    records = smem.allocate_tensor(Int32, cute.make_layout((RECORD_WORDS, slots)), byte_alignment=16)
    return Ring(records, sync.make_barriers(smem, slots, full), sync.make_barriers(smem, slots, empty), slots)


def is_fc1(kind):
    """Whether a task's rows are gathered by all load warps; such tasks come before all others in ticket order."""
    return (kind == SHARED_FC1) | (kind == FC1)


def is_shared(kind):
    """1 for tasks of the shared expert, 0 for routed ones: the index of their MLP's maps."""
    return Int32((kind == SHARED_FC1) | (kind == SHARED_FC2))


@cute.jit
def read_task(ring: Ring, count: Int32, readers: Int32, lane: Int32):
    """Wait for the count-th record of this CTA, copy it and give the slot back on behalf of `readers` warps."""
    slot = sync.slot_of(count, ring.slots)
    cute.arch.mbarrier_wait(ring.full + slot, sync.phase_of(count, ring.slots))
    words = cute.make_rmem_tensor(TASK_WORDS, Int32)
    words.fill(0)
    if lane == 0:  # the lane that reads gives back, so that the order is one thread's own
        for i in range_constexpr(TASK_WORDS):
            words[i] = ring.records[i, slot]
        sync.arrive_many(ring.empty.toint() + slot * 8, readers)
    return Task(*(cute.arch.shuffle_sync(words[i], 0) for i in range(TASK_WORDS)))


@cute.jit
def publish(ring: Ring, count: Int32, task: Task, lane: Int32):
    """Write the count-th record once its slot is free. Called by the scheduler warp."""
    slot = sync.slot_of(count, ring.slots)
    cute.arch.mbarrier_wait(ring.empty + slot, sync.phase_of(count, ring.slots) ^ 1)
    if lane == 0:
        record = ring.records[None, slot]
        record[0] = task.kind
        record[1] = task.expert
        record[2] = task.row_block
        record[3] = task.col_tile
        record[4] = task.rows
        cute.arch.mbarrier_arrive(ring.full + slot)


@cute.jit
def blocks_of(tokens: Int32, tile_m: Constexpr[int]):
    """Row blocks that the tokens themselves fill: the shared expert's rows."""
    return (tokens + (tile_m - 1)) // tile_m


class Place(NamedTuple):
    """A tile among those of one segment of row blocks."""

    row_block: Int32
    col_tile: Int32


@cute.jit
def place_of(item: Int32, row_blocks: Int32, col_tiles: Int32, group_blocks: Constexpr[int]):
    """Tile `item` of a segment: groups of row blocks one after the other, in a group row blocks before column tiles.

    The rows of a group stay in L2 while its column tiles pass.
    """
    group = item // (group_blocks * col_tiles)
    inside = item - group * (group_blocks * col_tiles)
    height = row_blocks - group * group_blocks
    if height > group_blocks:
        height = Int32(group_blocks)
    col_tile = inside // height
    return Place(group * group_blocks + inside - col_tile * height, col_tile)


@cute.jit
def routed_tile(item: Int32, kind: Constexpr[int], col_tiles: Int32, first_col_tile: Int32, tables: RowTables):
    """Tile `item` of a routed phase, expert by expert."""
    expert = tables.expert[item // col_tiles]
    start = tables.start[expert]
    place = place_of(item - start * col_tiles, tables.start[expert + 1] - start, Int32(col_tiles), tables.group_blocks)
    row_block = start + place.row_block
    return Task(Int32(kind), expert, row_block, first_col_tile + place.col_tile, tables.rows[row_block])


@cute.jit
def shared_tile(
    item: Int32, kind: Constexpr[int], col_tiles: Int32, first_col_tile: Int32, tables: RowTables, tokens: Int32
):
    """Tile `item` of a shared-expert phase, whose rows are the tokens."""
    place = place_of(item, blocks_of(tokens, ROW_BLOCK), Int32(col_tiles), tables.group_blocks)
    rows = tokens - place.row_block * ROW_BLOCK
    if rows > ROW_BLOCK:
        rows = Int32(ROW_BLOCK)
    return Task(Int32(kind), Int32(0), place.row_block, first_col_tile + place.col_tile, rows)


class Slab(NamedTuple):
    """Part of the fc2 phase: the same few column tiles of every row block."""

    item: Int32  # tile within the slab
    col_tiles: Int32
    first_col_tile: Int32


@cute.jit
def slab_of(item: Int32, num_blocks: Int32, slab_tiles: Constexpr[int], total_col_tiles: Constexpr[int]):
    """Slab of tile `item` of the fc2 phase, num_blocks row blocks high; the last slab may be narrower."""
    slab = item // (num_blocks * slab_tiles)
    first = slab * slab_tiles
    col_tiles = Int32(total_col_tiles) - first
    if col_tiles > slab_tiles:
        col_tiles = Int32(slab_tiles)
    return Slab(item - first * num_blocks, col_tiles, first)
