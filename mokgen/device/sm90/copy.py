"""Filling the stages of the main loop on Hopper: gathered activation rows by cp.async, matrix tiles by TMA.

A stage holds A (128 x 64) and B (256 x 64), bf16, K contiguous, 128-byte swizzle. Its full barrier expects one
arrival per gathering warp and one with the TMA byte count, five in all; where TMA brings A too, one thread arrives for
the warps as well.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Boolean, Constexpr, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from mokgen.device import sync

GATHER_WARPS = 4
ROWS_PER_THREAD = 8  # 128 rows x 8 chunks of 16 bytes over 128 threads
CHUNK_BYTES = 16
STAGE_A_BYTES = 128 * 64 * 2
STAGE_B_BYTES = 256 * 64 * 2


class Stages(NamedTuple):
    """Ring of operand stages: full and empty barriers, and the shared address of A."""

    full: cute.Pointer
    empty: cute.Pointer
    a_address: Int32
    count: Constexpr


class Gather(NamedTuple):
    """This thread's eight rows of a row block: thread t copies chunk t % 8 of rows t // 8 + 16 i."""

    source: Int64  # address of the row-major source
    offsets: cute.Tensor  # (8,) int32: the thread's chunk of each row, in chunks from the source
    valid: Int32  # bit i: row i exists; other rows become zero without a read
    row_chunks: Constexpr  # chunks of a source row
    tid: Int32


@cute.jit
def gather(source: cute.Tensor, row_token: cute.Tensor, first_row: Int32, row_chunks: Constexpr[int], tid: Int32):
    """Rows first_row.. of the pool: source row row_token[r], none where that is -1."""
    return gather_either(source, row_token, None, first_row, row_chunks, tid)


@cute.jit
def gather_either(
    source: cute.Tensor,
    row_token: cute.Tensor,
    in_order: Boolean | None,
    first_row: Int32,
    row_chunks: Constexpr[int],
    tid: Int32,
):
    """As `gather`, but where `in_order` holds source rows first_row.. themselves, as far as there are any."""
    offsets = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
    valid = Int32(0)
    for i in range_constexpr(ROWS_PER_THREAD):
        row = first_row + tid // 8 + 16 * i
        token = Int32(-1)
        if const_expr(in_order is None):
            token = row_token[row]
        else:
            if not in_order:
                token = row_token[row]
            elif row < source.shape[0]:
                token = row
        if token >= 0:
            valid = valid | (1 << i)
        else:
            token = Int32(0)
        offsets[i] = token * row_chunks + tid % 8
    return Gather(source.iterator.toint(), offsets, valid, row_chunks, tid)


@cute.jit
def gather_rows(stages: Stages, stage: Int32, rows: Gather, k_block: Int32):
    """Copy this thread's eight chunks of K block `k_block` into A of `stage`, as one group of copies."""
    row, chunk = rows.tid // 8, rows.tid % 8
    target = stages.a_address + stage * STAGE_A_BYTES + row * 128 + ((chunk ^ (row & 7)) << 4)
    live = rows.valid
    if k_block * 8 + chunk >= rows.row_chunks:
        live = Int32(0)
    for i in range_constexpr(ROWS_PER_THREAD):
        # the predicate is "ignore source": zero fill without a read
        cute.arch.inline_ptx(
            "{ .reg .pred skip; setp.eq.s32 skip, {$r2}, 0; "
            "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, skip; }",
            read_only_args=[
                target + i * 2048,
                rows.source + Int64(rows.offsets[i]) * CHUNK_BYTES + Int64(k_block) * (8 * CHUNK_BYTES),
                live & (1 << i),
            ],
        )
    cute.arch.cp_async_commit_group()


@cute.jit
def hand_over(stages: Stages, block: Int32, still_flying: Constexpr[int], lane: Int32):
    """Arrive for this warp's rows of the block-th K block, whose copies are older than the latest `still_flying`.

    The copies wrote through the generic proxy and wgmma reads through the async proxy, hence the fence.
    """
    cute.arch.cp_async_wait_group(still_flying)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    sync.arrive(stages.full.toint() + sync.slot_of(block, stages.count) * 8, Boolean(lane == 0))


