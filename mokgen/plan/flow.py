"""Task order, counts and races of a kernel, proven on small calls listed task by task.

The calls keep the structure (tiles, slabs, kinds, counters) and scale tokens and experts down. Nothing is taken from
how the waits were derived: who writes and who reads a cell is found from the tasks, and each read must be ordered
behind its write by a wait whose count cannot be reached without that write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx

from mokgen.ir.requests import Access
from mokgen.plan.findings import Finding
from mokgen.plan.model import KernelPlan, LayerPlan, TaskKind, Wait
from mokgen.plan.tasks import Problem, Task, instantiate, quantities
from mokgen.stages.base import TILE_ROWS, ceil_div

Key = tuple[str, int]  # counter, index
Cell = tuple[int, int]  # row block, column tile of the writer
SMALL_EXPERTS = 4
SMALL_TOKENS = (130, 257)  # two and three blocks of tokens, the last one ragged
SMALL_ROUTES = 640


def problems(plan: LayerPlan) -> list[Problem]:
    """Small calls: no token, one token, balanced, experts without rows, one expert, ragged, no route at all."""
    layer = plan.layer
    experts = min(layer.num_local_experts, SMALL_EXPERTS)
    found = [Problem(0, (0,) * experts), Problem(1, (1,) + (0,) * (experts - 1))]
    for tokens in sorted({min(layer.max_tokens, size) for size in SMALL_TOKENS}):
        routes = min(tokens * layer.top_k, SMALL_ROUTES)
        for shares in ((1,) * experts, (0, 2, 0, 1)[:experts], (0, 0, 1, 0)[-experts:], (1, 5, 0, 2)[:experts]):
            total = sum(shares) or 1
            counts = [routes * share // total for share in shares]
            found.append(Problem(tokens, tuple(ceil_div(count, TILE_ROWS) for count in counts)))
        found.append(Problem(tokens, (0,) * experts))
    return list(dict.fromkeys(found))


@dataclass
class Call:
    """The tasks of one call and what they signal and write."""

    plan: LayerPlan
    kernel: KernelPlan
    problem: Problem
    tasks: dict[str, list[Task]] = field(default_factory=dict)  # by queue, in ticket order
    totals: dict[Key, int] = field(default_factory=dict)
    signallers: dict[Key, list[Task]] = field(default_factory=dict)
    writers: dict[str, dict[Cell, Task]] = field(default_factory=dict)  # by tensor
    writing_kind: dict[str, TaskKind] = field(default_factory=dict)

    def keys_of(self, task: Task) -> Iterator[tuple[Key, int]]:
        for signal in task.kind.signals:
            yield (signal.counter, task.index(signal.index)), signal.amount

    def key_of(self, task: Task, wait: Wait) -> Key:
        return wait.counter, task.index(wait.index)


def check_flow(plan: LayerPlan, kernel: KernelPlan) -> list[Finding]:
    """All findings about the tasks of a kernel; one per rule and task kind."""
    findings: dict[tuple[str, str], Finding] = {}
    for problem in problems(plan):
        for finding in _check_problem(plan, kernel, problem):
            findings.setdefault((finding.rule, finding.where), finding)
    return list(findings.values())


def _check_problem(plan: LayerPlan, kernel: KernelPlan, problem: Problem) -> Iterator[Finding]:
    call = Call(plan, kernel, problem)
    call.writing_kind = {access.tensor: kind for kind in kernel.kinds for access in kind.writes}
    for queue in kernel.queues:
        call.tasks[queue.name] = instantiate(kernel, problem, queue.name)
    yield from _collect(call)
    yield from _check_waits(call)
    yield from _check_order(call)
    yield from _check_cycles(call)
    yield from _check_coverage(call)
    yield from _check_reads(call)


def _collect(call: Call) -> Iterator[Finding]:
    """Fill totals and writers; a cell written twice is a finding."""
    for task in (task for tasks in call.tasks.values() for task in tasks):
        for key, amount in call.keys_of(task):
            call.totals[key] = call.totals.get(key, 0) + amount
            call.signallers.setdefault(key, []).append(task)
        for access in task.kind.writes:
            cells = call.writers.setdefault(access.tensor, {})
            cell = (task.row_block, task.column_tile)
            if cell in cells:
                other = cells[cell].name
                yield Finding(
                    "written once", task.kind.name, f"{task.name} and {other} both write {access.tensor}{cell}"
                )
            cells[cell] = task


def _check_waits(call: Call) -> Iterator[Finding]:
    """Required counts equal what is signalled; counters exist and are long enough; every signal is waited for."""
    counters = {counter.name: counter for counter in call.plan.counters if counter.purpose == "ready"}
    waited = set()
    for task in (task for tasks in call.tasks.values() for task in tasks):
        for wait in task.kind.waits:
            key = call.key_of(task, wait)
            waited.add(key)
            want, have = wait.want(task.environment), call.totals.get(key, 0)
            if want != have:
                what = f"{task.name} waits for {key[0]}[{key[1]}] >= {want}, but {have} arrive in all"
                yield Finding("required count", task.kind.name, what, "every arrival is required, and no more")
        for name, index in [*(key for key, _ in call.keys_of(task)), *(call.key_of(task, w) for w in task.kind.waits)]:
            if name not in counters:
                yield Finding("counter", task.kind.name, f"{task.name} uses {name}, which is no counter of the plan")
            elif index >= counters[name].length:
                what = f"{task.name} uses {name}[{index}], which has {counters[name].length} words"
                yield Finding("counter", task.kind.name, what)
    for name in sorted({key[0] for key in call.totals} - {key[0] for key in waited}):
        if call.tasks and any(call.tasks.values()):
            yield Finding("counter", name, f"{name} is signalled, and no task waits for it")


def _check_order(call: Call) -> Iterator[Finding]:
    """Inside a queue nobody waits for a later ticket; a role that leaves a queue is not needed there afterwards."""
    for name, tasks in call.tasks.items():
        last = {
            key: max(task.ticket for task in found if task.kind.queue == name)
            for key, found in call.signallers.items()
            if any(task.kind.queue == name for task in found)
        }
        for task in tasks:
            for wait in task.kind.waits:
                later = last.get(call.key_of(task, wait), -1)
                if later >= task.ticket:
                    what = f"ticket {task.ticket} {task.name} waits for {tasks[later].name} of ticket {later}"
                    yield Finding("later ticket", task.kind.name, what)
    for queue in call.kernel.queues:
        for role, after in zip(queue.claimers, queue.after, strict=True):
            if after == "":
                yield from _check_leaving(call, queue.name, role)


def _check_leaving(call: Call, queue: str, role: str) -> Iterator[Finding]:
    """A role that turns to `queue` on its own must be needed by a prefix of every other queue only."""
    for name, tasks in call.tasks.items():
        if name == queue:
            continue
        needed = [any(step.role == role for step in task.kind.steps) for task in tasks]
        first_without = needed.index(False) if False in needed else len(needed)
        if any(needed[first_without:]):
            late = tasks[first_without + needed[first_without:].index(True)]
            what = f"{role} warps leave queue {name} at {tasks[first_without].name}, but {late.name} needs them"
            yield Finding("role leaves", late.kind.name, what, "tasks that gather rows precede those that do not")


def _check_cycles(call: Call) -> Iterator[Finding]:
    """No circle of waits, neither between tasks nor between queues."""
    graph: nx.DiGraph[object] = nx.DiGraph()
    queues: nx.DiGraph[str] = nx.DiGraph()
    for name, tasks in call.tasks.items():
        for task in tasks:
            node = (name, task.ticket)
            graph.add_edges_from((node, key) for key, _ in call.keys_of(task))
            for wait in task.kind.waits:
                key = call.key_of(task, wait)
                graph.add_edge(key, node)
                for other in {entry.kind.queue for entry in call.signallers.get(key, [])} - {name}:
                    queues.add_edge(other, name)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [str(edge[0]) for edge in nx.find_cycle(graph)]
        yield Finding("cycle", call.kernel.name, "tasks wait for each other: " + " -> ".join(cycle[:8]))
    if not nx.is_directed_acyclic_graph(queues):
        cycle = [edge[0] for edge in nx.find_cycle(queues)]
        yield Finding("cycle", call.kernel.name, "queues wait for each other: " + " -> ".join(cycle))


def _check_coverage(call: Call) -> Iterator[Finding]:
    """Every cell of what a kind writes is written: all its row blocks times all its column tiles."""
    rows = quantities(call.kernel, call.problem)
    for tensor, cells in call.writers.items():
        kind = call.writing_kind[tensor]
        expected = rows[kind.space.rows] * ceil_div(kind.space.columns, kind.space.tile_columns)
        if len(cells) != expected:
            yield Finding("coverage", kind.name, f"{len(cells)} of {expected} cells of {tensor} are written")


def _check_reads(call: Call) -> Iterator[Finding]:
    """Each cell a task reads is written in an earlier launch, or behind one of the task's waits."""
    done: set[tuple[object, ...]] = set()
    for task in (task for tasks in call.tasks.values() for task in tasks):
        for access in task.kind.reads:
            if access.tensor not in call.writing_kind:
                continue  # of an earlier launch
            rows = task.row_block if access.rows == "tile" else None
            columns = None if access.columns == "all" else (task.columns.start, task.columns.stop)
            seen = (task.kind.name, access, rows, columns)
            if seen not in done:
                done.add(seen)
                yield from _check_read(call, task, access)


