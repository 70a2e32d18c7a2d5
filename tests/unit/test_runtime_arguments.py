"""Argument errors name the argument, what it got and what it needs, before anything runs."""

from __future__ import annotations

import pytest
import torch
from layers import arguments, cpu_layer

from mokgen.errors import ArgumentError
from mokgen.runtime.op import PARAMETERS

FULL = {
    "experts__bias": True,
    "shared__num": 1,
    "shared__gate": "sigmoid",
}
PLACES = {"logits_or_ids": "ids"}


@pytest.fixture(scope="module")
def layer():
    return cpu_layer(max_tokens=128, **FULL)


@pytest.fixture
def given(layer):
    return arguments(layer.layer)


NAMES = (
    "x",
    "logits_or_ids",
    "weights",
    "w_gate_up",
    "w_down",
    "b_gate_up",
    "b_down",
    "w_shared_gate_up",
    "w_shared_down",
    "shared_gate_logits",
)
SMALL = {"logits_or_ids", "weights", "shared_gate_logits"}


def refused(layer, given, name, tensor) -> str:
    with pytest.raises(ArgumentError) as caught:
        layer(**{**given, name: tensor})
    assert caught.value.where == PLACES.get(name, name)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_dtype(layer, given, name):
    text = refused(layer, given, name, given[name].to(torch.float16))
    assert "dtype float16, expected" in text


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shape_names_both(layer, given, name):
    tensor = given[name]
    wrong = torch.cat([tensor, tensor], dim=-1)
    assert f"shape {tuple(wrong.shape)}, expected {tuple(tensor.shape)}" in refused(layer, given, name, wrong)


def test_fewer_ids_than_tokens(layer, given):
    assert "shape (63, 2), expected (64, 2)" in refused(layer, given, "logits_or_ids", given["logits_or_ids"][:63])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SMALL and not name.startswith("b_")])
def test_strided_matrices_are_refused_and_not_copied(layer, given, name):
    tensor = given[name]
    wider = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 44, dtype=tensor.dtype)
    sliced = wider[..., : tensor.shape[-1]]
    text = refused(layer, given, name, sliced)
    assert f"strides {tuple(sliced.stride())}" in text and f"expected row-major {tuple(tensor.stride())}" in text


def test_transposed_x_is_refused(layer, given):
    base = torch.zeros(256, 64, dtype=torch.bfloat16)
    assert "strides (1, 64)" in refused(layer, given, "x", base.t())


def test_column_slice_of_x_is_refused(layer, given):
    base = torch.zeros(64, 300, dtype=torch.bfloat16)
    assert "strides (300, 1)" in refused(layer, given, "x", base[:, :256])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SMALL])
def test_misaligned_memory_is_refused(layer, given, name):
    tensor = given[name]
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    assert "past a multiple of 16" in refused(layer, given, name, storage[1:].view(tensor.shape))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"x", "logits_or_ids"}])
def test_missing(layer, given, name):
    assert "missing" in refused(layer, given, name, None)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "x"])
def test_other_device(layer, given, name):
    """Past the operator, whose dispatcher picks one device's implementation for mixed arguments."""
    given[name] = given[name].to("meta")
    parameters = tuple(given[parameter] for parameter in PARAMETERS)
    with pytest.raises(ArgumentError, match="on meta, but x is on cpu") as caught:
        routing, gate = given["logits_or_ids"], given["shared_gate_logits"]
        layer.run(given["x"], routing, given["weights"], parameters, gate, None, None)
    assert caught.value.where == PLACES.get(name, name)


@pytest.mark.parametrize("name", ["b_gate_up", "b_down", "w_shared_gate_up", "w_shared_down", "shared_gate_logits"])
def test_an_argument_the_layer_does_not_have(layer, given, name):
    plain = cpu_layer(max_tokens=128)
    mine = arguments(plain.layer) | {name: given[name]}
    with pytest.raises(ArgumentError, match="no such argument") as caught:
        plain(**mine)
    assert caught.value.where == name


@pytest.mark.parametrize("name", ["selection_bias", "logit_bias"])
def test_router_tensors_of_a_layer_that_takes_ids(layer, given, name):
    assert "no such argument" in refused(layer, given, name, torch.zeros(8))


def test_too_many_tokens(layer):
    text = refused(layer, arguments(layer.layer, 129), "x", torch.zeros(129, 256, dtype=torch.bfloat16))
    assert "129 tokens" in text and "at most 128" in text


def test_x_of_rank_three(layer, given):
    assert "shape (1, 64, 256), expected (T, 256)" in refused(layer, given, "x", given["x"][None])


def test_rank_one_weights_of_a_top_1_layer_name_both_shapes():
    layer = cpu_layer(max_tokens=128, router__top_k=1)
    given = arguments(layer.layer)
    text = refused(layer, given, "weights", given["weights"][:, 0])
    assert "shape (64,), expected (64, 1)" in text


def test_float_ids_and_int16_ids_are_refused(layer, given):
    for dtype in (torch.float32, torch.int16, torch.uint8):
        text = refused(layer, given, "logits_or_ids", given["logits_or_ids"].to(dtype))
        assert "expected int32 or int64" in text


def test_logits_of_a_layer_with_a_router():
    layer = cpu_layer(max_tokens=128, router={"input": "logits", "top_k": 2, "selection_bias": True})
    given = arguments(layer.layer) | {"weights": None, "selection_bias": torch.zeros(8)}
    with pytest.raises(ArgumentError, match="dtype int32, expected float32") as caught:
        layer(**given)
    assert caught.value.where == "logits"
    given["logits_or_ids"] = torch.zeros(64, 9)
    with pytest.raises(ArgumentError, match=r"shape \(64, 9\), expected \(64, 8\)"):
        layer(**given)
    given["logits_or_ids"] = torch.zeros(64, 8)
    with pytest.raises(ArgumentError, match="selection_bias: missing"):
        layer(**{**given, "selection_bias": None})


def test_route_of_a_layer_that_takes_ids(layer):
    with pytest.raises(ArgumentError, match="router.input is ids"):
        layer.route(torch.zeros(4, 8))
