"""Tasks: counters, waits and signals derived from who reads what; and the tasks of one call, one by one.

Kinds are plain data. `instantiate` lists the tasks of a call in ticket order from the call's row blocks alone, which is
all the verifier and the CPU executor need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mokgen.errors import PlanError
from mokgen.ir.requests import Access, TaskRequest, TileConfig
from mokgen.plan.model import Count, Counter, KernelPlan, Phase, Queue, Signal, TaskKind, Wait, WarpRole
from mokgen.plan.roles import MMA, REDUCE, SCHEDULER, units_of
from mokgen.stages.base import TILE_ROWS, ceil_div

WORD_STEP = 32  # 128 bytes: hot words share no cache line
ROW_LENGTHS = {"row_blocks": "B_MAX", "shared_blocks": "SB_MAX"}
SLAB_DONE = "slab_done"
TICKETS = {"main": "ticket", "reduce": "reduce_ticket"}
ERROR_FLAG = "error"


@dataclass(frozen=True)
class Edge:
    """A tensor that tasks of `producer` write and tasks of `consumer` read, inside one launch."""

    producer: TaskRequest
    consumer: TaskRequest
    access: Access

    @property
    def counter(self) -> tuple[str, str]:
        """(counter name, index) whose completion makes the read safe."""
        if self.access.rows == "tile" and self.access.columns == "all":
            if self.producer.space.rows != self.consumer.space.rows:
                raise PlanError(f"{self.consumer.name} reads {self.access.tensor} by row blocks of another row space")
            return f"{self.access.tensor}_ready", "row"
        if self.access.columns == "tile" and "none" not in (self.producer.slabs, self.consumer.slabs):
            return SLAB_DONE, "slab"
        return f"{self.access.tensor}_done", "zero"

    def required(self, amount: int) -> Count:
        """What the producer's tasks add to one index of the counter, `amount` each."""
        _, index = self.counter
        if index == "row":
            return Count(amount * self.producer.space.column_tiles)
        if index == "slab":
            return Count(amount, ("slab_width", self.producer.space.rows))
        return Count(amount * self.producer.space.column_tiles, (self.producer.space.rows,))


def find_edges(requests: tuple[TaskRequest, ...]) -> tuple[Edge, ...]:
    writers = {access.tensor: request for request in requests for access in request.writes}
    return tuple(
        Edge(writers[access.tensor], request, access)
        for request in requests
        for access in request.reads
        if access.tensor in writers
    )


def derive_kinds(requests: tuple[TaskRequest, ...], roles: tuple[WarpRole, ...]) -> tuple[TaskKind, ...]:
    """Task kinds with the waits and signals their reads and writes call for, by code."""
    table = {role.name: role for role in roles}
    amounts = {entry.name: units_of(table[entry.signaller], entry.signal_unit) for entry in requests}
    edges = find_edges(requests)
    kinds = []
    for request in sorted(requests, key=lambda entry: entry.code):
        required: dict[tuple[str, str], list[Count]] = {}
        for edge in edges:
            if edge.consumer is request:
                required.setdefault(edge.counter, []).append(edge.required(amounts[edge.producer.name]))
        waits = tuple(Wait(name, index, tuple(sums), request.waiter) for (name, index), sums in required.items())
        given = dict.fromkeys(edge.counter for edge in edges if edge.producer is request)
        signals = tuple(
            Signal(name, index, amounts[request.name], request.signaller, request.signal_unit, request.deferred)
            for name, index in given
        )
        kinds.append(
            TaskKind(
                name=request.name,
                code=request.code,
                queue=request.queue,
                slabs=request.slabs,
                gathers=request.gathers,
                space=request.space,
                reads=request.reads,
                writes=request.writes,
                waits=waits,
                signals=signals,
                steps=request.steps,
            )
        )
    return tuple(kinds)


def derive_counters(
    requests: tuple[TaskRequest, ...], tiles: TileConfig, sizes: Mapping[str, int]
) -> tuple[Counter, ...]:
    """Tickets and error flag on lines of their own, then one counter per derived wait, in the order of the requests."""
    counters = [
        Counter(TICKETS["main"], 0, 1, "ticket", "next task of the main queue"),
        Counter(TICKETS["reduce"], WORD_STEP, 1, "ticket", "next item of the reduce queue"),
        Counter(ERROR_FLAG, 2 * WORD_STEP, 1, "flag", "1: a bounded wait of this launch has expired"),
    ]
    word = 3 * WORD_STEP
    found: dict[str, tuple[int, str]] = {}
    for edge in find_edges(tuple(sorted(requests, key=_counter_order))):
        name, index = edge.counter
        if index == "row":
            found[name] = (sizes[ROW_LENGTHS[edge.producer.space.rows]], f"tiles of {edge.access.tensor} per row block")
        elif index == "slab":
            found[name] = (tiles.num_slabs, "stored tiles per slab of the output's columns")
        else:
            found[name] = (1, f"stored tiles of {edge.access.tensor}")
    for name, (length, meaning) in found.items():
        counters.append(Counter(name, word, length, "ready", meaning))
        word += length
    return tuple(counters)


def _counter_order(request: TaskRequest) -> tuple[bool, int]:
    """Row-block counters of the routed path first, then the shared expert's, then those of the reduction."""
    return request.queue != "main", -request.priority


