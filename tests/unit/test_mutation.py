"""No wait, signal, required count or arrival count of a plan can be dropped or changed unnoticed.

The mutants are listed from the plan itself. verify and the executor are tried apart: each must find every mutant that
it can see, so neither hides a gap of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from layers import resolved

from mokgen.errors import VerifyError
from mokgen.execute import LayerPlan, run
from mokgen.lower.build import lower
from mokgen.plan.model import Count, Pipeline, TaskKind, Wait
from mokgen.plan.schedule import make_plan
from mokgen.plan.verify import verify
from mokgen.reference.inputs import make_inputs, make_parameters, present

SEEDS = range(300)
LAYERS = {
    "plain": resolved(257, hidden_size=768, plan__slab_tiles=2),
    "shared": resolved(257, hidden_size=768, shared__num=1, plan__slab_tiles=2),
}
PLANS = {name: make_plan(lower(layer)) for name, layer in LAYERS.items()}


def with_item(plan: LayerPlan, field: str, name: str, **changes: Any) -> LayerPlan:
    """The plan with one kind, pipeline or named barrier of its forward kernel changed."""
    kernel = plan.kernel("forward")
    items = tuple(replace(item, **changes) if item.name == name else item for item in getattr(kernel, field))
    return replace(plan, kernels=(*plan.kernels[:-1], replace(kernel, **{field: items})))


def exchanged(items: tuple[Any, ...], index: int, *new: Any) -> tuple[Any, ...]:
    return (*items[:index], *new, *items[index + 1 :])


def count_mutants(count: Count) -> Iterator[tuple[str, tuple[Count, ...]]]:
    yield "dropped", ()
    yield "+1", (replace(count, factor=count.factor + 1),)
    yield "-1", (replace(count, factor=count.factor - 1),)
    for index, name in enumerate(count.quantities):
        yield f"without {name}", (replace(count, quantities=exchanged(count.quantities, index)),)


def wait_mutants(wait: Wait) -> Iterator[tuple[str, tuple[Wait, ...]]]:
    yield "dropped", ()
    for index, count in enumerate(wait.required):
        for change, new in count_mutants(count):
            yield f"count {index} {change}", (replace(wait, required=exchanged(wait.required, index, *new)),)


def flow_mutants(plan: LayerPlan, kind: TaskKind) -> Iterator[tuple[str, LayerPlan]]:
    for index, wait in enumerate(kind.waits):
        for change, waits in wait_mutants(wait):
            yield (
                f"{kind.name} waits {wait.counter} {change}",
                with_item(plan, "kinds", kind.name, waits=exchanged(kind.waits, index, *waits)),
            )
    for index, signal in enumerate(kind.signals):
        for change, signals in (
            ("dropped", ()),
            ("+1", (replace(signal, amount=signal.amount + 1),)),
            ("-1", (replace(signal, amount=signal.amount - 1),)),
        ):
            yield (
                f"{kind.name} signals {signal.counter} {change}",
                with_item(plan, "kinds", kind.name, signals=exchanged(kind.signals, index, *signals)),
            )


def arrival_mutants(plan: LayerPlan) -> Iterator[tuple[str, LayerPlan]]:
    kernel = plan.kernel("forward")
    pipelines: tuple[Pipeline, ...] = kernel.pipelines
    for pipeline in pipelines:
        for side in ("full", "empty"):
            barrier = getattr(pipeline, side)
            for step in (1, -1):
                changed = replace(barrier, arrivals=barrier.arrivals + step)
                yield (
                    f"{pipeline.name} {side} {step:+d}",
                    with_item(plan, "pipelines", pipeline.name, **{side: changed}),
                )
            for index, party in enumerate(barrier.parties):
                changed = replace(barrier, parties=exchanged(barrier.parties, index))
                yield (
                    f"{pipeline.name} {side} without {party.role}",
                    with_item(plan, "pipelines", pipeline.name, **{side: changed}),
                )
    for named in kernel.named_barriers:
        for step in (1, -1):
            changed = with_item(plan, "named_barriers", named.name, threads=named.threads + step)
            yield f"{named.name} threads {step:+d}", changed


FLOW = {
    f"{layer}: {name}": (layer, mutant)
    for layer, plan in PLANS.items()
    for kind in plan.kernel("forward").kinds
    for name, mutant in flow_mutants(plan, kind)
}
ARRIVALS = {f"{layer}: {name}": mutant for layer, plan in PLANS.items() for name, mutant in arrival_mutants(plan)}


@cache
def tensors(layer: str) -> dict[str, Any]:
    given = present(make_inputs(LAYERS[layer], 200, "ragged")) | present(make_parameters(LAYERS[layer]))
    given["topk_weights"] = given.pop("weights")
    return given


def test_the_list_has_every_wait_signal_and_barrier():
    for layer, plan in PLANS.items():
        kernel = plan.kernel("forward")
        for kind in kernel.kinds:
            for wait in kind.waits:
                assert sum(name.startswith(f"{layer}: {kind.name} waits {wait.counter} ") for name in FLOW) >= 4
            for signal in kind.signals:
                assert sum(name.startswith(f"{layer}: {kind.name} signals {signal.counter} ") for name in FLOW) == 3
        for pipeline in kernel.pipelines:
            assert sum(name.startswith(f"{layer}: {pipeline.name} ") for name in ARRIVALS) >= 6
    assert len(FLOW) >= 40


@pytest.mark.parametrize("layer", LAYERS)
def test_the_plans_themselves_survive(layer):
    assert verify(PLANS[layer]) == []
    for seed in range(20):
        run(PLANS[layer], tensors(layer), order=seed)


@pytest.mark.parametrize("name", FLOW)
def test_verify_finds_every_change_of_waits_and_signals(name):
    _, mutant = FLOW[name]
    rules = {finding.rule for finding in verify(mutant)}
    assert rules & {"required count", "read before write"}, rules


@pytest.mark.parametrize("name", FLOW)
def test_the_executor_fails_on_every_change_of_waits_and_signals(name):
    layer, mutant = FLOW[name]
    for seed in SEEDS:
        try:
            run(mutant, tensors(layer), order=seed)
        except VerifyError:
            return
    pytest.fail(f"{name}: no failure in {len(SEEDS)} interleavings")


@pytest.mark.parametrize("name", ARRIVALS)
def test_verify_finds_every_change_of_arrivals(name):
    rules = {finding.rule for finding in verify(ARRIVALS[name])}
    assert rules & {"arrivals", "ring reuse"}, rules
