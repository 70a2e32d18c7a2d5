"""make_plan: from the stage graph to the plan of every launch. Assembles; decisions live in files named for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mokgen.errors import PlanError, UnsupportedError
from mokgen.facts.arch import ARCHS, ArchTraits
from mokgen.ir.graph import StageGraph
from mokgen.ir.requests import Argument, StageRequest, TileConfig
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.barriers import barrier_count, forward_named_barriers, forward_pipelines
from mokgen.plan.constants import forward_constants, route_constants, schedule_constants
from mokgen.plan.launches import SmallLaunch, route_launch, schedule_launch
from mokgen.plan.model import Constant, Counter, KernelPlan, LayerPlan, Region
from mokgen.plan.regions import extents, lay_out, shared_memory
from mokgen.plan.roles import WARP_THREADS, forward_roles, total_warps, uniform_role
from mokgen.plan.tasks import derive_counters, derive_kinds, make_queues
from mokgen.plan.tiles import KnobReader, choose_tiles
from mokgen.stages.registry import STAGES

# Call order of the forward kernel's tensors.
ARGUMENT_ORDER = (
    "x",
    "topk_weights",
    "w_gate_up",
    "w_down",
    "b_gate_up",
    "b_down",
    "w_shared_gate_up",
    "w_shared_down",
    "shared_gate_logits",
    "out",
)
LAUNCH_ARGUMENTS = (
    Argument("ctas", "int32", None),
    Argument("wait_limit_ns", "int64", None),
    Argument("error_address", "int64", None),
)


@dataclass(frozen=True)
class Draft:
    """What is decided for the whole layer before any launch is put together."""

    graph: StageGraph
    arch: ArchTraits
    tiles: TileConfig
    requests: dict[str, StageRequest]  # by stage, in graph order
    regions: tuple[Region, ...]
    counters: tuple[Counter, ...]
    workspace_bytes: int

    @property
    def layer(self) -> ResolvedLayer:
        return self.graph.layer


def make_plan(graph: StageGraph, arch: str = "sm_90a") -> LayerPlan:
    """Plan all launches of a layer for one architecture. Raises PlanError, ResourceError or UnsupportedError."""
    if arch not in ARCHS:
        raise UnsupportedError(
            f"no kernels for {arch}", where="target.archs", hint="architectures: " + ", ".join(ARCHS)
        )
    knobs = KnobReader(graph.layer, ARCHS[arch])
    draft = _draft(graph, ARCHS[arch], choose_tiles(knobs))
    makers = {
        "route": lambda: _route(draft, route_launch(knobs)),
        "schedule": lambda: _schedule(draft, schedule_launch(knobs)),
        "forward": lambda: _forward(draft),
    }
    kernels = []
    for name in graph.kernels():
        if name not in makers:
            raise UnsupportedError(f"the stage graph asks for a launch {name}, which has no plan", where="plan")
        kernels.append(makers[name]())
    return LayerPlan(
        layer=graph.layer,
        arch=arch,
        kernels=tuple(kernels),
        regions=draft.regions,
        counters=draft.counters,
        workspace_bytes=draft.workspace_bytes,
        choices=tuple(knobs.choices),
    )


def _draft(graph: StageGraph, arch: ArchTraits, tiles: TileConfig) -> Draft:
    requests = {stage: STAGES[stage].requests(graph.layer, tiles) for stage in graph.stages()}
    sizes = extents(graph.layer)
    tasks = tuple(task for request in requests.values() for task in request.tasks)
    counters = derive_counters(tasks, tiles, sizes)
    wanted = tuple(region for request in requests.values() for region in request.regions)
    regions, workspace_bytes = lay_out(wanted, counters, graph, sizes)
    return Draft(graph, arch, tiles, requests, regions, counters, workspace_bytes)


def _route(draft: Draft, launch: SmallLaunch) -> KernelPlan:
    arguments = draft.requests["route"].arguments
    return _small("route", arguments, launch, "tokens", route_constants(draft.layer, launch))


def _schedule(draft: Draft, launch: SmallLaunch) -> KernelPlan:
    arguments = tuple(
        replace(argument, shape=(draft.workspace_bytes,)) if argument.shape == ("WORKSPACE_BYTES",) else argument
        for argument in draft.requests["schedule"].arguments
    )
    constants = schedule_constants(draft.layer, launch, draft.regions, draft.workspace_bytes, draft.tiles)
    return _small("schedule", arguments, launch, "clusters", constants)


def _small(
    name: str, arguments: tuple[Argument, ...], launch: SmallLaunch, grid: str, constants: tuple[Constant, ...]
) -> KernelPlan:
    return KernelPlan(
        name=name,
        arguments=arguments,
        roles=uniform_role(name, launch.warps),
        threads=WARP_THREADS * launch.warps,
        cluster=launch.cluster_ctas,
        grid=grid,
        tiles=None,
        kinds=(),
        queues=(),
        pipelines=(),
        named_barriers=(),
        shared=(),
        shared_bytes=launch.shared_bytes,
        constants=constants,
    )


def _forward(draft: Draft) -> KernelPlan:
    graph, tiles = draft.graph, draft.tiles
    stages = [stage for stage in graph.stages() if graph.kernel_of(stage) == "forward"]
    tasks = tuple(task for stage in stages for task in draft.requests[stage].tasks)
    roles = forward_roles(tiles)
    kinds = derive_kinds(tasks, roles)
    pipelines = forward_pipelines(tiles, roles, kinds)
    shared, shared_bytes = shared_memory(tiles, barrier_count(pipelines), draft.arch)
    workspace = Argument("workspace", "uint8", (draft.workspace_bytes,))
    return KernelPlan(
        name="forward",
        arguments=(*_ordered(draft.requests, stages), workspace, *LAUNCH_ARGUMENTS),
        roles=roles,
        threads=WARP_THREADS * total_warps(roles),
        cluster=1,
        grid="ctas",
        tiles=tiles,
        kinds=kinds,
        queues=make_queues(tasks, graph.depth(task.name for task in tasks)),
        pipelines=pipelines,
        named_barriers=forward_named_barriers(roles),
        shared=shared,
        shared_bytes=shared_bytes,
        constants=forward_constants(
            draft.layer, tiles, roles, kinds, pipelines, draft.regions, draft.counters, draft.workspace_bytes
        ),
    )


def _ordered(requests: dict[str, StageRequest], stages: list[str]) -> tuple[Argument, ...]:
    """Arguments of several stages, each once, in call order."""
    found: dict[str, Argument] = {}
    for stage in stages:
        for argument in requests[stage].arguments:
            if found.setdefault(argument.name, argument) != argument:
                raise PlanError(f"stages disagree about argument {argument.name}", where=stage)
            if argument.name not in ARGUMENT_ORDER:
                known = ", ".join(ARGUMENT_ORDER)
                raise PlanError(f"argument {argument.name} has no place in the call order: {known}", where=stage)
    return tuple(found[name] for name in ARGUMENT_ORDER if name in found)
