"""Models, documentation, reduced twins and the shipped specs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from mokgen.facts.activations import ACTIVATIONS
from mokgen.lower.resolve import resolve
from mokgen.spec.document import json_schema, markdown
from mokgen.spec.load import load_spec, shipped_names
from mokgen.spec.moe import MoeSpec
from mokgen.spec.reduce import reduced_size, reduced_twin
from mokgen.testing.subject import reduced_layer

TINY = {"hidden_size": 256, "experts": {"num": 8, "intermediate_size": 256}, "router": {"input": "ids", "top_k": 2}}


def test_specs_are_frozen_and_closed():
    spec = MoeSpec.model_validate(TINY)
    with pytest.raises(ValidationError):
        spec.hidden_size = 8
    with pytest.raises(ValidationError, match="Extra inputs"):
        MoeSpec.model_validate({**TINY, "depth": 2})


def test_rules_hold_for_specs_made_in_python_too():
    with pytest.raises(ValidationError, match="hidden_size: 100 is not a multiple of 8"):
        MoeSpec.model_validate({**TINY, "hidden_size": 100})


def test_documentation_is_current(root: Path):
    assert (root / "docs" / "spec.md").read_text() == markdown(), "run: mokgen schema --markdown > docs/spec.md"


def test_documentation_has_every_field_with_a_meaning():
    for model in json_schema()["$defs"].values():
        for name, field in model["properties"].items():
            assert field.get("description"), f"{name} has no docstring"
            assert f"`{name}`" in markdown()


def test_schema_lists_the_names_of_the_tables():
    schema = json_schema()
    assert schema["$defs"]["ExpertSpec"]["properties"]["activation"]["enum"] == list(ACTIVATIONS)
    assert schema["properties"]["extends"]["type"] == "string"
    json.dumps(schema)


# (T_max, H, I, E, K, shared width, router input)
PUBLISHED = {
    "dsv3": (8192, 7168, 2048, 256, 8, 2048, "logits"),
    "dsv3_slice": (8192, 7168, 2048, 32, 8, 0, "ids"),
    "qwen3_30b_a3b": (32768, 2048, 768, 128, 8, 0, "logits"),
    "gpt_oss_20b": (16384, 2880, 2880, 32, 4, 0, "logits"),
    "sonic_7b": (24576, 1536, 256, 128, 8, 0, "ids"),
    "tiny": (1024, 256, 256, 8, 2, 0, "ids"),
    "ablations/dsv3_top4": (8192, 7168, 2048, 256, 4, 2048, "logits"),
}


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_specs_have_the_published_numbers(name):
    layer = resolve(load_spec(name))
    numbers = (
        layer.max_tokens,
        layer.hidden_size,
        layer.intermediate_size,
        layer.num_experts,
        layer.top_k,
        layer.shared.intermediate_size,
        layer.router.input,
    )
    assert numbers == PUBLISHED[name]


def test_gpt_oss_differs_from_the_defaults_where_the_model_does():
    layer = resolve(load_spec("gpt_oss_20b"))
    assert (layer.activation, layer.alpha, layer.clamp) == ("swigluoai", 1.702, 7.0)
    assert (layer.expert_bias, layer.gate_up_layout) == (True, "interleaved")
    assert (layer.router.order, layer.router.score) == ("topk_then_score", "softmax")


@pytest.mark.parametrize("name", shipped_names())
def test_twins_are_small_and_keep_the_structure(name):
    spec = load_spec(name)
    twin = reduced_twin(spec)
    assert max(twin.hidden_size, twin.experts.intermediate_size) <= 256
    assert twin.experts.num <= 16
    assert twin.topology.max_tokens_per_rank <= 257
    kept = {"experts": {"num", "intermediate_size"}, "shared": {"num", "intermediate_size"}}
    for part in ("experts", "shared", "precision", "target"):
        left, right = (getattr(each, part).model_dump(exclude=kept.get(part, set())) for each in (spec, twin))
        assert left == right
    assert (spec.shared.num > 0) == (twin.shared.num > 0)
    numbers = {"top_k", "groups", "top_groups"}
    assert spec.router.model_dump(exclude=numbers) == twin.router.model_dump(exclude=numbers)
    large, small = resolve(spec), resolve(twin)
    assert (large.router.groups > 1) == (small.router.groups > 1)
    assert reduced_twin(twin) == twin
    assert reduced_layer(large) == small


@pytest.mark.parametrize("size", [*range(8, 520, 8), 1408, 2688, 2880, 3584, 7168])
def test_reduced_sizes_keep_what_is_left_over_a_tile(size):
    small = reduced_size(size)
    assert 8 <= small <= 256
    assert small % 128 == size % 128 or size <= 256
    assert size % 256 or small == 256 or size < 256


@pytest.mark.parametrize(
    ("num", "groups", "top_groups", "top_k", "score"),
    [(64, 64, 3, 3, "max"), (60, 3, 2, 20, "top2_sum"), (256, 32, 31, 100, "top2_sum"), (20, 2, None, 20, "max")],
)
def test_twins_of_group_limited_routers_are_legal(num, groups, top_groups, top_k, score):
    router = {"input": "logits", "top_k": top_k, "groups": groups, "top_groups": top_groups, "group_score": score}
    spec = MoeSpec.model_validate({**TINY, "experts": {"num": num, "intermediate_size": 8}, "router": router})
    twin = reduced_twin(spec)
    assert twin.experts.num <= 16
    assert (twin.router.top_groups or twin.router.groups) < twin.router.groups or top_groups is None


def test_activation_rows_agree_with_their_formulas():
    import torch

    gate = torch.linspace(-9, 9, 37, dtype=torch.float64)
    up = gate.flip(0) * 1.5
    for row in ACTIVATIONS.values():
        for clamp in (math.inf, 2.0):
            g, u = (gate, up) if math.isinf(clamp) else (gate.clamp(max=clamp), up.clamp(-clamp, clamp))
            names = {"gate": g, "up": u, "alpha": 1.3, "sigmoid": torch.sigmoid}
            expected = eval(row.formula, {"__builtins__": {}}, names)
            torch.testing.assert_close(row.reference(gate, up, 1.3, clamp), expected)
