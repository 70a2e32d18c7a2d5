"""The stage graph: which stages a layer has, what flows between them, and that listings are stable."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from layers import resolved

from mokgen.errors import PlanError, UnsupportedError
from mokgen.ir.graph import INPUT, OUTPUT, StageGraph
from mokgen.ir.tensor import TensorRef
from mokgen.lower.build import lower
from mokgen.lower.resolve import resolve
from mokgen.spec.load import find_spec, load_spec, shipped_names
from mokgen.stages.registry import STAGES

X = TensorRef("x", "bf16", ("T", 8))


def test_a_plain_layer_has_two_launches():
    graph = lower(resolved())
    assert graph.stages() == ("schedule", "fc1", "fc2", "reduce")
    assert graph.kernels() == ("schedule", "forward")


def test_router_and_shared_expert_bring_their_stages():
    graph = lower(resolved(router={"input": "logits", "top_k": 2}, shared__num=1))
    assert graph.stages() == ("route", "schedule", "fc1", "fc2", "shared_fc1", "shared_fc2", "reduce")
    assert graph.kernels() == ("route", "schedule", "forward")


def test_edges_name_the_tensors():
    edges = [(u, v, ref.name) for u, v, ref in lower(resolved()).edges()]
    assert ("schedule", "fc1", "row_token") in edges
    assert ("fc1", "fc2", "hidden") in edges
    assert ("fc2", "reduce", "y") in edges
    assert (INPUT, "reduce", "topk_weights") in edges
    assert ("reduce", OUTPUT, "out") in edges
    # Two tensors between one pair of stages need no helper node.
    assert sum(edge[:2] == ("schedule", "fc1") for edge in edges) == 4


def test_biases_are_edges_only_where_the_layer_has_them():
    def inputs(layer) -> set[str]:
        return {ref.name for producer, _, ref in lower(layer).edges() if producer == INPUT}

    assert inputs(resolved(experts__bias=True)) - inputs(resolved()) == {"b_gate_up", "b_down"}


def test_every_stage_of_the_registry_is_reached_by_some_layer():
    plain = set(lower(resolved()).stages())
    full = set(lower(resolved(router={"input": "logits", "top_k": 2}, shared__num=1)).stages())
    assert plain | full == set(STAGES)


def test_depth_counts_inside_the_given_stages():
    graph = lower(resolved(shared__num=1))
    assert graph.depth(("fc1", "fc2", "shared_fc1", "shared_fc2", "reduce")) == {
        "fc1": 0,
        "shared_fc1": 0,
        "fc2": 1,
        "shared_fc2": 1,
        "reduce": 2,
    }


def test_text_and_mermaid_name_every_stage_and_tensor():
    graph = lower(resolved(shared__num=1))
    for stage in graph.stages():
        assert f"{stage} [{graph.kernel_of(stage)}]" in graph.to_text()
        assert f"    {stage}[{stage}]" in graph.to_mermaid()
    for producer, consumer, ref in graph.edges():
        assert f"  {producer} -- {ref.name} --> {consumer}" in graph.to_mermaid()


def test_listings_are_the_same_in_every_process():
    code = (
        "from mokgen.spec.load import load_spec; from mokgen.lower.resolve import resolve;"
        "from mokgen.lower.build import lower; from mokgen.plan.schedule import make_plan; import sys;"
        "graph = lower(resolve(load_spec(sys.argv[1])));"
        "print(graph.to_text(), graph.to_mermaid(), make_plan(graph).to_json())"
    )
    texts = set()
    for seed in ("1", "2", "3"):
        command = [sys.executable, "-c", code, str(find_spec("dsv3"))]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        texts.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1


def test_a_stage_or_an_edge_is_added_once():
    graph = StageGraph(resolved())
    graph.add_stage("a", "k")
    graph.add_stage("b", "k")
    with pytest.raises(PlanError, match="a is added twice"):
        graph.add_stage("a", "k")
    graph.add_edge("a", "b", X)
    with pytest.raises(PlanError, match="x is added twice"):
        graph.add_edge("a", "b", X)
    with pytest.raises(PlanError, match="no stage c"):
        graph.add_edge("a", "c", X)


def test_circles_and_unused_stages_are_refused():
    graph = StageGraph(resolved())
    for name in ("a", "b", "dead", OUTPUT):
        graph.add_stage(name, "k")
    graph.add_edge("a", "b", X)
    graph.add_edge("b", OUTPUT, X)
    with pytest.raises(PlanError, match="nothing uses the result of dead"):
        graph.check()
    graph.add_edge("b", "a", X)
    with pytest.raises(PlanError, match="in a circle"):
        graph.check()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ep_size": 2}, "dispatch and combine"),
        ({"precision": "fp8_block"}, "quantize"),
        ({"passes": ("forward", "backward")}, "backward"),
    ],
)
def test_what_has_no_stages_is_refused_by_name(change, what):
    with pytest.raises(UnsupportedError, match=what) as error:
        lower(replace(resolved(), **change))
    assert "nearest supported" in error.value.hint


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_specs_lower(name):
    graph = lower(resolve(load_spec(name)))
    assert {"schedule", "fc1", "fc2", "reduce"} <= set(graph.stages())
