"""Launch numbers of the two small kernels."""

from __future__ import annotations

from dataclasses import dataclass

from mokgen.errors import ResourceError
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.tiles import KNOBS, KnobReader, route_shared_bytes, schedule_shared_bytes

ROUTES_PER_LANE = 4  # ids in flight per lane: hides the latency of a load behind the counting of the others
ROUTES_PER_CLUSTER = 65536  # a second cluster pays once placing this many rows takes longer than a launch
MAX_CLUSTERS = 4


@dataclass(frozen=True)
class SmallLaunch:
    """Grid and block of a small kernel."""

    clusters: int
    cluster_ctas: int
    warps: int
    shared_bytes: int


def largest_legal(knobs: KnobReader, name: str, most: int) -> int:
    """The largest legal value up to `most`."""
    legal = KNOBS[name].legal(knobs.layer, knobs.arch)
    if not legal:
        raise ResourceError(
            f"{knobs.layer.num_experts} experts: their counts do not fit into shared memory of {knobs.arch.name}",
            where="experts.num",
        )
    return max(value for value in legal if value <= most)


def schedule_launch(knobs: KnobReader) -> SmallLaunch:
    layer: ResolvedLayer = knobs.layer
    most = largest_legal(knobs, "schedule_warps", 32)
    warps = knobs.take("schedule_warps", most, "a histogram over the experts per warp, in shared memory")
    ctas = knobs.take("schedule_ctas", 16, "the largest cluster: CTAs add their counts through shared memory")
    wanted = max(1, min(MAX_CLUSTERS, layer.max_tokens * layer.top_k // ROUTES_PER_CLUSTER))
    clusters = knobs.take("schedule_clusters", wanted, f"one per {ROUTES_PER_CLUSTER} routes, at most {MAX_CLUSTERS}")
    return SmallLaunch(clusters, ctas, warps, schedule_shared_bytes(layer.num_local_experts, warps))


def route_launch(knobs: KnobReader) -> SmallLaunch:
    most = largest_legal(knobs, "route_warps", 8)
    warps = knobs.take("route_warps", most, "one token per warp, its scores in shared memory")
    return SmallLaunch(1, 1, warps, route_shared_bytes(knobs.layer.num_experts, warps))
