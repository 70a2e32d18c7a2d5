"""verify(plan): the rules a plan must keep, each derived again from the plan's own facts.

Small calls prove order, counts and races (`flow`); here are regions, counters, pipelines, registers, shared memory
and the constants that the text will name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from mokgen.errors import Diagnostic, PlanError, VerifyError
from mokgen.facts.arch import ARCHS
from mokgen.facts.formats import FORMATS
from mokgen.plan.barriers import barrier_count, working_roles
from mokgen.plan.constants import forward_constants, route_constants, schedule_constants
from mokgen.plan.findings import Finding
from mokgen.plan.flow import check_flow
from mokgen.plan.launches import SmallLaunch
from mokgen.plan.model import Barrier, Constant, KernelPlan, LayerPlan, Pipeline, Region
from mokgen.plan.regions import COUNTERS, REGION_ALIGN
from mokgen.plan.roles import GROUP_WARPS, WARP_THREADS, total_warps, units_of
from mokgen.plan.tiles import BF16_BYTES, TASK_WORDS
from mokgen.stages.base import TILE_ROWS, ceil_div
from mokgen.stages.registry import STAGES

INT32_MAX = 2**31 - 1
MIN_REGISTERS = 24  # least setmaxnreg takes


def verify(plan: LayerPlan) -> list[Finding]:
    """All broken rules; empty for a good plan. Time grows with the column tiles, not with tokens or experts."""
    findings = [*_check_regions(plan), *_check_counters(plan), *_check_capacity(plan)]
    for kernel in plan.kernels:
        findings += [*_check_warps(plan, kernel), *_check_shared(plan, kernel), *_check_arguments(plan, kernel)]
        findings += _check_constants(plan, kernel)
        if kernel.queues:
            findings += [*_check_kinds(plan, kernel), *_check_pipelines(kernel)]
            findings += check_flow(plan, kernel)
    return findings


def require(plan: LayerPlan) -> None:
    """Raise VerifyError with every finding."""
    findings = verify(plan)
    if findings:
        raise VerifyError([Diagnostic(f"[{f.rule}] {f.what}", f.where, f.hint) for f in findings])


def _check_regions(plan: LayerPlan) -> Iterator[Finding]:
    """Sizes follow from shapes; live regions share no byte; who reads comes after who writes."""
    launches = {kernel.name: index for index, kernel in enumerate(plan.kernels)}
    for region in plan.regions:
        size = prod(region.shape) * FORMATS[region.dtype].bytes
        if region.bytes != size:
            yield Finding("region size", region.name, f"{region.bytes} bytes, its shape {region.shape} takes {size}")
        if region.offset % REGION_ALIGN or region.offset < 0:
            yield Finding("region alignment", region.name, f"offset {region.offset} is no multiple of {REGION_ALIGN}")
        if region.offset + size > plan.workspace_bytes:
            yield Finding("region bounds", region.name, f"ends after the workspace of {plan.workspace_bytes} bytes")
        if len(region.cell) != len(region.shape):
            yield Finding("region cell", region.name, f"cell {region.cell} has not the rank of {region.shape}")
        uses = _uses(region, launches)
        if uses is None:
            yield Finding("region life", region.name, f"writer {region.writer} or a reader is no stage of the plan")
        elif uses[0] > min(uses):
            yield Finding("region life", region.name, f"read in launch {min(uses)} before {region.writer} writes it")
    for index, region in enumerate(plan.regions):
        for other in plan.regions[index + 1 :]:
            apart = region.offset + region.bytes <= other.offset or other.offset + other.bytes <= region.offset
            if not apart and _overlap(_uses(region, launches), _uses(other, launches)):
                yield Finding("region overlap", region.name, f"shares bytes with {other.name} while both are live")


def _kernel_of(stage: str) -> str | None:
    return STAGES[stage].kernel if stage in STAGES else None


def _uses(region: Region, launches: dict[str, int]) -> tuple[int, ...] | None:
    """Launch that writes, then those that read; None for a stage nobody knows."""
    stages = (region.writer, *region.readers)
    if any(_kernel_of(stage) not in launches for stage in stages):
        return None
    return tuple(launches[STAGES[stage].kernel] for stage in stages)


def _overlap(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    """Whether two lives, from the writing launch to the last use, share a launch; unknown lives are taken to."""
    if one is None or other is None:
        return True
    return one[0] <= max(other) and other[0] <= max(one)


def _check_counters(plan: LayerPlan) -> Iterator[Finding]:
    """Counters lie inside their region, apart from each other; the schedule kernel zeroes the region at every call."""
    region = next((entry for entry in plan.regions if entry.name == COUNTERS), None)
    if region is None:
        yield Finding("counter", COUNTERS, "the plan has no region for its counters")
        return
    if region.writer != "schedule":
        yield Finding("counter", COUNTERS, f"zeroed by {region.writer}; an aborted call would poison the next")
    ordered = sorted(plan.counters, key=lambda counter: counter.word)
    for counter in ordered:
        if counter.word < 0 or counter.length < 1 or counter.word + counter.length > region.shape[0]:
            what = f"words {counter.word}..{counter.word + counter.length - 1} of a region of {region.shape[0]} words"
            yield Finding("counter", counter.name, what)
    for before, after in pairwise(ordered):
        if before.word + before.length > after.word:
            yield Finding("counter", after.name, f"word {after.word} belongs to {before.name} too")
    for kernel in plan.kernels:
        names = {counter.name for counter in plan.counters if counter.purpose == "ticket"}
        for queue in kernel.queues:
            if queue.ticket not in names:
                yield Finding("counter", queue.name, f"its ticket {queue.ticket} is no counter of the plan")


def most_row_blocks(plan: LayerPlan) -> dict[str, int]:
    """Row blocks of the worst call: one row each for all experts but one, which takes the rest."""
    layer = plan.layer
    routes = layer.max_tokens * layer.top_k
    experts = min(layer.num_local_experts, routes)
    shared = ceil_div(layer.max_tokens, TILE_ROWS) if layer.shared.num > 0 else 0
    return {"row_blocks": experts + (routes - experts) // TILE_ROWS, "shared_blocks": shared}


def _check_capacity(plan: LayerPlan) -> Iterator[Finding]:
    """Regions and counters hold the worst call, and int32 counts do not wrap in it."""
    most = most_row_blocks(plan)
    counters = {counter.name: counter for counter in plan.counters}
    regions = {region.name: region for region in plan.regions}
    for kernel in plan.kernels:
        tickets = 0
        for kind in (kind for kind in kernel.kinds if kind.space.rows in most):
            rows = most[kind.space.rows]
            tickets += rows * kind.space.column_tiles
            for access in kind.writes:
                if access.tensor in regions and regions[access.tensor].shape[0] < rows * kind.space.tile_rows:
                    what = f"{regions[access.tensor].shape[0]} rows, the worst call needs {rows * kind.space.tile_rows}"
                    yield Finding("capacity", access.tensor, what)
            for signal in kind.signals:
                length = counters[signal.counter].length if signal.counter in counters else 0
                if signal.index == "row" and length < rows:
                    yield Finding("capacity", signal.counter, f"{length} words, the worst call needs {rows}")
        if tickets > INT32_MAX // 2:
            yield Finding(
                "capacity", kernel.name, f"{tickets} tickets do not fit int32 with room for claims past the end"
            )
    for name in ("block_expert", "block_rows"):
        if name in regions and regions[name].shape[0] < most["row_blocks"]:
            yield Finding(
                "capacity", name, f"{regions[name].shape[0]} blocks, the worst call needs {most['row_blocks']}"
            )


def _check_warps(plan: LayerPlan, kernel: KernelPlan) -> Iterator[Finding]:
    """Roles partition the CTA's warps; registers fit the file and are set per warpgroup."""
    arch = ARCHS[plan.arch]
    first = 0
    for role in kernel.roles:
        if role.first_warp != first or role.num_warps < 1:
            yield Finding("roles", role.name, f"starts at warp {role.first_warp}, the warp before ends at {first}")
        first = role.first_warp + role.num_warps
    if kernel.threads != WARP_THREADS * total_warps(kernel.roles) or kernel.threads > arch.max_threads_per_cta:
        yield Finding("roles", kernel.name, f"{kernel.threads} threads, roles have {total_warps(kernel.roles)} warps")
    if not 1 <= kernel.cluster <= arch.max_cluster:
        yield Finding("cluster", kernel.name, f"{kernel.cluster} CTAs in a cluster, {arch.name} has {arch.max_cluster}")
    budget = [role.registers for role in kernel.roles for _ in range(role.num_warps)]
    if not any(budget):
        return
    for group in range(0, len(budget), GROUP_WARPS):
        if len(set(budget[group : group + GROUP_WARPS])) > 1:
            yield Finding("registers", kernel.name, f"warpgroup {group // GROUP_WARPS} has several register budgets")
    for role in kernel.roles:
        within = MIN_REGISTERS <= role.registers <= arch.max_registers_per_thread
        if role.registers % arch.register_granule or not within:
            what = f"{role.registers} registers: not a multiple of {arch.register_granule} in {MIN_REGISTERS}..255"
            yield Finding("registers", role.name, what)
    if WARP_THREADS * sum(budget) > arch.registers_per_sm:
        what = f"{WARP_THREADS * sum(budget)} registers of {arch.registers_per_sm}"
        yield Finding("registers", kernel.name, what, "fewer registers for the consumers")