def _check_read(call: Call, task: Task, access: Access) -> Iterator[Finding]:
    guards = {
        key
        for key, want in ((call.key_of(task, wait), wait.want(task.environment)) for wait in task.kind.waits)
        if want >= call.totals.get(key, 0)
    }
    writer = call.writing_kind[access.tensor]
    if access.rows == "tile" and (writer.space.rows, writer.space.tile_rows) != (
        task.kind.space.rows,
        task.kind.space.tile_rows,
    ):
        yield Finding("read", task.kind.name, f"reads {access.tensor} by row blocks that {writer.name} does not have")
    for cell in _cells(call, task, access):
        source = call.writers.get(access.tensor, {}).get(cell)
        if source is None:
            yield Finding("read", task.kind.name, f"{task.name} reads {access.tensor}{cell}, which nobody writes")
        elif not any(key in guards for key, _ in call.keys_of(source)):
            what = f"{task.name} may read {access.tensor}{cell} before {source.name} has written it"
            yield Finding("read before write", task.kind.name, what)


def _cells(call: Call, task: Task, access: Access) -> Iterator[Cell]:
    """Cells, in tiles of the writer, that an access touches; "any" rows are all rows of the call."""
    space = call.writing_kind[access.tensor].space
    rows = quantities(call.kernel, call.problem)[space.rows]
    columns = range(ceil_div(space.columns, space.tile_columns))
    if access.columns == "tile":
        first, last = task.columns.start // space.tile_columns, ceil_div(task.columns.stop, space.tile_columns)
        columns = range(first, last)
    for row in [task.row_block] if access.rows == "tile" else range(rows):
        for column in columns:
            yield row, column