@cute.jit
def make_stages(smem, smem_a: cute.Tensor, count: Constexpr[int], full: Constexpr[int], empty: Constexpr[int]):
    """Barriers of `count` stages, initialised for `full` and `empty` arrivals a phase."""
    return Stages(
        sync.make_barriers(smem, count, full), sync.make_barriers(smem, count, empty), smem_a.iterator.toint(), count
    )


@cute.jit
def acquire(stages: Stages, block: Int32):
    """Wait until the stage of the block-th K block of this CTA is free; returns its index."""
    stage = sync.slot_of(block, stages.count)
    cute.arch.mbarrier_wait(stages.empty + stage, sync.phase_of(block, stages.count) ^ 1)
    return stage


@cute.jit
def expect(stages: Stages, stage: Int32, num_bytes: Constexpr[int]):
    """Announce the TMA bytes of a stage whose A rows are gathered; the gathering warps arrive by `hand_over`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(stages.full + stage, num_bytes)


@cute.jit
def expect_alone(stages: Stages, stage: Int32, num_bytes: Constexpr[int]):
    """Announce the TMA bytes of a stage that TMA fills alone: one thread arrives for the gathering warps too."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(stages.full + stage, num_bytes)
        sync.arrive_many(stages.full.toint() + stage * 8, Int32(GATHER_WARPS))


class Tma(NamedTuple):
    """One tensor map: the copy atom and the tensor of its coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Partition(NamedTuple):
    """A tensor map cut into boxes: source (or target) boxes in global and in shared memory."""

    atom: cute.CopyAtom
    gmem: cute.Tensor  # (box, *tile coordinates)
    smem: cute.Tensor  # (box, slot)


def view(pointer, shape: tuple[int, ...], stride: tuple[int, ...]):
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def flat(tensor):
    """A compact tensor as one mode."""
    return view(tensor.iterator, (cute.size(tensor),), (1,))


def allocate(smem, layout):
    """A swizzled bf16 tensor in shared memory."""
    return smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def region(workspace, offset: int, shape: tuple[int, int]):
    """Row-major bf16 matrix at byte `offset` of the workspace."""
    pointer = cute.make_ptr(BFloat16, workspace.iterator.toint() + offset, AddressSpace.gmem, assumed_align=1024)
    return view(pointer, shape, (shape[1], 1))


def load_map(tensor, layout, box: tuple[int, int]) -> Tma:
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)
    return Tma(made.atom, made.tma_tensor)


def store_map(tensor, layout, box: tuple[int, int]) -> Tma:
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box)
    return Tma(made.atom, made.tma_tensor)


def partition(tma: Tma, smem, box: tuple[int, int]) -> Partition:
    """Cut the map's tensor into boxes over its first two modes; further modes stay coordinates."""
    tiles = cute.local_tile(tma.tensor, box, (None,) * cute.rank(tma.tensor))
    smem_boxes, gmem_boxes = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return Partition(tma.atom, gmem_boxes, smem_boxes)


@cute.jit
def load_tile(sources: list, which: Int32, tile: tuple, slot: Int32, stages: Stages, stage: Int32):
    """Start the copy of one box of sources[which] into `slot`; its bytes complete on the full barrier of `stage`."""
    barrier = stages.full + stage
    for i in range_constexpr(len(sources)):
        if len(sources) == 1 or which == i:
            source = sources[i]
            cute.copy(source.atom, source.gmem[(None, *tile)], source.smem[(None, slot)], tma_bar_ptr=barrier)


@cute.jit
def store_tile(targets: list, which: Int32, tile: tuple, slot: Int32):
    """Start the store of the box in `slot` to box (row, column) of targets[which] as one bulk group.

    Boxes beyond the last column are left out here and not by clipping: where a tensor is one box wide, CuTe gives the
    column mode stride 0, and the store would land on column 0.
    """
    for i in range_constexpr(len(targets)):
        target = targets[i]
        if (len(targets) == 1 or which == i) and tile[1] < cute.size(target.gmem, mode=[2]):
            cute.copy(target.atom, target.smem[(None, slot)], target.gmem[(None, *tile)])
    cute.arch.cp_async_bulk_commit_group()