def _check_shared(plan: LayerPlan, kernel: KernelPlan) -> Iterator[Finding]:
    """Shared memory: regions apart and aligned, sizes from the tiles, total within the limit."""
    limit, end = ARCHS[plan.arch].smem_bytes_per_cta, 0
    for region in kernel.shared:
        if region.offset < end or region.offset % region.align:
            yield Finding(
                "shared memory", region.name, f"offset {region.offset} after byte {end}, align {region.align}"
            )
        end = region.offset + region.bytes
    if kernel.shared and end != kernel.shared_bytes:
        yield Finding("shared memory", kernel.name, f"{kernel.shared_bytes} bytes stored, regions end at {end}")
    if kernel.shared_bytes > limit:
        yield Finding("shared memory", kernel.name, f"{kernel.shared_bytes} bytes of {limit}", "fewer stages")
    if kernel.tiles is None:
        return
    tiles, sizes = kernel.tiles, {region.name: region.bytes for region in kernel.shared}
    expected = {
        "operand_a": tiles.stages * tiles.tile_m * tiles.tile_k * BF16_BYTES,
        "operand_b": tiles.stages * tiles.tile_n * tiles.tile_k * BF16_BYTES,
        "barriers": 8 * barrier_count(kernel.pipelines),
        "task_records": 4 * TASK_WORDS * tiles.task_slots,
    }
    for name, size in expected.items():
        if sizes.get(name) != size:
            yield Finding("shared memory", name, f"{sizes.get(name)} bytes stored, the tiles take {size}")


