"""Numbers the generated modules name, by section. Each is taken from the plan's own tables; `verify` does so again."""

from __future__ import annotations

from mokgen.errors import PlanError
from mokgen.ir.requests import TileConfig
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.launches import ROUTES_PER_LANE, SmallLaunch
from mokgen.plan.model import Constant, Counter, Pipeline, Region, TaskKind, WarpRole
from mokgen.plan.roles import LOAD, MMA, SCHEDULER, WARP_THREADS, total_warps
from mokgen.stages.base import TILE_ROWS

LAYER = "layer"
PLAN = "plan"
ARRIVALS = "arrivals that complete an mbarrier phase or a counter"
REGIONS = "workspace regions: byte offsets"
COUNTERS = "counters: word offsets"
SLOTS_IN_FLIGHT = 8  # rows a reduce warp asks for before it adds the first: covers the latency of a load


def section(title: str, values: dict[str, int]) -> tuple[Constant, ...]:
    return tuple(Constant(title, name, value) for name, value in values.items())


def layer_constants(layer: ResolvedLayer) -> tuple[Constant, ...]:
    values = {
        "HIDDEN_SIZE": layer.hidden_size,
        "INTERMEDIATE_SIZE": layer.intermediate_size,
        "NUM_EXPERTS": layer.num_local_experts,
        "TOP_K": layer.top_k,
        "MAX_TOKENS": layer.max_tokens,
    }
    if layer.shared.num > 0:
        values["SHARED_INTERMEDIATE_SIZE"] = layer.shared.intermediate_size
    return section(LAYER, values)


def region_constants(regions: tuple[Region, ...], workspace_bytes: int) -> tuple[Constant, ...]:
    values = {region.name.upper(): region.offset for region in regions}
    return section(REGIONS, {**values, "WORKSPACE_BYTES": workspace_bytes})


def extent_of(regions: tuple[Region, ...], name: str) -> int:
    """First extent of a region."""
    return next(region.shape[0] for region in regions if region.name == name)


def row_constants(regions: tuple[Region, ...]) -> dict[str, int]:
    values = {"MAX_ROW_BLOCKS": extent_of(regions, "block_expert"), "MAX_ROWS": extent_of(regions, "row_token")}
    if any(region.name == "shared_y" for region in regions):
        values["MAX_SHARED_ROWS"] = extent_of(regions, "shared_y")
        values["MAX_SHARED_ROW_BLOCKS"] = values["MAX_SHARED_ROWS"] // TILE_ROWS
    return values


def route_constants(layer: ResolvedLayer, launch: SmallLaunch) -> tuple[Constant, ...]:
    router = layer.router
    values = {"NUM_EXPERTS": layer.num_experts, "TOP_K": router.top_k}
    if router.top_groups < router.groups:
        values |= {"NUM_GROUPS": router.groups, "TOP_GROUPS": router.top_groups}
    return (*section(LAYER, values), *section(PLAN, {"NUM_WARPS": launch.warps}))


def schedule_constants(
    layer: ResolvedLayer, launch: SmallLaunch, regions: tuple[Region, ...], workspace_bytes: int, tiles: TileConfig
) -> tuple[Constant, ...]:
    sizes = {
        "NUM_EXPERTS": layer.num_local_experts,
        "TOP_K": layer.top_k,
        "MAX_TOKENS": layer.max_tokens,
    }
    numbers = {
        "TILE_M": tiles.tile_m,
        "MAX_ROW_BLOCKS": extent_of(regions, "block_expert"),
        "MAX_ROWS": extent_of(regions, "row_token"),
        "CLUSTERS": launch.clusters,
        "CLUSTER_CTAS": launch.cluster_ctas,
        "NUM_WARPS": launch.warps,
        "ROUTES_PER_LANE": ROUTES_PER_LANE,
    }
    tables = tuple(region for region in regions if region.writer == "schedule")
    words = section(COUNTERS, {"COUNTER_WORDS": extent_of(regions, "counters")})
    return (*section(LAYER, sizes), *section(PLAN, numbers), *region_constants(tables, workspace_bytes), *words)


