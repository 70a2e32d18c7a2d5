"""Pipelines and named barriers of the forward kernel. Arrival counts follow from who takes part; `verify` derives them
again and compares."""

from __future__ import annotations

from collections.abc import Mapping

from mokgen.errors import PlanError
from mokgen.ir.requests import TileConfig
from mokgen.plan.model import Barrier, NamedBarrier, Party, Pipeline, TaskKind, WarpRole
from mokgen.plan.roles import LOAD, MMA, SCHEDULER, units_of

FIRST_NAMED_BARRIER = 1  # barrier 0 is that of sync_threads


def arrivals_of(parties: tuple[Party, ...], roles: Mapping[str, WarpRole]) -> int:
    """Arrivals one phase of a barrier gets."""
    total = 0
    for party in parties:
        units = units_of(roles[party.role], party.unit) if party.role in roles else 0
        if units == 0:
            known = ", ".join(roles)
            raise PlanError(f"no {party.unit} of a role {party.role}; roles: {known}", where="pipelines")
        total += units
    return total


def working_roles(kinds: tuple[TaskKind, ...], roles: tuple[WarpRole, ...], gathering: bool = False) -> tuple[str, ...]:
    """Roles with a step in the main queue (in its gathering tasks), in warp order."""
    used = {step.role for kind in kinds if kind.queue == "main" and kind.gathers >= gathering for step in kind.steps}
    return tuple(role.name for role in roles if role.name in used)


def forward_pipelines(
    tiles: TileConfig, roles: tuple[WarpRole, ...], kinds: tuple[TaskKind, ...]
) -> tuple[Pipeline, ...]:
    """Operand ring and task ring.

    A full operand stage has the arrivals of whoever gathers and one that announces the TMA bytes; tiles that TMA loads
    whole arrive once with that same number, so that one barrier serves both. Every warp that works on tasks gives each
    record back once; once a kind gathers nothing, the load warp does so for the warps that left.
    """
    table = {role.name: role for role in roles}
    gatherers = tuple(name for name in working_roles(kinds, roles, gathering=True) if name != MMA)
    full = (*(Party(name, "warp") for name in gatherers), Party(LOAD, "one"))
    readers = tuple(Party(name, "warp") for name in working_roles(kinds, roles))
    return (
        Pipeline(
            name="stage",
            stages=tiles.stages,
            full=Barrier(arrivals_of(full, table), full),
            empty=Barrier(arrivals_of((Party(MMA, "warp"),), table), (Party(MMA, "warp"),)),
            buffers=("operand_a", "operand_b"),
        ),
        Pipeline(
            name="task",
            stages=tiles.task_slots,
            full=Barrier(1, (Party(SCHEDULER, "one"),)),
            empty=Barrier(arrivals_of(readers, table), readers),
            buffers=("task_records",),
        ),
    )


def forward_named_barriers(roles: tuple[WarpRole, ...]) -> tuple[NamedBarrier, ...]:
    """One barrier per consumer warpgroup around its output chunks."""
    mma = next(role for role in roles if role.name == MMA)
    party = Party(MMA, "thread_of_group")
    groups = units_of(mma, "group")
    return (NamedBarrier("out_chunks", FIRST_NAMED_BARRIER, groups, units_of(mma, party.unit), party),)


def barrier_count(pipelines: tuple[Pipeline, ...]) -> int:
    """mbarriers of all pipelines: a full and an empty one per stage."""
    return sum(2 * pipeline.stages for pipeline in pipelines)
