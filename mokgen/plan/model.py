"""The plan as plain data: frozen dataclasses of numbers and names, with an exact JSON round trip.

Whatever a kernel, the verifier, the CPU executor or a report needs to know is here once; nobody computes it again.
Required counts that depend on a call's routing are data too (`Count`), evaluated against named quantities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from mokgen.errors import PlanError
from mokgen.ir.requests import Access, Argument, Step, TileConfig, TileSpace
from mokgen.lower.layer import ResolvedLayer

PLAN_FORMAT = 1


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


@dataclass(frozen=True)
class Count:
    """factor * product of run-time quantities.

    Quantities: "row_blocks" (routed row blocks of the call), "shared_blocks", "token_blocks", "slab_width" (column
    tiles of the task's slab).
    """

    factor: int
    quantities: tuple[str, ...] = ()

    def value(self, environment: Mapping[str, int]) -> int:
        total = self.factor
        for name in self.quantities:
            total *= environment[name]
        return total

    def text(self) -> str:
        parts = [*([] if self.factor == 1 and self.quantities else [str(self.factor)]), *self.quantities]
        return " * ".join(parts)


@dataclass(frozen=True)
class Wait:
    """`role` waits until counter[index] >= the sum of `required`, one term per kind of task that signals it.

    index names a coordinate of the waiting task: "row" (its row block), "slab", or "zero".
    """

    counter: str
    index: str
    required: tuple[Count, ...]
    role: str

    def want(self, environment: Mapping[str, int]) -> int:
        return sum(count.value(environment) for count in self.required)

    def text(self) -> str:
        place = "" if self.index == "zero" else f"[{self.index}]"
        return f"{self.counter}{place} >= " + " + ".join(count.text() for count in self.required)


@dataclass(frozen=True)
class Signal:
    """A task adds `amount` to counter[index]: one for each `unit` of `role`, once that unit's writes are visible.

    A deferred signal may be sent as late as the end of the unit's next task, if that is of the same kind.
    """

    counter: str
    index: str
    amount: int
    role: str
    unit: str  # as in Party
    deferred: bool

    def text(self) -> str:
        place = "" if self.index == "zero" else f"[{self.index}]"
        return f"{self.counter}{place} += {self.amount}"


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: its tiles, what it touches, what it waits for, what it signals, and who works on it."""

    name: str
    code: int
    queue: str
    slabs: str  # "none" | "tiles" | "whole"
    gathers: bool
    space: TileSpace
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    waits: tuple[Wait, ...]
    signals: tuple[Signal, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Phase:
    """Part of a queue: all tiles of the kinds in order; `sliced` repeats that per slab, slab by slab."""

    kinds: tuple[str, ...]
    sliced: bool


@dataclass(frozen=True)
class Queue:
    """Tasks handed out by one ticket counter, in the order of its phases.

    `claimers` are roles that take tickets; `after` names for each the queue whose tasks it works on first.
    """

    name: str
    ticket: str  # counter
    phases: tuple[Phase, ...]
    claimers: tuple[str, ...]
    after: tuple[str, ...]  # per claimer: a queue, or ""


@dataclass(frozen=True)
class Counter:
    """int32 words of the counters region: `length` words from word `word`."""

    name: str
    word: int
    length: int
    purpose: str  # "ticket" | "flag" | "ready"
    meaning: str


@dataclass(frozen=True)
class Region:
    """A tensor in the workspace. `cell` is the granule in which it is written; writer and readers are stages."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    cell: tuple[int, ...]
    writer: str
    readers: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class SharedRegion:
    """Bytes of shared memory of a CTA."""

    name: str
    offset: int
    bytes: int
    align: int
    meaning: str


@dataclass(frozen=True)
class WarpRole:
    """Warps first_warp .. first_warp + num_warps - 1 of a CTA. registers 0: left to the compiler."""

    name: str
    code: int  # number in wait records
    first_warp: int
    num_warps: int
    registers: int


@dataclass(frozen=True)
class Party:
    """Who arrives.

    unit: each "thread", "warp" or "group" (warpgroup) of the role, each "thread_of_group" of one of its warpgroups, or
    "one" thread of the role.
    """

    role: str
    unit: str


@dataclass(frozen=True)
class Barrier:
    """An mbarrier and the arrivals that complete one phase of it."""

    arrivals: int
    parties: tuple[Party, ...]


@dataclass(frozen=True)
class NamedBarrier:
    """Hardware barriers number .. number + copies - 1, one per warpgroup of the party's role, `threads` each."""

    name: str
    number: int
    copies: int
    threads: int
    party: Party


@dataclass(frozen=True)
class Pipeline:
    """A ring of `stages` buffers with a full and an empty mbarrier per stage."""

    name: str
    stages: int
    full: Barrier
    empty: Barrier
    buffers: tuple[str, ...]  # shared-memory regions the ring hands over


@dataclass(frozen=True)
class Constant:
    """A number the generated text names. `section` is the heading it stands under."""

    section: str
    name: str
    value: int


@dataclass(frozen=True)
class Choice:
    """A knob: the value taken, whether the spec set it, and the reason or the numbers behind the default."""

    name: str
    value: int
    source: str  # "derived" | "spec"
    reason: str


@dataclass(frozen=True)
class KernelPlan:
    """One launch. Kernels without tasks (route, schedule) have one role and no queue."""

    name: str
    arguments: tuple[Argument, ...]
    roles: tuple[WarpRole, ...]
    threads: int
    cluster: int
    grid: str  # "ctas": a launch argument; "cluster": one cluster; "tokens": from the number of tokens
    tiles: TileConfig | None
    kinds: tuple[TaskKind, ...]
    queues: tuple[Queue, ...]
    pipelines: tuple[Pipeline, ...]
    named_barriers: tuple[NamedBarrier, ...]
    shared: tuple[SharedRegion, ...]
    shared_bytes: int
    constants: tuple[Constant, ...]

    def kind(self, name: str) -> TaskKind:
        return _named(self.kinds, name, f"task kind of {self.name}")

    def queue(self, name: str) -> Queue:
        return _named(self.queues, name, f"queue of {self.name}")

    def role(self, name: str) -> WarpRole:
        return _named(self.roles, name, f"role of {self.name}")

    def pipeline(self, name: str) -> Pipeline:
        return _named(self.pipelines, name, f"pipeline of {self.name}")

    def constant(self, name: str) -> int:
        return int(_named(self.constants, name, f"constant of {self.name}").value)

    def has_constant(self, name: str) -> bool:
        return any(constant.name == name for constant in self.constants)


@dataclass(frozen=True)
class LayerPlan:
    """All launches of a layer in launch order, and the workspace they share."""

    layer: ResolvedLayer
    arch: str
    kernels: tuple[KernelPlan, ...]
    regions: tuple[Region, ...]
    counters: tuple[Counter, ...]
    workspace_bytes: int
    choices: tuple[Choice, ...]

    def kernel(self, name: str) -> KernelPlan:
        return _named(self.kernels, name, "kernel")

    def region(self, name: str) -> Region:
        return _named(self.regions, name, "region")

    def counter(self, name: str) -> Counter:
        return _named(self.counters, name, "counter")

    def has_region(self, name: str) -> bool:
        return any(region.name == name for region in self.regions)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["layer"] = self.layer.to_dict()
        return {"format": PLAN_FORMAT, **data}

    def to_json(self) -> str:
        """Deterministic text: equal plans give equal bytes."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerPlan:
        from pydantic import TypeAdapter, ValidationError  # the edge: plain data from outside

        if data.get("format") != PLAN_FORMAT:
            raise PlanError(f"plan format {data.get('format')!r}; this version reads {PLAN_FORMAT}", where="plan.json")
        rest = {name: value for name, value in data.items() if name != "format"}
        try:
            plan = TypeAdapter(cls).validate_python({**rest, "layer": ResolvedLayer.from_dict(rest["layer"])})
        except (ValidationError, ValueError, KeyError) as error:
            raise PlanError(f"not a plan: {error}", where="plan.json", hint="build the layer again") from error
        if json.loads(plan.to_json()) != json.loads(json.dumps(data)):
            raise PlanError("fields that no plan has", where="plan.json", hint="build the layer again")
        return plan

    @classmethod
    def from_json(cls, text: str) -> LayerPlan:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(f"not JSON: {error}", where="plan.json", hint="build the layer again") from error
        return cls.from_dict(data)


def _named(items: tuple[T, ...], name: str, what: str) -> T:
    for item in items:
        if item.name == name:
            return item
    raise PlanError(f"no {what} is called {name}; there are: {', '.join(item.name for item in items)}")