def tile_constants(layer: ResolvedLayer, tiles: TileConfig, kinds: tuple[TaskKind, ...]) -> dict[str, int]:
    """Tiles, K blocks and column tiles per GEMM kind, slabs, ring depths."""
    values = {"TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n, "TILE_K": tiles.tile_k, "NUM_STAGES": tiles.stages}
    gemms = [kind for kind in kinds if kind.space.k_blocks]
    values |= {f"NUM_K_BLOCKS_{kind.name.upper()}": kind.space.k_blocks for kind in gemms}
    values |= {f"NUM_COL_TILES_{kind.name.upper()}": kind.space.column_tiles for kind in gemms}
    return values | {
        "SLAB_TILES": tiles.slab_tiles,
        "NUM_SLABS": tiles.num_slabs,
        "GROUP_BLOCKS": tiles.group_blocks,
        "REDUCE_TOKENS": tiles.reduce_tokens,
        "REDUCE_SLOTS_IN_FLIGHT": min(layer.top_k, SLOTS_IN_FLIGHT),
        "TASK_SLOTS": tiles.task_slots,
        "CONSUMER_LAG": tiles.consumer_lag,
        "GATHERS_IN_FLIGHT": tiles.gathers_in_flight,
    }


def warp_constants(roles: tuple[WarpRole, ...]) -> dict[str, int]:
    table = {role.name: role for role in roles}
    return {
        "LOAD_WARPS": table[MMA].first_warp,  # the load warpgroup is every warp before the consumers
        "SCHEDULER_WARP": table[SCHEDULER].first_warp,
        "NUM_THREADS": WARP_THREADS * total_warps(roles),
        "LOAD_REGISTERS": table[LOAD].registers,
        "MMA_REGISTERS": table[MMA].registers,
    }


def arrival_constants(pipelines: tuple[Pipeline, ...]) -> dict[str, int]:
    values: dict[str, int] = {}
    for pipeline in pipelines:
        name = pipeline.name.upper()
        values |= {f"{name}_FULL_ARRIVALS": pipeline.full.arrivals, f"{name}_EMPTY_ARRIVALS": pipeline.empty.arrivals}
    return values


def complete_constants(kinds: tuple[TaskKind, ...]) -> dict[str, int]:
    """Required counts known at build time; what one tile adds where the count depends on the call."""
    values: dict[str, int] = {}
    for kind in kinds:
        for wait in kind.waits:
            name = wait.counter.upper()
            if all(not count.quantities for count in wait.required):
                values[f"{name}_ARRIVALS"] = wait.want({})
            else:
                factors = {count.factor for count in wait.required}
                if len(factors) > 1:
                    raise PlanError(f"{wait.text()}: tiles add different amounts, the text names one", where=kind.name)
                values[f"{name}_ARRIVALS_PER_TILE"] = factors.pop()
    return values


def counter_constants(counters: tuple[Counter, ...], regions: tuple[Region, ...]) -> dict[str, int]:
    offsets = {counter.name.upper(): counter.word for counter in counters}
    return {"COUNTER_WORDS": extent_of(regions, "counters"), **offsets}


def forward_constants(
    layer: ResolvedLayer,
    tiles: TileConfig,
    roles: tuple[WarpRole, ...],
    kinds: tuple[TaskKind, ...],
    pipelines: tuple[Pipeline, ...],
    regions: tuple[Region, ...],
    counters: tuple[Counter, ...],
    workspace_bytes: int,
) -> tuple[Constant, ...]:
    return (
        *layer_constants(layer),
        *section(PLAN, tile_constants(layer, tiles, kinds) | row_constants(regions) | warp_constants(roles)),
        *section(ARRIVALS, arrival_constants(pipelines) | complete_constants(kinds)),
        *region_constants(regions, workspace_bytes),
        *section(COUNTERS, counter_constants(counters, regions)),
    )
