"""Texts of route and schedule: the plan's numbers, call lines per router, launch numbers."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from layers import resolved, router_plan

from mokgen.codegen.emit import emit
from mokgen.codegen.lint import lint
from mokgen.codegen.small_kernels import route_steps
from mokgen.errors import PlanError, ResourceError
from mokgen.facts.arch import ARCHS
from mokgen.lower.build import lower
from mokgen.lower.layer import RouterLayer
from mokgen.plan.launches import MAX_CLUSTERS, ROUTES_PER_CLUSTER
from mokgen.plan.model import KernelPlan
from mokgen.plan.schedule import make_plan

PLAIN = RouterLayer("logits", 8, "softmax", "score_then_topk", False, 1.0, False, False, 1, 1, "max", "fp32", "bf16")
ARCH = ARCHS["sm_90a"]
ROUTERS: list[dict[str, Any]] = [
    {},
    {"normalize": True, "scale": 2.5},
    {"score": "sigmoid", "selection_bias": True, "logit_bias": True},
    {"groups": 8, "top_groups": 4, "group_score": "top2_sum"},
    {"groups": 8, "top_groups": 4},
    {"order": "topk_then_score", "logit_bias": True, "logits_dtype": "fp32"},
]


def evaluated(text: str) -> dict[str, Any]:
    """Module constants of a generated text that are literals or made of such."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "." not in ast.unparse(node):
            found[node.targets[0].id] = eval(ast.unparse(node.value), {}, dict(found))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return found


@pytest.mark.parametrize("changes", ROUTERS)
def test_every_router_gives_clean_text_with_the_plan_s_numbers(changes: dict[str, Any]) -> None:
    plan = router_plan(64, replace(PLAIN, **changes), 500, route_warps=2, schedule_ctas=4, schedule_warps=2)
    texts = emit(plan, "x").files
    for name in ("route", "schedule"):
        kernel, text = plan.kernel(name), texts[f"{name}.py"]
        assert lint(f"{name}.py", text) == []
        found = evaluated(text)
        assert found["ARGUMENTS"] == tuple((entry.name, entry.dtype, entry.shape) for entry in kernel.arguments)
        assert {entry.name: entry.value for entry in kernel.constants}.items() <= found.items()
    assert evaluated(texts["route.py"])["NUM_WARPS"] == 2
    assert evaluated(texts["schedule.py"])["CLUSTER_CTAS"] == 4


def calls(router: RouterLayer) -> list[str]:
    """Device functions of the steps, in order."""
    return [step.split("route.", 1)[1].split("(")[0] for step in route_steps(router)]


def test_scores_come_before_or_after_the_choice() -> None:
    early, late = calls(PLAIN), calls(replace(PLAIN, order="topk_then_score"))
    assert early.index("softmax") < early.index("keep") < early.index("choose")
    assert late.index("choose") < late.index("gather") < late.index("softmax")
    assert early.count("softmax") == late.count("softmax") == 1


def test_selection_bias_enters_the_choice_but_not_the_weights() -> None:
    steps = route_steps(replace(PLAIN, selection_bias=True, logit_bias=True))
    kept = next(i for i, step in enumerate(steps) if "route.keep" in step)
    assert (
        [("selection_bias" in s) for s in steps].index(True) > kept > [("logit_bias" in s) for s in steps].index(True)
    )


def test_what_a_router_does_not_do_leaves_no_line() -> None:
    assert not {"normalize", "scale", "add_bias", "limit_groups"} & set(calls(PLAIN))
    assert "limit_groups" not in calls(replace(PLAIN, groups=8, top_groups=8))
    assert calls(replace(PLAIN, normalize=True, scale=2.5))[-4:] == ["normalize", "scale", "store_row", "store_row"]


def schedule_of(experts: int, max_tokens: int, **knobs: int) -> KernelPlan:
    return router_plan(experts, replace(PLAIN, top_k=1), max_tokens, **knobs).kernel("schedule")


@pytest.mark.parametrize("experts", [1, 7, 32, 256, 512, 1000, 3000, 8000])
def test_schedule_counts_fit_into_shared_memory_with_as_many_warps_as_possible(experts: int) -> None:
    kernel = schedule_of(experts, 65536)
    warps, ctas = kernel.constant("NUM_WARPS"), kernel.constant("CLUSTER_CTAS")
    assert 1 <= warps <= 32 and kernel.threads == 32 * warps and 1 <= ctas <= ARCH.max_cluster
    assert kernel.shared_bytes <= ARCH.smem_bytes_per_cta - 1024
    if warps < 32:
        with pytest.raises(PlanError) as error:
            schedule_of(experts, 65536, schedule_warps=2 * warps, schedule_ctas=ctas)
        assert error.value.where == "plan.schedule_warps"


def test_more_experts_than_shared_memory_counts_are_refused() -> None:
    with pytest.raises(ResourceError, match="20000 experts"):
        schedule_of(20000, 65536)


def test_large_calls_get_more_clusters() -> None:
    per = ROUTES_PER_CLUSTER
    clusters = [schedule_of(32, tokens).constant("CLUSTERS") for tokens in (1, per, 4 * per, 16 * per)]
    assert clusters == sorted(clusters) and clusters[0] == 1 and clusters[-1] == MAX_CLUSTERS


def test_a_gpu_with_smaller_clusters_gets_smaller_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's size and the legal values of its knob come from the architecture."""
    layer = resolved()
    assert make_plan(lower(layer)).kernel("schedule").cluster == ARCH.max_cluster == 16
    monkeypatch.setitem(ARCHS, "sm_90a", replace(ARCH, max_cluster=8))
    assert make_plan(lower(layer)).kernel("schedule").cluster == 8
    with pytest.raises(PlanError, match="legal values: 1, 2, 4, 8$"):
        make_plan(lower(replace(layer, knobs=(("schedule_ctas", 16),))))
