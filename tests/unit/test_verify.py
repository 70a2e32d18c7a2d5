"""verify: good plans have no finding, and each rule finds the plan that breaks it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from layers import resolved

from mokgen.errors import VerifyError
from mokgen.ir.requests import Access
from mokgen.lower.build import lower
from mokgen.lower.resolve import resolve
from mokgen.plan.model import Count, LayerPlan, Phase, Signal, Wait
from mokgen.plan.schedule import make_plan
from mokgen.plan.verify import require, verify
from mokgen.spec.load import load_spec, shipped_names

PLAN = make_plan(
    lower(resolved(300, hidden_size=768, router={"input": "logits", "top_k": 2}, shared__num=1, plan__slab_tiles=2))
)


def swap(items: tuple[Any, ...], name: str, **changes: Any) -> tuple[Any, ...]:
    assert any(item.name == name for item in items)
    return tuple(replace(item, **changes) if item.name == name else item for item in items)


def with_kernel(name: str, **changes: Any) -> LayerPlan:
    return replace(PLAN, kernels=swap(PLAN.kernels, name, **changes))


def with_forward(**changes: Any) -> LayerPlan:
    return with_kernel("forward", **changes)


def with_kind(name: str, **changes: Any) -> LayerPlan:
    return with_forward(kinds=swap(PLAN.kernel("forward").kinds, name, **changes))


def with_region(name: str, **changes: Any) -> LayerPlan:
    return replace(PLAN, regions=swap(PLAN.regions, name, **changes))


def with_role(name: str, **changes: Any) -> LayerPlan:
    return with_forward(roles=swap(PLAN.kernel("forward").roles, name, **changes))


def with_queue(name: str, **changes: Any) -> LayerPlan:
    return with_forward(queues=swap(PLAN.kernel("forward").queues, name, **changes))


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_plans_hold_and_are_proven_quickly(name):
    plan = make_plan(lower(resolve(load_spec(name))))
    begin = time.perf_counter()
    assert verify(plan) == []
    assert time.perf_counter() - begin < 0.5


def test_the_test_plan_holds():
    assert verify(PLAN) == []
    require(PLAN)


FORWARD = PLAN.kernel("forward")
PHASES = FORWARD.queue("main").phases
CIRCLE = (Wait("slab_done", "zero", (Count(2, ("slab_width", "row_blocks")),), "load"),)

BROKEN: dict[str, tuple[str, Callable[[], LayerPlan]]] = {
    "regions overlap": ("region overlap", lambda: with_region("y", offset=PLAN.region("hidden").offset)),
    "region past the end": ("region bounds", lambda: replace(PLAN, workspace_bytes=PLAN.region("shared_y").offset)),
    "region of the wrong size": ("region size", lambda: with_region("y", bytes=PLAN.region("y").bytes - 2)),
    "region off the alignment": ("region alignment", lambda: with_region("slot_row", offset=8)),
    "region read before its launch": ("region life", lambda: with_region("hidden", readers=("route",))),
    "region of an unknown stage": ("region life", lambda: with_region("hidden", writer="fc9")),
    "region too small": ("capacity", lambda: with_region("y", shape=(128, 768), bytes=128 * 768 * 2)),
    "counters zeroed by nobody": ("counter", lambda: with_region("counters", writer="fc1")),
    "counter outside its region": (
        "counter",
        lambda: replace(PLAN, counters=swap(PLAN.counters, "slab_done", word=10**6)),
    ),
    "counters overlap": ("counter", lambda: replace(PLAN, counters=swap(PLAN.counters, "slab_done", word=96))),
    "counter too short": ("capacity", lambda: replace(PLAN, counters=swap(PLAN.counters, "hidden_ready", length=2))),
    "unknown counter": (
        "counter",
        lambda: with_kind("fc1", signals=(replace(FORWARD.kind("fc1").signals[0], counter="gone"),)),
    ),
    "too many registers": ("registers", lambda: with_role("mma", registers=240)),
    "registers off the granule": ("registers", lambda: with_role("mma", registers=220)),
    "registers differ in a warpgroup": ("registers", lambda: with_role("scheduler", registers=48)),
    "roles leave a gap": ("roles", lambda: with_role("mma", first_warp=5)),
    "threads without a role": ("roles", lambda: with_forward(threads=512)),
    "shared memory regions overlap": (
        "shared memory",
        lambda: with_forward(shared=swap(FORWARD.shared, "operand_b", offset=1024)),
    ),
    "too much shared memory": ("shared memory", lambda: with_forward(shared_bytes=232449)),
    "stage too small": ("shared memory", lambda: with_forward(shared=swap(FORWARD.shared, "operand_a", bytes=1024))),
    "ring not given back by a reader": (
        "ring reuse",
        lambda: with_forward(
            pipelines=swap(
                FORWARD.pipelines,
                "task",
                empty=replace(
                    FORWARD.pipeline("task").empty, arrivals=4, parties=FORWARD.pipeline("task").empty.parties[:3]
                ),
            )
        ),
    ),
    "lag as deep as the ring": ("pipeline", lambda: with_forward(tiles=replace(FORWARD.tiles, consumer_lag=2))),
    "ring of one": ("pipeline", lambda: with_forward(pipelines=swap(FORWARD.pipelines, "task", stages=1))),
    "phases the wrong way": ("later ticket", lambda: with_queue("main", phases=PHASES[::-1])),
    "a gathering tile after one that is not": ("role leaves", lambda: with_queue("main", phases=PHASES[::-1])),
    "queues wait for each other": (
        "cycle",
        lambda: with_forward(
            kinds=swap(
                swap(
                    FORWARD.kinds,
                    "reduce",
                    signals=(Signal("shared_hidden_ready", "zero", 1, "reduce", "one", False),),
                ),
                "fc1",
                waits=(Wait("shared_hidden_ready", "zero", (Count(1),), "load"),),
            )
        ),
    ),
    "a kind waits for itself": ("later ticket", lambda: with_kind("fc2", waits=CIRCLE)),
    "a kind left out of its queue": (
        "read",
        lambda: with_queue("main", phases=(Phase(("shared_fc1",), False), PHASES[1])),
    ),
    "a column tile left out": (
        "coverage",
        lambda: with_kind("fc1", space=replace(FORWARD.kind("fc1").space, column_tiles=1)),
    ),
    "two kinds write a tensor": ("written once", lambda: with_kind("shared_fc1", writes=FORWARD.kind("fc1").writes)),
    "a read of nobody's tensor": ("task kinds", lambda: with_kind("fc2", reads=(Access("z", "tile", "all"),))),
    "a read by other row blocks": (
        "read",
        lambda: with_kind("shared_fc2", reads=(Access("hidden", "tile", "all"),)),
    ),
    "two kinds of one code": ("task kinds", lambda: with_kind("fc2", code=1)),
    "a signal nobody gives": (
        "signal amount",
        lambda: with_kind("fc1", signals=(replace(FORWARD.kind("fc1").signals[0], unit="warp"),)),
    ),
    "a role nobody has": ("task kinds", lambda: with_kind("fc2", waits=(replace(CIRCLE[0], role="store"),))),
    "a cluster larger than the GPU has": ("cluster", lambda: with_kernel("schedule", cluster=32)),
    **{
        f"{constant.name} of {kernel.name} that the tables contradict": (
            "constants",
            lambda kernel=kernel, constant=constant: with_kernel(
                kernel.name, constants=swap(kernel.constants, constant.name, value=constant.value + 1)
            ),
        )
        for kernel in PLAN.kernels
        for constant in kernel.constants
        if constant.name != "CLUSTERS"  # stands in this constant alone
    },
    "a workspace of another size": (
        "arguments",
        lambda: with_forward(arguments=swap(FORWARD.arguments, "workspace", shape=(1,))),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_finds_its_fault(name):
    rule, broken = BROKEN[name]
    found = verify(broken())
    assert rule in {finding.rule for finding in found}, [str(finding) for finding in found]
    with pytest.raises(VerifyError):
        require(broken())


def test_regions_may_share_bytes_when_their_lives_do_not_meet():
    """A table only the schedule launch reads, and rows that the forward writes."""
    apart = with_region("block_rows", readers=("schedule",), offset=PLAN.region("y").offset)
    assert "region overlap" not in {finding.rule for finding in verify(apart)}
    meeting = with_region("block_rows", offset=PLAN.region("y").offset)
    assert "region overlap" in {finding.rule for finding in verify(meeting)}


def test_findings_name_expected_and_actual():
    kind = FORWARD.kind("fc2")
    (found,) = [
        finding
        for finding in verify(with_kind("fc2", waits=(replace(kind.waits[0], required=(Count(5),)),)))
        if finding.rule == "required count"
    ]
    assert found.where == "fc2"
    assert ">= 5, but 4 arrive" in found.what
