"""What the templates of the two small kernels, route and schedule, print: constants, arguments and call lines.

Every number of a launch is the plan's. Behaviour is chosen here, by the name of a device function; the templates have
no conditions.
"""

from __future__ import annotations

from typing import Any

from mokgen.lower.layer import RouterLayer
from mokgen.plan.constants import LAYER
from mokgen.plan.model import LayerPlan

SCORES = {"softmax": "route.softmax", "sigmoid": "route.sigmoid"}
GROUP_SCORES = {"max": "route.largest", "top2_sum": "route.top2_sum"}


# Shapes of the route kernel's arguments in the names of its text.
ROUTE_SHAPES = {
    "logits": '("T", NUM_EXPERTS)',
    "selection_bias": "(NUM_EXPERTS,)",
    "logit_bias": "(NUM_EXPERTS,)",
    "ids": '("T", TOP_K)',
    "weights": '("T", TOP_K)',
}


def schedule_context(plan: LayerPlan, stem: str) -> dict[str, Any]:
    """Context of schedule.py.jinja: the plan's constants by name."""
    constants = plan.kernel("schedule").constants
    return {"STEM": stem, "ARCH": plan.arch, **{constant.name: constant.value for constant in constants}}


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


def route_context(plan: LayerPlan, stem: str) -> dict[str, Any]:
    """Context of route.py.jinja."""
    kernel, router = plan.kernel("route"), plan.layer.router
    constants: list[tuple[str, int | float]] = [
        (constant.name, constant.value) for constant in kernel.constants if constant.section == LAYER
    ]
    if router.scale != 1.0:
        constants.append(("WEIGHT_SCALE", router.scale))
    return {
        "STEM": stem,
        "ARCH": plan.arch,
        "LAYER_CONSTANTS": constants,
        "NUM_WARPS": kernel.constant("NUM_WARPS"),
        "ARGUMENTS": [(entry.name, entry.dtype, ROUTE_SHAPES[entry.name]) for entry in kernel.arguments],
        "STEPS": route_steps(router),
    }
