"""What a stage asks of the plan: tensors in the workspace, tasks, arguments. No offsets, tickets or counters here.

A stage names the tensors its tasks read and write; which counters make that safe is the plan's work. So a new stage
(a backward GEMM, a dispatch of expert parallelism) brings requests and no schedule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from mokgen.ir.tensor import Extent


@dataclass(frozen=True)
class TileConfig:
    """Tile decisions of one kernel, in elements unless named otherwise."""

    tile_m: int  # rows of a GEMM tile
    tile_n: int  # columns of the accumulator: 256, or 128 gate and 128 up columns side by side
    tile_k: int  # reduction extent of one pipeline stage
    stages: int  # pipeline stages of the operand ring
    slab_tiles: int  # column tiles of the last GEMM that make one slab
    num_slabs: int
    group_blocks: int  # row blocks that share their column tiles before the next row blocks are taken
    reduce_tokens: int  # tokens of one reduce item
    consumer_lag: int  # K blocks the second consumer warpgroup runs behind the first
    gathers_in_flight: int  # K blocks of gathered rows a load warp leaves under way before it hands the oldest over
    task_slots: int  # tasks a CTA claims ahead

    @property
    def hidden_columns(self) -> int:
        """Activation columns of one gate|up tile: half of the accumulator's columns."""
        return self.tile_n // 2


@dataclass(frozen=True)
class TileSpace:
    """The tiles of a task kind: row blocks of `rows` by column tiles.

    `rows` names a run-time count of row blocks: "row_blocks" (pool rows, one segment per expert), "shared_blocks"
    (tokens in blocks of `tile_rows`) or "token_blocks" (the same for the reduction).
    """

    rows: str
    tile_rows: int
    tile_columns: int  # output columns of one tile
    columns: int  # output columns in all
    column_tiles: int
    k_blocks: int  # pipeline stages one tile consumes; 0: no GEMM


@dataclass(frozen=True)
class Access:
    """Cells of a tensor that a task touches.

    rows: "tile" (the task's own row block), "any" (rows found through a table; every row counts as touched).
    columns: "tile" (the task's own columns), "all".
    """

    tensor: str
    rows: str
    columns: str


@dataclass(frozen=True)
class Step:
    """One entry of the op x role matrix: `role` works on the task by `call`, a function of the device library."""

    role: str
    call: str


@dataclass(frozen=True)
class RegionRequest:
    """A workspace tensor. Extents may be names the plan resolves; `cell` is the granule in which it is written."""

    name: str
    dtype: str
    shape: tuple[Extent, ...]
    cell: tuple[int, ...]
    meaning: str


@dataclass(frozen=True)
class TaskRequest:
    """A kind of task of a persistent kernel."""

    name: str
    code: int  # number of the kind in task records and post-mortems
    queue: str  # "main" | "reduce"
    priority: int  # order inside one phase of the queue, ascending
    slabs: str  # "none"; "tiles": its column tiles go slab by slab; "whole": one tile per slab
    gathers: bool  # every load warp brings rows of A; all such tasks precede the others of their queue
    space: TileSpace
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    steps: tuple[Step, ...]
    waiter: str  # role that waits for the counters of the task's reads
    signaller: str  # role that signals once the task's writes are visible
    signal_unit: str  # who of that role signals, each once per task: "group" (warpgroup) or "one"
    deferred: bool  # the signal may wait for the end of the signaller's next task of the same kind


@dataclass(frozen=True)
class Argument:
    """A kernel argument. shape None: a scalar; equal names in shapes mean equal extents."""

    name: str
    dtype: str
    shape: tuple[Extent, ...] | None


@dataclass(frozen=True)
class StageRequest:
    """Everything one stage asks for."""

    regions: tuple[RegionRequest, ...] = ()
    tasks: tuple[TaskRequest, ...] = ()
    arguments: tuple[Argument, ...] = ()
