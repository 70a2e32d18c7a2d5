"""Estimated times of the forward at full load: FLOPs at the measured dense rate, bytes at the measured copy rate.

Full load is max_tokens tokens, routes spread evenly over the experts. Nothing here enters a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from mokgen.facts.arch import ARCHS
from mokgen.facts.formats import FORMATS
from mokgen.plan.model import LayerPlan, TaskKind
from mokgen.plan.tiles import BF16_BYTES, SlabTimes, slab_times
from mokgen.stages.base import TILE_ROWS, ceil_div


@dataclass(frozen=True)
class GemmLoad:
    """One GEMM kind: rows, FLOPs that count, FLOPs computed with all padding."""

    kind: str
    rows: int
    padded_rows: int
    useful_flops: int
    computed_flops: int
    column_waste: float  # computed columns over real ones, less 1
    k_waste: float  # the same along K

    @property
    def waste(self) -> float:
        return self.computed_flops / self.useful_flops - 1


@dataclass(frozen=True)
class Roofline:
    """Seconds."""

    loads: tuple[GemmLoad, ...]
    dense: float  # useful FLOPs at the dense rate: the bound a report compares with
    computed: float  # computed FLOPs at the dense rate
    traffic_bytes: int  # least traffic of the forward launch with global memory
    traffic: float
    reduction: SlabTimes

    @property
    def expected(self) -> float:
        """GEMMs or traffic, whichever takes longer, and the reduction that nothing covers."""
        return max(self.computed, self.traffic) + self.reduction.exposed


def gemm_loads(plan: LayerPlan) -> tuple[GemmLoad, ...]:
    layer, kernel = plan.layer, plan.kernel("forward")
    assert kernel.tiles is not None
    routes, experts = layer.max_tokens * layer.top_k, layer.num_local_experts
    busy = min(experts, routes)
    rows = {"row_blocks": routes, "shared_blocks": layer.max_tokens}
    padded = {
        "row_blocks": busy * ceil_div(ceil_div(routes, busy), TILE_ROWS) * TILE_ROWS,
        "shared_blocks": ceil_div(layer.max_tokens, TILE_ROWS) * TILE_ROWS,
    }
    loads = []
    for kind in (entry for entry in kernel.kinds if entry.space.k_blocks):
        space = kind.space
        halves = kernel.tiles.tile_n // space.tile_columns  # 2: gate and up columns side by side
        depth = inner_size(plan, kind)
        loads.append(
            GemmLoad(
                kind=kind.name,
                rows=rows[space.rows],
                padded_rows=padded[space.rows],
                useful_flops=2 * rows[space.rows] * space.columns * halves * depth,
                computed_flops=2
                * padded[space.rows]
                * (space.column_tiles * kernel.tiles.tile_n)
                * (space.k_blocks * kernel.tiles.tile_k),
                column_waste=space.column_tiles * space.tile_columns / space.columns - 1,
                k_waste=space.k_blocks * kernel.tiles.tile_k / depth - 1,
            )
        )
    return tuple(loads)


def inner_size(plan: LayerPlan, kind: TaskKind) -> int:
    """Reduction extent of a GEMM kind: H for the gathering ones, else the width of the region it reads whole."""
    whole = [access.tensor for access in kind.reads if access.columns == "all" and access.rows == "tile"]
    wide = [plan.region(name) for name in whole if len(plan.region(name).shape) == 2]
    return wide[0].shape[1] if wide else plan.layer.hidden_size


def traffic_bytes(plan: LayerPlan) -> int:
    """Weights once, x and out once, hidden written once and read per slab, y written and read once."""
    layer, kernel = plan.layer, plan.kernel("forward")
    assert kernel.tiles is not None
    total = 0
    for argument in kernel.arguments:
        if argument.shape is not None and argument.name != "workspace":
            size = FORMATS[argument.dtype].bytes
            for extent in argument.shape:
                size *= layer.max_tokens if isinstance(extent, str) else extent
            total += size
    rows = {"row_blocks": layer.max_tokens * layer.top_k, "shared_blocks": layer.max_tokens}
    for kind in (entry for entry in kernel.kinds if entry.space.k_blocks):
        readings = kernel.tiles.num_slabs if kind.slabs == "none" else 1
        total += BF16_BYTES * rows[kind.space.rows] * kind.space.columns * (1 + readings)
    return total


def roofline(plan: LayerPlan) -> Roofline:
    arch, kernel = ARCHS[plan.arch], plan.kernel("forward")
    assert kernel.tiles is not None
    loads = gemm_loads(plan)
    moved = traffic_bytes(plan)
    rate = arch.device.matmul_flops_per_second
    return Roofline(
        loads=loads,
        dense=sum(load.useful_flops for load in loads) / rate,
        computed=sum(load.computed_flops for load in loads) / rate,
        traffic_bytes=moved,
        traffic=moved / arch.device.copy_bytes_per_second,
        reduction=slab_times(plan.layer, arch, kernel.tiles.slab_tiles),
    )
