"""Route and schedule compile for sm_90a to what they are meant to be: no stack, no spills, no atomics, right order."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from layers import router_plan

from mokgen.codegen.emit import emit
from mokgen.compile.compiler import KernelReport
from mokgen.compile.pool import compile_bundle
from mokgen.lower.layer import RouterLayer
from mokgen.plan.model import LayerPlan

pytestmark = pytest.mark.compile
ARCH = "sm_90a"
PLAIN = RouterLayer("logits", 8, "softmax", "score_then_topk", False, 1.0, False, False, 1, 1, "max", "fp32", "bf16")
SCHEDULES = {
    "few": (7, 3, 100),
    "slice": (32, 8, 8192),
    "full": (256, 8, 8192),
    "wide": (512, 512, 512),
    "huge": (3000, 4, 512),
}
ROUTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "deepseek": (256, {"score": "sigmoid", "normalize": True, "scale": 2.5, "selection_bias": True, "groups": 8,
                       "top_groups": 4, "group_score": "top2_sum", "logits_dtype": "fp32"}),
    "qwen": (128, {"normalize": True}),
    "gpt_oss": (32, {"top_k": 4, "order": "topk_then_score"}),
    "odd": (90, {"top_k": 40, "score": "sigmoid", "logit_bias": True, "groups": 45, "top_groups": 20}),
}  # fmt: skip

SCHEDULE_NAMES = [f"schedule_{name}" for name in SCHEDULES]
ROUTE_NAMES = [f"route_{name}" for name in ROUTERS]


@dataclass(frozen=True)
class Compiled:
    """One kernel of the test's bundle."""

    report: KernelReport
    ptx: str


def plan_of(name: str) -> LayerPlan:
    """Plan of schedule_<entry of SCHEDULES> or route_<entry of ROUTERS>."""
    kernel, _, entry = name.partition("_")
    if kernel == "schedule":
        experts, top_k, tokens = SCHEDULES[entry]
        return router_plan(experts, replace(PLAIN, top_k=top_k), tokens)
    experts, changes = ROUTERS[entry]
    return router_plan(experts, replace(PLAIN, **changes), 1024)


def text_of(name: str) -> str:
    return emit(plan_of(name), name).files[f"{name.partition('_')[0]}.py"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """All kernels above, compiled once."""
    folder = tmp_path_factory.mktemp("route_schedule")
    for name in SCHEDULE_NAMES + ROUTE_NAMES:
        (folder / f"{name}.py").write_text(text_of(name))
    reports = compile_bundle(folder, ARCH, jobs=2)
    return {report.kernel: Compiled(report, (folder / report.ptx).read_text()) for report in reports}


@pytest.mark.parametrize("name", SCHEDULE_NAMES + ROUTE_NAMES)
def test_no_stack_no_spills_no_local_memory(compiled: dict[str, Compiled], name: str) -> None:
    report = compiled[name].report
    assert report.findings() == ()
    assert report.stack == 0 and report.spill_bytes == 0
    assert report.registers is not None and report.threads is not None
    assert report.registers * report.threads <= 65536, "one CTA fits into an SM's registers"


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_shared_memory_is_what_the_launch_was_derived_from(compiled: dict[str, Compiled], name: str) -> None:
    report, kernel = compiled[name].report, plan_of(name).kernel("schedule")
    assert report.threads == kernel.threads
    assert report.smem_bytes == kernel.shared_bytes


@pytest.mark.parametrize("name", ROUTE_NAMES)
def test_route_is_launched_as_planned(compiled: dict[str, Compiled], name: str) -> None:
    report, kernel = compiled[name].report, plan_of(name).kernel("route")
    assert (report.threads, report.smem_bytes) == (kernel.threads, kernel.shared_bytes)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_schedule_is_deterministic_integer_work(compiled: dict[str, Compiled], name: str) -> None:
    ptx = compiled[name].ptx
    body = ptx[ptx.index("{") :]
    assert "match.any.sync.b32" in body
    assert not re.search(r"\b(atom|red)\.(?!sync)", body), "an atomic makes the order of rows depend on timing"
    assert not re.search(r"\.f(16|32|64)\b", body), "no floating point"
    assert "st.release.sys" in body and "membar" not in body and "fence.acq_rel.gpu" not in body
    assert not re.search(r"st\.global\S*\.(b|u)8", body), "tables are written word by word"


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_counts_are_sent_to_every_peer_once_all_mailboxes_are_open(compiled: dict[str, Compiled], name: str) -> None:
    words = r"(mbarrier\.init|fence\.mbarrier_init|barrier\.cluster\.\w+|st\.async|mbarrier\.try_wait)"
    order = re.findall(words, compiled[name].ptx)
    first = ["mbarrier.init", "fence.mbarrier_init", "barrier.cluster.arrive", "barrier.cluster.wait"]
    assert order[:4] == first
    assert "barrier.cluster.arrive.relaxed" in compiled[name].ptx, "a releasing one waits for all global stores"
    assert order[4:-1] == ["st.async"] * 2 * plan_of(name).kernel("schedule").cluster  # counts, invalid
    assert order[-1] == "mbarrier.try_wait"


@pytest.mark.parametrize("name", ROUTE_NAMES)
def test_scores_are_rounded_as_torch_rounds(compiled: dict[str, Compiled], name: str) -> None:
    ptx = compiled[name].ptx
    assert "ex2.approx.ftz.f32" in ptx  # inside the library's exp, which reduces its argument first
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 2 * len(re.findall(r"ex2\.approx", ptx))
    assert re.search(r"(div|rcp)\.rn\.f32", ptx) and not re.search(r"(div|rcp)\.(approx|full)", ptx)
    assert "redux.sync.max.s32" in ptx and "redux.sync.min.s32" in ptx


def test_same_text_gives_the_same_object(compiled: dict[str, Compiled], tmp_path: Path) -> None:
    (tmp_path / "route_odd.py").write_text(text_of("route_odd"))
    (report,) = compile_bundle(tmp_path, ARCH, jobs=1)
    assert (tmp_path / report.ptx).read_text() == compiled["route_odd"].ptx