def make_queues(requests: tuple[TaskRequest, ...], depth: Mapping[str, int]) -> tuple[Queue, ...]:
    """Phases in order of the longest path from the inputs; the kinds of a phase by priority."""
    queues = []
    for name in dict.fromkeys(request.queue for request in sorted(requests, key=lambda entry: depth[entry.name])):
        members = [request for request in requests if request.queue == name]
        phases = []
        for level in sorted({depth[request.name] for request in members}):
            same = sorted((entry for entry in members if depth[entry.name] == level), key=lambda entry: entry.priority)
            sliced = {entry.slabs != "none" for entry in same}
            if len(sliced) > 1:
                raise PlanError(f"kinds of one phase must all go slab by slab or none: {[e.name for e in same]}")
            phases.append(Phase(tuple(entry.name for entry in same), sliced.pop()))
        claimers, after = ((REDUCE, MMA), ("", "main")) if name == "reduce" else ((SCHEDULER,), ("",))
        queues.append(Queue(name, TICKETS[name], tuple(phases), claimers, after))
    return tuple(queues)


@dataclass(frozen=True)
class Problem:
    """One call as the tasks see it: tokens, and row blocks of each expert."""

    tokens: int
    expert_blocks: tuple[int, ...]

    @property
    def row_blocks(self) -> int:
        return sum(self.expert_blocks)


@dataclass(frozen=True)
class Task:
    """One task of a call. Rows and columns are the cells of its output; `environment` values its required counts."""

    kind: TaskKind
    ticket: int  # position in its queue
    expert: int
    row_block: int
    column_tile: int
    slab: int
    environment: Mapping[str, int]

    @property
    def name(self) -> str:
        slab = f", slab {self.slab}" if self.kind.slabs != "none" else ""
        return f"{self.kind.name}(row block {self.row_block}, column tile {self.column_tile}{slab})"

    @property
    def rows(self) -> slice:
        size = self.kind.space.tile_rows
        return slice(self.row_block * size, (self.row_block + 1) * size)

    @property
    def columns(self) -> slice:
        size = self.kind.space.tile_columns
        return slice(self.column_tile * size, min((self.column_tile + 1) * size, self.kind.space.columns))

    def index(self, coordinate: str) -> int:
        return {"row": self.row_block, "slab": self.slab, "zero": 0}[coordinate]


def quantities(kernel: KernelPlan, problem: Problem) -> dict[str, int]:
    """Run-time quantities of a call that all tasks share."""
    assert kernel.tiles is not None
    shared = any(kind.space.rows == "shared_blocks" for kind in kernel.kinds)
    return {
        "row_blocks": problem.row_blocks,
        "shared_blocks": ceil_div(problem.tokens, TILE_ROWS) if shared else 0,
        "token_blocks": ceil_div(problem.tokens, kernel.tiles.reduce_tokens),
    }


def segments(kind: TaskKind, problem: Problem, shared: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """(expert, first row block, row blocks) of the kind's rows, in task order; empty segments have no tasks."""
    if kind.space.rows == "row_blocks":
        start = 0
        for expert, blocks in enumerate(problem.expert_blocks):
            if blocks:
                yield expert, start, blocks
            start += blocks
    elif shared[kind.space.rows]:
        yield 0, 0, shared[kind.space.rows]


def slab_width(tiles: TileConfig, column_tiles: int, slab: int) -> int:
    return min(tiles.slab_tiles, column_tiles - slab * tiles.slab_tiles)


def phase_columns(kernel: KernelPlan, kind: TaskKind, slab: int) -> range:
    """Column tiles of a kind in one slab; a kind whose tile spans the slab has one."""
    assert kernel.tiles is not None
    if kind.slabs == "none":
        return range(kind.space.column_tiles)
    if kind.slabs == "whole":
        return range(slab, slab + 1)
    first = slab * kernel.tiles.slab_tiles
    return range(first, first + slab_width(kernel.tiles, kind.space.column_tiles, slab))


def _grouped(kernel: KernelPlan, kind: TaskKind, slab: int, start: int, blocks: int) -> Iterator[tuple[int, int]]:
    """(row block, column tile) of a segment in task order."""
    assert kernel.tiles is not None
    for first in range(start, start + blocks, kernel.tiles.group_blocks):
        for column in phase_columns(kernel, kind, slab):
            for row in range(first, min(first + kernel.tiles.group_blocks, start + blocks)):
                yield row, column


def instantiate(kernel: KernelPlan, problem: Problem, queue: str) -> list[Task]:
    """Tasks of a queue in ticket order: per segment groups of row blocks, in a group row blocks before column tiles."""
    assert kernel.tiles is not None
    shared = quantities(kernel, problem)
    total_columns = max((kind.space.column_tiles for kind in kernel.kinds if kind.slabs == "tiles"), default=0)
    tasks: list[Task] = []
    for phase in kernel.queue(queue).phases:
        for slab in range(kernel.tiles.num_slabs if phase.sliced else 1):
            width = slab_width(kernel.tiles, total_columns, slab) if phase.sliced else 0
            environment = {**shared, "slab_width": width}
            for name in phase.kinds:
                kind = kernel.kind(name)
                for expert, start, blocks in segments(kind, problem, shared):
                    for row, column in _grouped(kernel, kind, slab, start, blocks):
                        tasks.append(Task(kind, len(tasks), expert, row, column, slab, environment))
    return tasks
