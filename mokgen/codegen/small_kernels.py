"""What the templates of the two small kernels, route and schedule, print: a flat context of constants and call lines.

Takes plain numbers and the resolved router, so that a plan of any shape can fill it. Behaviour is chosen here, by the
name of a device function; the templates have no conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mokgen.errors import UnsupportedError
from mokgen.lower.layer import RouterLayer

LANES = 32
MAX_WARPS = 32
SMEM_BYTES = 232448 - 1024  # of a CTA on sm_90a, less what the launch itself may take
ALIGNMENT_SLACK = 8 * 16  # eight allocations, aligned to 16 bytes
BATCH_ROUTES = 4  # ids in flight per lane: hides the latency of a load behind the counting of the others
ROUTES_PER_CLUSTER = 65536  # a second cluster pays once placing this many rows takes longer than a launch
MAX_CLUSTERS = 4
ROUTE_WARPS = 8

SCORES = {"softmax": "route.softmax", "sigmoid": "route.sigmoid"}
GROUP_SCORES = {"max": "route.largest", "top2_sum": "route.top2_sum"}


@dataclass(frozen=True)
class ScheduleLaunch:
    """Launch numbers of the schedule kernel."""

    clusters: int
    cluster_ctas: int
    num_warps: int  # of a CTA
    routes_per_lane: int

    @property
    def threads(self) -> int:
        return LANES * self.num_warps


def schedule_smem_bytes(num_experts: int, num_warps: int, cluster_ctas: int) -> int:
    """Shared memory of a schedule CTA: per bin a count of every warp and every CTA and three sums; two tables of 32."""
    bins = num_experts + 1
    return 4 * ((num_warps + cluster_ctas + 2) * bins + num_experts + 2 * LANES) + 8 + ALIGNMENT_SLACK


def schedule_launch(num_experts: int, max_routes: int) -> ScheduleLaunch:
    """Launch numbers derived from the layer: the most warps, then CTAs, whose counts fit into shared memory."""
    shapes = [(ctas, warps) for ctas in (16, 8) for warps in (32, 16, 8)]
    shapes += [(ctas, warps) for ctas in (4, 2, 1) for warps in (8, 4, 2, 1)]
    for ctas, warps in shapes:
        if schedule_smem_bytes(num_experts, warps, ctas) <= SMEM_BYTES:
            clusters = max(1, min(MAX_CLUSTERS, max_routes // ROUTES_PER_CLUSTER))
            return ScheduleLaunch(clusters, ctas, warps, BATCH_ROUTES)
    raise UnsupportedError(
        f"the schedule kernel counts {num_experts} experts in shared memory, which does not hold that many",
        where="experts.num",
    )


def schedule_context(
    stem: str,
    arch: str,
    *,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    tile_m: int,
    max_row_blocks: int,
    offsets: Mapping[str, int],
    counter_words: int,
    workspace_bytes: int,
    launch: ScheduleLaunch,
) -> dict[str, Any]:
    """Context of schedule.py.jinja; `offsets` are byte offsets by region name."""
    regions = ("counters", "block_start", "block_expert", "block_rows", "row_token", "slot_row")
    return {
        "STEM": stem,
        "ARCH": arch,
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "MAX_TOKENS": max_tokens,
        "TILE_M": tile_m,
        "MAX_ROW_BLOCKS": max_row_blocks,
        "MAX_ROWS": max_row_blocks * tile_m,
        "CLUSTERS": launch.clusters,
        "CLUSTER_CTAS": launch.cluster_ctas,
        "NUM_WARPS": launch.num_warps,
        "ROUTES_PER_LANE": launch.routes_per_lane,
        **{name.upper(): offsets[name] for name in regions},
        "COUNTER_WORDS": counter_words,
        "WORKSPACE_BYTES": workspace_bytes,
    }


def route_warps(num_experts: int) -> int:
    """Warps, and so tokens, of a route CTA: eight, fewer where their scores do not fit into shared memory."""
    warps = ROUTE_WARPS
    while warps > 1 and 4 * warps * num_experts > SMEM_BYTES:
        warps //= 2
    return warps


def route_arguments(num_experts: int, router: RouterLayer) -> list[tuple[str, str, str]]:
    """Arguments in call order: name, dtype, shape as text."""
    arguments = [("logits", router.logits_dtype, '("T", NUM_EXPERTS)')]
    if router.selection_bias:
        arguments.append(("selection_bias", "fp32", "(NUM_EXPERTS,)"))
    if router.logit_bias:
        arguments.append(("logit_bias", "fp32", "(NUM_EXPERTS,)"))
    return [*arguments, ("ids", "int32", '("T", TOP_K)'), ("weights", "fp32", '("T", TOP_K)')]


def is_group_limited(router: RouterLayer) -> bool:
    return router.top_groups < router.groups


def route_steps(router: RouterLayer) -> list[str]:
    """Call lines of one token, in order."""
    score = SCORES[router.score]
    late = router.order == "topk_then_score"
    steps = ["values = route.load_row(logits, token, lane, NUM_EXPERTS)"]
    if router.logit_bias:
        steps.append("route.add_bias(values, logit_bias, lane, NUM_EXPERTS)")
    if not late:
        steps.append(f"{score}(values)")
    steps.append("route.keep(values, kept[warp, None], lane, NUM_EXPERTS)")
    if router.selection_bias:
        steps.append("route.add_bias(values, selection_bias, lane, NUM_EXPERTS)")
    steps.append("keys = route.keys_of(values, lane, NUM_EXPERTS)")
    if is_group_limited(router):
        group_score = GROUP_SCORES[router.group_score]
        steps.append(f"route.limit_groups(keys, lane, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS, {group_score})")
    steps.append("chosen = route.choose(keys, lane, TOP_K)")
    if late:
        steps.append('slot_weights = route.gather(kept[warp, None], chosen, lane, TOP_K, -float("inf"))')
        steps.append(f"{score}(slot_weights)")
    else:
        steps.append("slot_weights = route.gather(kept[warp, None], chosen, lane, TOP_K, 0.0)")
    if router.normalize:
        steps.append("route.normalize(slot_weights)")
    if router.scale != 1.0:
        steps.append("route.scale(slot_weights, WEIGHT_SCALE)")
    steps.append("route.store_row(ids, chosen, token, lane, TOP_K)")
    steps.append("route.store_row(weights, slot_weights, token, lane, TOP_K)")
    return steps


def route_context(stem: str, arch: str, num_experts: int, router: RouterLayer) -> dict[str, Any]:
    """Context of route.py.jinja."""
    constants: list[tuple[str, int | float]] = [("NUM_EXPERTS", num_experts), ("TOP_K", router.top_k)]
    if is_group_limited(router):
        constants += [("NUM_GROUPS", router.groups), ("TOP_GROUPS", router.top_groups)]
    if router.scale != 1.0:
        constants.append(("WEIGHT_SCALE", router.scale))
    return {
        "STEM": stem,
        "ARCH": arch,
        "LAYER_CONSTANTS": constants,
        "NUM_WARPS": route_warps(num_experts),
        "ARGUMENTS": route_arguments(num_experts, router),
        "STEPS": route_steps(router),
    }
