"""What the tasks of one call share: tensors with a record of what is written, and counters.

Unwritten memory holds NaN (integers: a large negative number), so that a value that slips past the record shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mokgen.errors import VerifyError
from mokgen.facts.formats import FORMATS
from mokgen.plan.model import KernelPlan, LayerPlan, Signal, TaskKind, Wait
from mokgen.plan.tasks import Task

Tensor = torch.Tensor
POISON_INT = -0x5A5A5A5B


class UnwrittenReadError(VerifyError):
    """A task read cells that no finished task has written, or touched what its kind does not declare."""


class DeadlockError(VerifyError):
    """No task can move: each waits for a counter that nobody will raise."""


def poisoned(shape: tuple[int, ...], dtype: str) -> Tensor:
    kind = FORMATS[dtype].torch_dtype()
    return torch.full(shape, torch.nan if kind.is_floating_point else POISON_INT, dtype=kind)


class Buffer:
    """A tensor (rows,) or (rows, columns) and which of its cells are written; a cell is one row of `cell_columns`."""

    def __init__(self, name: str, value: Tensor, cell_columns: int, written: bool) -> None:
        self.name, self.value, self.cell_columns = name, value, cell_columns
        columns = value.shape[1] if value.ndim > 1 else 1
        self.written = torch.full((len(value), -(-columns // cell_columns)), written)

    def cells(self, columns: slice | None) -> slice:
        if columns is None or self.value.ndim == 1:
            return slice(0, self.written.shape[1])
        return slice(columns.start // self.cell_columns, -(-columns.stop // self.cell_columns))

    def read(self, rows: slice | Tensor, columns: slice | None, who: str) -> Tensor:
        index = rows.long() if isinstance(rows, Tensor) else rows
        state = self.written[index, self.cells(columns)]
        if not bool(state.all()):
            numbers = torch.arange(len(self.value))[index]
            missing = [int(number) for number in numbers[~state.all(1)][:4]]
            where = f"columns {columns.start}..{columns.stop - 1} of " if columns is not None else ""
            raise UnwrittenReadError(
                f"{who} reads {where}{self.name}, rows {missing}{'...' if len(missing) == 4 else ''}, not yet written",
                where=self.name,
            )
        return self.value[index] if columns is None or self.value.ndim == 1 else self.value[index, columns]

    def write(self, rows: slice, columns: slice, value: Tensor, who: str) -> None:
        cells = self.cells(columns)
        if bool(self.written[rows, cells].any()):
            raise UnwrittenReadError(f"{who} writes cells of {self.name} that are written already", where=self.name)
        self.value[rows, columns] = value
        self.written[rows, cells] = True


@dataclass(frozen=True)
class Write:
    """A finished value on its way to memory."""

    buffer: Buffer
    rows: slice
    columns: slice
    value: Tensor

    def part(self, index: int, parts: int) -> Write:
        """Every parts-th share of the tile's rows, as the units that signal own them."""
        rows = self.rows.stop - self.rows.start
        share = -(-rows // parts)
        begin = min(index * share, len(self.value))
        end = min(begin + share, len(self.value))
        return Write(
            self.buffer, slice(self.rows.start + begin, self.rows.start + end), self.columns, self.value[begin:end]
        )

    def store(self, who: str) -> None:
        if len(self.value):
            self.buffer.write(self.rows, self.columns, self.value, who)


class State:
    """Buffers, arguments and counters of one call of a kernel."""

    def __init__(
        self, plan: LayerPlan, kernel: KernelPlan, tensors: Mapping[str, Tensor], buffers: dict[str, Buffer]
    ) -> None:
        self.layer, self.kernel, self.tensors, self.buffers = plan.layer, kernel, tensors, buffers
        self.lengths = {counter.name: counter.length for counter in plan.counters if counter.purpose == "ready"}
        self.tokens = len(tensors["x"])
        self.counters: defaultdict[tuple[str, int], int] = defaultdict(int)

    def satisfied(self, task: Task, wait: Wait) -> bool:
        return self.counters[wait.counter, task.index(wait.index)] >= wait.want(task.environment)

    def describe(self, task: Task, wait: Wait) -> str:
        key = (wait.counter, task.index(wait.index))
        return (
            f"{task.name} waits for {key[0]}[{key[1]}]: have {self.counters[key]}, want {wait.want(task.environment)}"
        )

    def signal(self, task: Task, signal: Signal, amount: int) -> None:
        index = task.index(signal.index)
        if index >= self.lengths.get(signal.counter, 0):
            raise VerifyError(f"{task.name} signals {signal.counter}[{index}], which the plan has not", signal.counter)
        self.counters[signal.counter, index] += amount


class View:
    """stages.base.TileView of one task: reads are checked against the record and against what the kind declares."""

    def __init__(self, state: State, task: Task) -> None:
        self._state, self._task = state, task
        self.layer, self.tokens = state.layer, state.tokens
        self.expert, self.rows, self.columns = task.expert, task.rows, task.columns
        self.writes: list[Write] = []

    def argument(self, name: str) -> Tensor:
        if all(argument.name != name for argument in self._state.kernel.arguments):
            raise UnwrittenReadError(f"{self._task.name} uses {name}, which is no argument of the kernel", where=name)
        return self._state.tensors[name]

    def read(self, name: str, rows: slice | Tensor, columns: slice | None = None) -> Tensor:
        self._declared(self._task.kind, name, rows, columns)
        return self._state.buffers[name].read(rows, columns, self._task.name)

    def write(self, name: str, value: Tensor) -> None:
        if all(access.tensor != name for access in self._task.kind.writes):
            raise UnwrittenReadError(f"{self._task.name} writes {name} without declaring it", where=name)
        self.writes.append(Write(self._state.buffers[name], self.rows, self.columns, value))

    def _declared(self, kind: TaskKind, name: str, rows: slice | Tensor, columns: slice | None) -> None:
        """Refuse a read outside the cells the plan says the kind touches."""
        access = next((entry for entry in kind.reads if entry.tensor == name), None)
        inside = access is not None
        if access is not None and access.rows == "tile":
            inside = isinstance(rows, slice) and self.rows.start <= rows.start <= rows.stop <= self.rows.stop
        if access is not None and access.columns == "tile":
            inside = inside and columns is not None
            inside = inside and columns.start >= self.columns.start and columns.stop <= self.columns.stop  # type: ignore[union-attr]
        if not inside:
            raise UnwrittenReadError(f"{self._task.name} reads {name} beyond what its kind declares", where=name)
