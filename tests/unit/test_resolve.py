"""What a spec means: equal layers for equal meaning, neutral values for absent features, refusals with a way out."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mokgen.errors import UnsupportedError
from mokgen.facts.activations import ACTIVATIONS
from mokgen.lower.layer import ResolvedLayer
from mokgen.lower.resolve import resolve
from mokgen.spec.load import load_spec, shipped_names
from mokgen.spec.moe import MoeSpec


def spec_of(router: dict | None = None, **fields) -> MoeSpec:
    data = {
        "hidden_size": 256,
        "experts": {"num": 8, "intermediate_size": 256},
        "router": router or {"input": "logits", "top_k": 2},
    }
    return MoeSpec.model_validate({**data, **fields})


def logits(**fields) -> dict:
    return {"input": "logits", "top_k": 2, **fields}


def experts(**fields) -> dict:
    return {"num": 8, "intermediate_size": 256, **fields}


def test_defaults_of_the_activation_fill_alpha_and_clamp():
    layer = resolve(spec_of(experts=experts(activation="swigluoai")))
    assert (layer.alpha, layer.clamp) == (1.702, 7.0)
    assert resolve(spec_of()).clamp == math.inf
    assert resolve(spec_of()).alpha == 1.0
    assert resolve(spec_of(experts=experts(activation="swigluoai", clamp=math.inf, alpha=2))).clamp == math.inf


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (spec_of(), spec_of(shared={"num": 0, "intermediate_size": 512, "gate": "sigmoid"})),
        (spec_of(), spec_of(logits(groups=4))),
        (spec_of(), spec_of(logits(groups=4, top_groups=4, group_score="top2_sum"))),
        (spec_of(), spec_of(logits(group_score="top2_sum"))),
        (spec_of(), spec_of(logits(scale=1))),
        (spec_of(), spec_of(experts=experts(alpha=1, clamp=math.inf))),
        (spec_of(), spec_of(save="none")),
        (spec_of(shared={"num": 1}), spec_of(shared={"num": 1, "intermediate_size": 256})),
        (spec_of(shared={"num": 2, "intermediate_size": 128}), spec_of(shared={"num": 2, "intermediate_size": 128})),
        (
            spec_of(logits(order="topk_then_score", normalize=True)),
            spec_of(logits(order="topk_then_score", normalize=False)),
        ),
        (spec_of(plan={"a": 1, "b": 2}), spec_of(plan={"b": 2, "a": 1})),
    ],
)
def test_equal_meaning_gives_equal_layers(left, right):
    assert resolve(left) == resolve(right)


@pytest.mark.parametrize(
    "other",
    [
        spec_of(logits(normalize=False)),
        spec_of(logits(groups=4, top_groups=2)),
        spec_of(logits(score="sigmoid")),
        spec_of(logits(logits_dtype="bf16")),
        spec_of({"input": "ids", "top_k": 2}),
        spec_of(shared={"num": 1}),
        spec_of(experts=experts(bias=True)),
        spec_of(experts=experts(gate_up_layout="interleaved")),
        spec_of(checks="checked"),
        spec_of(determinism="batch_invariant"),
        spec_of(plan={"a": 1}),
    ],
)
def test_other_meaning_gives_another_layer(other):
    assert resolve(other) != resolve(spec_of())


def test_file_name_comments_and_key_order_leave_no_trace(tmp_path):
    lines = ["hidden_size: 256", "experts: {num: 8, intermediate_size: 256}", "router: {input: ids, top_k: 2}"]
    layers = set()
    for index, order in enumerate(itertools.permutations(lines)):
        path = tmp_path / f"name{index}.yaml"
        path.write_text(f"# comment {index}\n" + "\n".join(order) + "\n")
        layers.add(resolve(load_spec(path)))
    assert len(layers) == 1


@pytest.mark.parametrize("name", shipped_names())
def test_layers_survive_json(name):
    layer = resolve(load_spec(name))
    assert ResolvedLayer.from_dict(json.loads(json.dumps(layer.to_dict()))) == layer


@pytest.mark.parametrize(
    ("fields", "where", "stage", "nearest"),
    [
        ({"router": {"input": "ids", "top_k": 129}, "experts": experts(num=256)}, "router.top_k", "reduce", "128"),
        ({"precision": {"kind": "fp8_block"}}, "precision.kind", "quantize", "bf16"),
        ({"precision": {"kind": "mxfp8"}}, "precision.kind", "quantize", "bf16"),
        ({"topology": {"ep_size": 2, "transport": "virtual"}}, "topology.ep_size", "dispatch", "1"),
        ({"topology": {"transport": "symmetric"}}, "topology.transport", "dispatch", "local"),
        ({"topology": {"transport": "gloo"}}, "topology.transport", "dispatch", "local"),
        ({"topology": {"capacity": "drop"}}, "topology.capacity", "schedule", "dropless"),
        ({"passes": ["forward", "backward"]}, "passes", "dgrad", "[forward]"),
        ({"target": {"archs": ["sm_90a", "sm_100a"]}}, "target.archs", "every stage", "sm_90a"),
    ],
)
def test_choices_without_kernels_are_refused_by_name(fields, where, stage, nearest):
    with pytest.raises(UnsupportedError) as caught:
        resolve(spec_of(**fields))
    first = caught.value.diagnostics[0]
    assert first.where == where
    assert stage in first.what
    assert nearest in first.hint
    assert caught.value.exit_code == 2


def test_every_choice_without_kernels_is_named_at_once():
    with pytest.raises(UnsupportedError) as caught:
        resolve(spec_of(precision={"kind": "mxfp8"}, passes=["forward", "backward"], target={"archs": ["sm_103a"]}))
    assert [entry.where for entry in caught.value.diagnostics] == ["precision.kind", "passes", "target.archs"]


@given(
    num=st.integers(1, 64),
    groups=st.integers(1, 8),
    top_groups=st.none() | st.integers(1, 8),
    top_k=st.integers(1, 64),
    size=st.integers(1, 4096),
    score=st.sampled_from(["max", "top2_sum"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_whatever_is_legal_resolves(num, groups, top_groups, top_k, size, score, activation):
    from pydantic import ValidationError

    router = logits(top_k=top_k, groups=groups, top_groups=top_groups, group_score=score)
    try:
        spec = spec_of(router, hidden_size=size, experts=experts(num=num, activation=activation))
    except ValidationError as error:
        assert [entry["type"] for entry in error.errors()] == ["rules"]
        return
    layer = resolve(spec)
    assert size % 8 == 0
    assert layer.router.top_groups * (num // layer.router.groups) >= layer.top_k
    assert layer.router.top_groups < layer.router.groups or layer.router.groups == 1