def _check_arguments(plan: LayerPlan, kernel: KernelPlan) -> Iterator[Finding]:
    names = [argument.name for argument in kernel.arguments]
    if len(set(names)) != len(names):
        yield Finding("arguments", kernel.name, f"names repeat: {names}")
    for argument in kernel.arguments:
        if argument.dtype not in FORMATS:
            yield Finding("arguments", argument.name, f"dtype {argument.dtype} is no format")
        if argument.name == "workspace" and argument.shape != (plan.workspace_bytes,):
            yield Finding("arguments", argument.name, f"shape {argument.shape}, the plan needs {plan.workspace_bytes}")


def _check_kinds(plan: LayerPlan, kernel: KernelPlan) -> Iterator[Finding]:
    """Codes differ; roles exist; a signal's amount is what its units give; reads have a writer."""
    roles = {role.name: role for role in kernel.roles}
    regions = {region.name: region for region in plan.regions}
    arguments = {argument.name for argument in kernel.arguments}
    written = {access.tensor for kind in kernel.kinds for access in kind.writes}
    queued = sorted(name for queue in kernel.queues for phase in queue.phases for name in phase.kinds)
    if queued != sorted(kind.name for kind in kernel.kinds):
        yield Finding("task kinds", kernel.name, f"queues hand out {queued}: every kind stands in one phase")
    if len({kind.code for kind in kernel.kinds}) != len(kernel.kinds):
        yield Finding("task kinds", kernel.name, "two kinds have the same code")
    for kind in kernel.kinds:
        used = {step.role for step in kind.steps}
        for signal in kind.signals:
            units = units_of(roles[signal.role], signal.unit) if signal.role in roles else 0
            if units != signal.amount:
                what = f"{signal.counter}: amount {signal.amount}, each {signal.unit} of {signal.role} gives {units}"
                yield Finding("signal amount", kind.name, what)
        for role in sorted({*used, *(w.role for w in kind.waits), *(s.role for s in kind.signals)} - set(roles)):
            yield Finding("task kinds", kind.name, f"role {role} is no role of {kernel.name}")
        for role in sorted({*(w.role for w in kind.waits), *(s.role for s in kind.signals)} - used):
            yield Finding("task kinds", kind.name, f"{role} waits or signals without a step in the task")
        for access in kind.writes:
            if access.tensor in regions and regions[access.tensor].writer != kind.name:
                yield Finding("task kinds", kind.name, f"writes {access.tensor} of {regions[access.tensor].writer}")
            if access.tensor not in regions and access.tensor not in arguments:
                yield Finding("task kinds", kind.name, f"writes {access.tensor}, which has no place")
        for access in kind.reads:
            if access.tensor not in regions:
                yield Finding("task kinds", kind.name, f"reads {access.tensor}, which is no region")
            elif access.tensor not in written and _kernel_of(regions[access.tensor].writer) == kernel.name:
                yield Finding("task kinds", kind.name, f"reads {access.tensor}, which no task writes")


