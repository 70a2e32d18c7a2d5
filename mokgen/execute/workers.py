"""Order of the tasks: ticket order, or seeded interleavings of virtual CTAs.

A virtual CTA is a main worker, which claims tickets ahead as its scheduler warp would, and reduce workers. A worker
moves in small steps: claim, wait, compute, store a share of the rows, signal it. The seed decides who moves next.
Workers stay at a wait until the counter suffices; when nobody can move, that is a deadlock of the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from mokgen.execute.state import DeadlockError, State, View
from mokgen.plan.model import Signal, Wait
from mokgen.plan.roles import units_of
from mokgen.plan.tasks import Task
from mokgen.stages.registry import STAGES

Blocked = tuple[Task, Wait]
Steps = Iterator[Blocked | None]  # None: may move on; else: not before this wait holds
LATE_CLAIMERS = 1  # of a CTA's consumer warps that join the reduction: one stands for all
CHANGE_CHANCE = 0.03  # of a step to move a worker in the order of preference


@dataclass
class Board:
    """Tickets of every queue."""

    tasks: dict[str, list[Task]]
    next: dict[str, int] = field(default_factory=dict)

    def claim(self, queue: str) -> Task | None:
        """The next task of a queue, None once it is empty."""
        ticket = self.next.get(queue, 0)
        self.next[queue] = ticket + 1
        tasks = self.tasks[queue]
        return tasks[ticket] if ticket < len(tasks) else None


@dataclass
class Pending:
    """Signals of a finished task that its units still hold back."""

    task: Task
    shares: list[tuple[Signal, int]]

    def send(self, state: State) -> None:
        for signal, amount in self.shares:
            state.signal(self.task, signal, amount)


def run_in_order(state: State, tasks: dict[str, list[Task]]) -> None:
    """Every queue in ticket order, one after the other; a wait that does not hold at once never will."""
    for queue in tasks.values():
        for task in queue:
            for step in task_steps(state, task, Random(0), [], False):
                if step is not None:
                    raise DeadlockError(f"in ticket order {state.describe(*step)}", where=task.kind.name)


def task_steps(state: State, task: Task, random: Random, held: list[Pending], defer: bool) -> Steps:
    """One task. `held` are signals of the worker's task before; this one's are left there where it may defer them."""
    if held and held[0].task.kind is not task.kind:
        yield from flush(state, held)
    for wait in task.kind.waits:
        while not state.satisfied(task, wait):
            yield task, wait
    view = View(state, task)
    run_tile = STAGES[task.kind.name].run_tile
    assert run_tile is not None, f"{task.kind.name} has no task function"
    run_tile(view)
    yield None
    yield from flush(state, held)
    parts = max((units_of(state.kernel.role(s.role), s.unit) for s in task.kind.signals), default=1)
    order = list(range(parts))
    random.shuffle(order)
    for part in order:
        for write in view.writes:
            write.part(part, parts).store(task.name)
        yield None
        shares = [(s, s.amount // parts + (part < s.amount % parts)) for s in task.kind.signals]
        pending = Pending(task, shares)
        if defer and all(signal.deferred for signal in task.kind.signals):
            held.append(pending)
        else:
            pending.send(state)
            yield None


def flush(state: State, held: list[Pending]) -> Steps:
    while held:
        held.pop(0).send(state)
        yield None


def claimer(state: State, board: Board, queue: str, depth: int, defer: bool, random: Random) -> Steps:
    """A worker of one queue that keeps up to `depth` tasks claimed."""
    claimed: deque[Task | None] = deque()
    held: list[Pending] = []
    while True:
        while len(claimed) < depth and (not claimed or claimed[-1] is not None):
            claimed.append(board.claim(queue))
            yield None
        task = claimed.popleft()
        if task is None:
            break
        yield from task_steps(state, task, random, held, defer)
    yield from flush(state, held)


def in_turn(*parts: Steps) -> Steps:
    for part in parts:
        yield from part


def cta_workers(state: State, board: Board, random: Random) -> list[Steps]:
    """Workers of one virtual CTA: per queue the claimers of each role, late ones behind the queue they come from."""
    tiles = state.kernel.tiles
    assert tiles is not None

    def worker(queue: str) -> Steps:
        slots = tiles.task_slots if queue == "main" else 1
        return claimer(state, board, queue, random.randint(1, slots), random.random() < 0.5, random)

    workers = {queue.name: [worker(queue.name)] for queue in state.kernel.queues if "main" == queue.name}
    extra: list[Steps] = []
    for queue in state.kernel.queues:
        for role, after in zip(queue.claimers, queue.after, strict=True):
            if after in workers:
                late = [worker(queue.name) for _ in range(LATE_CLAIMERS)]
                workers[after] = [in_turn(first, *late) for first in workers[after]]
            elif queue.name not in workers:
                extra += [worker(queue.name) for _ in range(state.kernel.role(role).num_warps)]
    return [entry for group in workers.values() for entry in group] + extra


def run_interleaved(state: State, tasks: dict[str, list[Task]], seed: int, virtual_ctas: int) -> None:
    """Let `virtual_ctas` CTAs run the tasks in an order drawn from `seed`.

    Even seeds draw the next worker evenly; odd seeds prefer workers in a random order that changes now and then, so
    that some stay far behind.
    """
    random = Random(seed)
    board = Board(tasks)
    workers = [worker for _ in range(virtual_ctas) for worker in cta_workers(state, board, random)]
    random.shuffle(workers)
    blocked: dict[int, Blocked] = {}
    alive = list(range(len(workers)))
    while alive:
        ready = [index for index in alive if index not in blocked or state.satisfied(*blocked[index])]
        if not ready:
            reasons = "; ".join(state.describe(*blocked[index]) for index in sorted(blocked)[:4])
            raise DeadlockError(f"nobody can move: {reasons}", where=state.kernel.name, hint=f"seed {seed}")
        index = random.choice(ready) if seed % 2 == 0 else ready[0]
        blocked.pop(index, None)
        try:
            step = next(workers[index])
        except StopIteration:
            alive.remove(index)
            continue
        if step is not None:
            blocked[index] = step
        if seed % 2 and random.random() < CHANGE_CHANCE:
            alive.remove(index)
            alive.insert(random.randint(0, len(alive)), index)
