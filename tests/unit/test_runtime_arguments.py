"""Argument errors name the argument, what it got and what it needs, before anything runs."""

from __future__ import annotations

import pytest
import torch
from layers import arguments, cpu_layer

from mokgen.errors import ArgumentError
from mokgen.runtime.arguments import Fit, prepare
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
    order = ("x", "logits_or_ids", "weights", *PARAMETERS, "shared_gate_logits")
    with pytest.raises(ArgumentError, match="on meta, but x is on cpu") as caught:
        layer.run(*(given[place] for place in order), None, None)
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


def test_a_selection_bias_beside_ids_is_refused_for_what_it_is():
    """The layer has such an argument, so the message must not say that it has none."""
    routed = cpu_layer(
        max_tokens=128, router={"input": "logits", "top_k": 2, "score": "sigmoid", "selection_bias": True}
    )
    mine = arguments(cpu_layer(max_tokens=128).layer)
    with pytest.raises(ArgumentError, match="beside ids and weights, which skip the router") as caught:
        routed(**mine, selection_bias=torch.zeros(8))
    assert caught.value.where == "selection_bias"


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


# --- the quick look and the close one ---------------------------------------------------------------------------------

ORDER = ("x", "logits_or_ids", "weights", *PARAMETERS, "shared_gate_logits", "selection_bias", "logit_bias")
DAMAGES = {
    "dtype": lambda t: t.to(torch.float16),
    "shape": lambda t: torch.cat([t, t], dim=-1),
    "rank": lambda t: t[None],
    "stride": lambda t: torch.zeros(*t.shape[:-1], t.shape[-1] + 8, dtype=t.dtype)[..., : t.shape[-1]],
    "address": lambda t: torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape),
    "device": lambda t: t.to("meta"),
    "missing": lambda t: None,
}
# Without x there is no call, and it runs where x lies.
DAMAGED = [(name, damage) for name in NAMES for damage in DAMAGES if name != "x" or damage not in {"missing", "device"}]


def row(given) -> tuple:
    return tuple(given.get(name) for name in ORDER)


def new_fit(layer, own_routing=False) -> Fit:
    return Fit(layer._expected.in_order(own_routing), layer.layer.max_tokens)


def same(first, second) -> bool:
    return all(one is other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 7, 128])
def test_what_fits_is_passed_on_as_it_is(layer, tokens):
    given, fits = row(arguments(layer.layer, tokens)), new_fit(layer)
    assert fits(given) and fits(given)
    assert same(prepare(layer._expected, given, False, 128), given)


def test_the_number_of_tokens_may_change_from_call_to_call(layer):
    fits = new_fit(layer)
    rows = {tokens: row(arguments(layer.layer, tokens)) for tokens in (5, 6)}
    for tokens in (5, 6, 5):
        assert fits(rows[tokens])
    mixed = (rows[5][0], *rows[6][1:])
    assert not fits(mixed)
    too_many = torch.zeros(129, 256, dtype=torch.bfloat16)
    assert not fits((too_many, *rows[5][1:]))


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_what_does_not_fit_is_refused_or_copied(layer, given, name, damage):
    if (name, damage) == ("shared_gate_logits", "stride"):
        damaged = torch.zeros(2 * len(given[name]))[::2]
    else:
        damaged = DAMAGES[damage](given[name])
    fits = new_fit(layer)
    assert fits(row(given))
    wrong = row({**given, name: damaged})
    assert not fits(wrong)
    if name in SMALL and damage in {"stride", "address"}:
        prepared = prepare(layer._expected, wrong, False, 128)
        assert fits(prepared) and torch.equal(prepared[ORDER.index(name)], damaged)
    else:
        with pytest.raises(ArgumentError):
            prepare(layer._expected, wrong, False, 128)


@pytest.mark.parametrize("name", ["selection_bias", "logit_bias"])
def test_a_tensor_the_layer_does_not_take_does_not_fit(layer, given, name):
    assert not new_fit(layer)(row({**given, name: torch.zeros(8)}))


def test_logits_fit_a_layer_with_a_router():
    layer = cpu_layer(max_tokens=128, router={"input": "logits", "top_k": 2, "selection_bias": True})
    given = arguments(layer.layer)
    own = {**given, "logits_or_ids": torch.zeros(64, 8), "weights": None, "selection_bias": torch.zeros(8)}
    assert new_fit(layer, True)(row(own)) and new_fit(layer, False)(row(given))
    assert not new_fit(layer, True)(row({**own, "selection_bias": None}))
    assert same(prepare(layer._expected, row(own), True, 128), row(own))


def test_an_extent_of_one_may_have_any_stride(layer):
    """torch calls such a tensor contiguous; the kernels' stub compares strides."""
    given = arguments(layer.layer, 1)
    wide = {name: torch.zeros(2, given[name].shape[1] + 8, dtype=given[name].dtype) for name in ("x", "weights")}
    odd = {name: tensor[:1, : given[name].shape[1]] for name, tensor in wide.items()}
    fits, call = new_fit(layer), row({**given, **odd})
    assert not fits(call)
    prepared = prepare(layer._expected, call, False, 128)
    assert fits(prepared)
    assert prepared[0].data_ptr() == odd["x"].data_ptr() and prepared[0].stride() == (256, 1)
    assert layer(**{**given, **odd}).stride() == (256, 1)


def test_a_weight_changed_in_place_is_looked_at_again_when_the_stub_refuses_it(layer, given, monkeypatch):
    refusals = []

    def compute(self, tensors, own_routing):
        if tensors[4].shape != (8, 256, 256):
            refusals.append(tensors)
            raise ValueError("Mismatched w_down.shape[2]")
        return tensors[0]

    monkeypatch.setattr(type(layer), "_compute", compute)
    call = row(given)
    assert layer.run(*call) is call[0]
    kept = given["w_down"].data
    given["w_down"].data = kept[..., :128].contiguous()
    with pytest.raises(ArgumentError, match=r"shape \(8, 256, 128\), expected \(8, 256, 256\)"):
        layer.run(*call)
    assert len(refusals) == 1
    with pytest.raises(ArgumentError, match="w_down"):
        layer.run(*call)
    assert len(refusals) == 1  # forgotten: seen before the launch
    given["w_down"].data = kept
    assert layer.run(*call) is call[0]


def test_an_error_of_the_call_itself_is_not_tried_again(layer, given, monkeypatch):
    def compute(self, tensors, own_routing):
        raise ArgumentError("cannot be captured", where="CUDA graph")

    monkeypatch.setattr(type(layer), "_compute", compute)
    with pytest.raises(ArgumentError, match="captured"):
        layer.run(*row(given))