def _check_pipelines(kernel: KernelPlan) -> Iterator[Finding]:
    """Arrival counts follow from roles; every role that uses a ring gives its buffers back."""
    tiles = kernel.tiles
    assert tiles is not None
    for pipeline in kernel.pipelines:
        for side, barrier in (("full", pipeline.full), ("empty", pipeline.empty)):
            yield from _check_barrier(kernel, f"{pipeline.name} {side}", barrier)
        if pipeline.stages < 2:
            yield Finding("pipeline", pipeline.name, f"{pipeline.stages} stages: producer and consumer take turns")
        for buffer in pipeline.buffers:
            if buffer not in {region.name for region in kernel.shared}:
                yield Finding("pipeline", pipeline.name, f"hands over {buffer}, which is no shared memory")
    rings = {pipeline.name: pipeline for pipeline in kernel.pipelines}
    if not {"stage", "task"} <= set(rings):
        yield Finding("pipeline", kernel.name, "no operand ring or no task ring")
        return
    yield from _check_ring(rings["stage"], tiles.stages, {"mma"})
    yield from _check_ring(rings["task"], tiles.task_slots, set(working_roles(kernel.kinds, kernel.roles)))
    gatherers = set(working_roles(kernel.kinds, kernel.roles, gathering=True)) - {"mma"}
    missing = gatherers - {party.role for party in rings["stage"].full.parties if party.unit != "one"}
    if missing:
        yield Finding("pipeline", "stage", f"{sorted(missing)} gather rows, but do not arrive at the full barrier")
    late = tiles.consumer_lag + tiles.gathers_in_flight
    if late >= tiles.stages:
        what = f"consumer lag {tiles.consumer_lag} and {tiles.gathers_in_flight} gathers in flight"
        yield Finding("pipeline", "stage", f"{what} with {tiles.stages} stages deadlock")
    roles = {role.name: role for role in kernel.roles}
    for named in kernel.named_barriers:
        threads = units_of(roles[named.party.role], named.party.unit) if named.party.role in roles else 0
        if threads != named.threads:
            yield Finding("arrivals", named.name, f"{named.threads} threads stored, the roles give {threads}")


def _check_ring(ring: Pipeline, stages: int, users: set[str]) -> Iterator[Finding]:
    if ring.stages != stages:
        yield Finding("pipeline", ring.name, f"{ring.stages} stages, the tiles say {stages}")
    parties = {party.role for party in ring.empty.parties}
    if parties != users:
        yield Finding("ring reuse", ring.name, f"given back by {sorted(parties)}, used by {sorted(users)}")


def _check_barrier(kernel: KernelPlan, where: str, barrier: Barrier) -> Iterator[Finding]:
    roles = {role.name: role for role in kernel.roles}
    total = sum(units_of(roles[party.role], party.unit) for party in barrier.parties if party.role in roles)
    if total != barrier.arrivals:
        yield Finding("arrivals", where, f"{barrier.arrivals} arrivals stored, the roles give {total}")


def _check_constants(plan: LayerPlan, kernel: KernelPlan) -> Iterator[Finding]:
    """What the text will name is what the tables say."""
    try:
        expected = _constants(plan, kernel)
    except (KeyError, StopIteration, PlanError) as error:
        yield Finding("constants", kernel.name, f"cannot be derived: {error!r}")
        return
    stored = {constant.name: constant.value for constant in kernel.constants}
    derived = {constant.name: constant.value for constant in expected}
    for name in sorted(stored.keys() | derived.keys()):
        if stored.get(name) != derived.get(name):
            yield Finding("constants", name, f"{stored.get(name)} stored, the tables say {derived.get(name)}")


def _constants(plan: LayerPlan, kernel: KernelPlan) -> tuple[Constant, ...]:
    """A launch's constants, derived again from roles, cluster, regions and layer."""
    tiles = plan.kernel("forward").tiles
    assert tiles is not None
    if kernel.name == "forward":
        return forward_constants(
            plan.layer,
            tiles,
            kernel.roles,
            kernel.kinds,
            kernel.pipelines,
            plan.regions,
            plan.counters,
            plan.workspace_bytes,
        )
    clusters = kernel.constant("CLUSTERS") if kernel.has_constant("CLUSTERS") else 1
    launch = SmallLaunch(clusters, kernel.cluster, total_warps(kernel.roles), kernel.shared_bytes)
    if kernel.name == "route":
        return route_constants(plan.layer, launch)
    if kernel.name == "schedule":
        return schedule_constants(plan.layer, launch, plan.regions, plan.workspace_bytes, tiles)
    raise PlanError(f"no table of constants for the launch {kernel.name}", where=kernel.name)
