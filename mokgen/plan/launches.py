"""Launch numbers of the two small kernels."""

from __future__ import annotations

from dataclasses import dataclass

from mokgen.errors import ResourceError
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.tiles import KNOBS, KnobReader, route_shared_bytes, schedule_fits, schedule_shared_bytes

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
        raise _too_many_experts(knobs)
    return max(value for value in legal if value <= most)


def _too_many_experts(knobs: KnobReader) -> ResourceError:
    return ResourceError(
        f"{knobs.layer.num_experts} experts: their counts do not fit into shared memory of {knobs.arch.name}",
        where="experts.num",
    )


# (CTAs of a cluster, warps of a CTA), best first: more CTAs count faster, and all counts share a CTA's memory.
SCHEDULE_SHAPES = [(ctas, warps) for ctas in (16, 8) for warps in (32, 16, 8)]
SCHEDULE_SHAPES += [(ctas, warps) for ctas in (4, 2, 1) for warps in (8, 4, 2, 1)]


def schedule_launch(knobs: KnobReader) -> SmallLaunch:
    layer: ResolvedLayer = knobs.layer
    shapes = [(ctas, warps) for ctas, warps in SCHEDULE_SHAPES if ctas <= knobs.arch.max_cluster]
    fitting = [(ctas, warps) for ctas, warps in shapes if schedule_fits(layer, knobs.arch, warps, ctas)]
    if not fitting:
        raise _too_many_experts(knobs)
    ctas = knobs.take(
        "schedule_ctas", fitting[0][0], "the largest cluster whose counts fit: it adds them in shared memory"
    )
    # Legal values hold with one CTA; a spec that asks for many CTAs leaves room for fewer warps.
    most = max((warps for cluster, warps in fitting if cluster == ctas), default=1)
    warps = knobs.take("schedule_warps", most, "a histogram over the experts per warp, in shared memory")
    if not schedule_fits(layer, knobs.arch, warps, ctas):
        raise ResourceError(
            f"{warps} warps in {ctas} CTAs need {schedule_shared_bytes(layer.num_local_experts, warps, ctas)} bytes of "
            f"shared memory for their counts",
            where="plan.schedule_warps",
            hint=f"at most {most} with {ctas} CTAs",
        )
    wanted = max(1, min(MAX_CLUSTERS, layer.max_tokens * layer.top_k // ROUTES_PER_CLUSTER))
    clusters = knobs.take("schedule_clusters", wanted, f"one per {ROUTES_PER_CLUSTER} routes, at most {MAX_CLUSTERS}")
    return SmallLaunch(clusters, ctas, warps, schedule_shared_bytes(layer.num_local_experts, warps, ctas))


def route_launch(knobs: KnobReader) -> SmallLaunch:
    most = largest_legal(knobs, "route_warps", 8)
    warps = knobs.take("route_warps", most, "one token per warp, its scores in shared memory")
    return SmallLaunch(1, 1, warps, route_shared_bytes(knobs.layer.num_experts, warps))
