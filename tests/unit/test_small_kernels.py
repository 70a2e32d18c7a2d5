"""Texts of route and schedule: templates against the committed files, call lines per router, launch numbers."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest

from mokgen.codegen import small_kernels
from mokgen.codegen.lint import lint
from mokgen.errors import UnsupportedError
from mokgen.lower.layer import RouterLayer
from mokgen.lower.resolve import resolve
from mokgen.spec.load import load_spec

PLAIN = RouterLayer("logits", 8, "softmax", "score_then_topk", False, 1.0, False, False, 1, 1, "max", "fp32", "bf16")


def render(root: Path, template: str, context: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(context)


def constants(text: str) -> dict[str, Any]:
    """Module constants of a generated text that are literals."""
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize("stem", ["dsv3", "dsv3_slice"])
def test_committed_schedule_is_the_template_with_its_own_numbers(root: Path, stem: str) -> None:
    text = (root / "generated" / stem / "schedule.py").read_text()
    numbers = constants(text)
    launch = small_kernels.ScheduleLaunch(
        *(numbers[n] for n in ("CLUSTERS", "CLUSTER_CTAS", "NUM_WARPS", "ROUTES_PER_LANE"))
    )
    context = small_kernels.schedule_context(
        stem,
        "sm_90a",
        num_experts=numbers["NUM_EXPERTS"],
        top_k=numbers["TOP_K"],
        max_tokens=numbers["MAX_TOKENS"],
        tile_m=numbers["TILE_M"],
        max_row_blocks=numbers["MAX_ROW_BLOCKS"],
        offsets={name.lower(): value for name, value in numbers.items()},
        counter_words=numbers["COUNTER_WORDS"],
        workspace_bytes=numbers["WORKSPACE_BYTES"],
        launch=launch,
    )
    assert render(root, "schedule.py.jinja", context) == text
    assert lint("schedule.py", text) == []


def test_committed_route_is_the_template_of_its_spec(root: Path) -> None:
    layer = resolve(load_spec(root / "specs" / "dsv3.yaml"))
    context = small_kernels.route_context("dsv3", "sm_90a", layer.num_experts, layer.router)
    assert render(root, "route.py.jinja", context) == (root / "generated" / "dsv3" / "route.py").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalize": True, "scale": 2.5},
        {"score": "sigmoid", "selection_bias": True, "logit_bias": True},
        {"groups": 8, "top_groups": 4, "group_score": "top2_sum"},
        {"groups": 8, "top_groups": 4},
        {"order": "topk_then_score", "logit_bias": True},
    ],
)
def test_every_router_gives_clean_text(root: Path, changes: dict[str, Any]) -> None:
    text = render(root, "route.py.jinja", small_kernels.route_context("x", "sm_90a", 64, replace(PLAIN, **changes)))
    assert lint("route.py", text) == []


def calls(router: RouterLayer) -> list[str]:
    """Device functions of the steps, in order."""
    return [step.split("route.", 1)[1].split("(")[0] for step in small_kernels.route_steps(router)]


def test_scores_come_before_or_after_the_choice() -> None:
    early, late = calls(PLAIN), calls(replace(PLAIN, order="topk_then_score"))
    assert early.index("softmax") < early.index("keep") < early.index("choose")
    assert late.index("choose") < late.index("gather") < late.index("softmax")
    assert early.count("softmax") == late.count("softmax") == 1


def test_selection_bias_enters_the_choice_but_not_the_weights() -> None:
    steps = small_kernels.route_steps(replace(PLAIN, selection_bias=True, logit_bias=True))
    kept = next(i for i, step in enumerate(steps) if "route.keep" in step)
    assert (
        [("selection_bias" in s) for s in steps].index(True) > kept > [("logit_bias" in s) for s in steps].index(True)
    )


def test_what_a_router_does_not_do_leaves_no_line() -> None:
    assert not {"normalize", "scale", "add_bias", "limit_groups"} & set(calls(PLAIN))
    assert "limit_groups" not in calls(replace(PLAIN, groups=8, top_groups=8))
    assert calls(replace(PLAIN, normalize=True, scale=2.5))[-4:] == ["normalize", "scale", "store_row", "store_row"]


@pytest.mark.parametrize("num_experts", [1, 7, 32, 256, 512, 1000, 3000, 8000])
def test_schedule_counts_fit_into_shared_memory(num_experts: int) -> None:
    launch = small_kernels.schedule_launch(num_experts, 65536)
    assert 1 <= launch.num_warps <= 32 and launch.threads == 32 * launch.num_warps
    used = small_kernels.schedule_smem_bytes(num_experts, launch.num_warps, launch.cluster_ctas)
    assert used <= small_kernels.SMEM_BYTES
    if launch.num_warps < 32:
        more = small_kernels.schedule_smem_bytes(num_experts, 2 * launch.num_warps, launch.cluster_ctas)
        assert more > small_kernels.SMEM_BYTES


def test_more_experts_than_shared_memory_counts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="20000 experts"):
        small_kernels.schedule_launch(20000, 65536)


def test_large_calls_get_more_clusters() -> None:
    clusters = [small_kernels.schedule_launch(32, routes).clusters for routes in (1, 65536, 262144, 1 << 20)]
    assert clusters == sorted(clusters) and clusters[0] == 1 and clusters[-1] == small_kernels.MAX_CLUSTERS
