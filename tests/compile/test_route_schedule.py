"""Route and schedule compile for sm_90a to what they are meant to be: no stack, no spills, no atomics, right order."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import pytest

from mokgen.codegen import small_kernels
from mokgen.compile.compiler import KernelReport
from mokgen.compile.pool import compile_bundle
from mokgen.lower.layer import RouterLayer

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


@dataclass(frozen=True)
class Compiled:
    """One kernel of the test's bundle."""

    report: KernelReport
    ptx: str


def contexts() -> dict[str, tuple[str, dict[str, Any]]]:
    """Template and context of every kernel, by name."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, (experts, top_k, tokens) in SCHEDULES.items():
        blocks = (tokens * top_k + 127 * min(experts, tokens * top_k)) // 128
        regions = ("counters", "block_start", "block_expert", "block_rows", "row_token", "slot_row")
        context = small_kernels.schedule_context(
            name,
            ARCH,
            num_experts=experts,
            top_k=top_k,
            max_tokens=tokens,
            tile_m=128,
            max_row_blocks=blocks,
            offsets={region: i << 26 for i, region in enumerate(regions)},
            counter_words=96 + blocks,
            workspace_bytes=6 << 26,
            launch=small_kernels.schedule_launch(experts, tokens * top_k),
        )
        found[f"schedule_{name}"] = ("schedule.py.jinja", context)
    for name, (experts, changes) in ROUTERS.items():
        router = replace(PLAIN, **changes)
        found[f"route_{name}"] = ("route.py.jinja", small_kernels.route_context(name, ARCH, experts, router))
    return found


@pytest.fixture(scope="module")
def compiled(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """All kernels above, compiled once."""
    folder = tmp_path_factory.mktemp("route_schedule")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name, (template, context) in contexts().items():
        (folder / f"{name}.py").write_text(environment.get_template(template).render(context))
    reports = compile_bundle(folder, ARCH, jobs=2)
    return {report.kernel: Compiled(report, (folder / report.ptx).read_text()) for report in reports}


SCHEDULE_NAMES = [f"schedule_{name}" for name in SCHEDULES]
ROUTE_NAMES = [f"route_{name}" for name in ROUTERS]


@pytest.mark.parametrize("name", SCHEDULE_NAMES + ROUTE_NAMES)
def test_no_stack_no_spills_no_local_memory(compiled: dict[str, Compiled], name: str) -> None:
    report = compiled[name].report
    assert report.findings() == ()
    assert report.stack == 0 and report.spill_bytes == 0
    assert report.registers is not None and report.threads is not None
    assert report.registers * report.threads <= 65536, "one CTA fits into an SM's registers"


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_shared_memory_is_what_the_launch_was_derived_from(compiled: dict[str, Compiled], name: str) -> None:
    experts = SCHEDULES[name.removeprefix("schedule_")][0]
    report, launch = compiled[name].report, small_kernels.schedule_launch(experts, 1)
    assert report.threads == launch.threads
    derived = small_kernels.schedule_smem_bytes(experts, launch.num_warps, launch.cluster_ctas)
    assert 0 <= derived - report.smem_bytes <= small_kernels.ALIGNMENT_SLACK


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
    experts = SCHEDULES[name.removeprefix("schedule_")][0]
    words = r"(mbarrier\.init|fence\.mbarrier_init|barrier\.cluster\.\w+|st\.async|mbarrier\.try_wait)"
    order = re.findall(words, compiled[name].ptx)
    first = ["mbarrier.init", "fence.mbarrier_init", "barrier.cluster.arrive", "barrier.cluster.wait"]
    assert order[:4] == first
    assert "barrier.cluster.arrive.relaxed" in compiled[name].ptx, "a releasing one waits for all global stores"
    assert order[4:-1] == ["st.async"] * 2 * small_kernels.schedule_launch(experts, 1).cluster_ctas  # counts, invalid
    assert order[-1] == "mbarrier.try_wait"


@pytest.mark.parametrize("name", ROUTE_NAMES)
def test_scores_are_rounded_as_torch_rounds(compiled: dict[str, Compiled], name: str) -> None:
    ptx = compiled[name].ptx
    assert "ex2.approx.ftz.f32" in ptx  # inside the library's exp, which reduces its argument first
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 2 * len(re.findall(r"ex2\.approx", ptx))
    assert re.search(r"(div|rcp)\.rn\.f32", ptx) and not re.search(r"(div|rcp)\.(approx|full)", ptx)
    assert "redux.sync.max.s32" in ptx and "redux.sync.min.s32" in ptx


def test_same_text_gives_the_same_object(compiled: dict[str, Compiled], root: Path, tmp_path: Path) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template, context = contexts()["route_odd"]
    (tmp_path / "route_odd.py").write_text(environment.get_template(template).render(context))
    (report,) = compile_bundle(tmp_path, ARCH, jobs=1)
    assert (tmp_path / report.ptx).read_text() == compiled["route_odd"].ptx
