"""Small inputs that broke released MoE kernels, with the right outcome: T=64 H=I=256 E=8 K=2 unless said.

Every case runs on the CPU executor and, where there is a GPU, with the kernels. `check_layer` holds each to the fp64
oracle, exact tables, guard bands and equal bits.
"""

from __future__ import annotations

import math

import pytest
import torch
from layers import VARIANTS, arguments, spec, subject
from pydantic import ValidationError

from mokgen.errors import ArgumentError, SpecError
from mokgen.facts.tolerance import BUDGETS
from mokgen.reference.compare import judge
from mokgen.reference.inputs import Inputs, make_inputs
from mokgen.reference.oracle import baseline, oracle
from mokgen.runtime.layer import compile_count
from mokgen.spec.load import load_spec
from mokgen.testing import check_layer
from mokgen.testing.guarded import call

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = (1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257, 672)

pytestmark = pytest.mark.parametrize("device", DEVICES)


def quiet(_: str) -> None:
    pass


def check_ids(who, ids: torch.Tensor) -> None:
    """The layer's output for these ids (T, K), through the operator, within budget."""
    inputs = make_inputs(who.resolved, len(ids), "balanced", who.device)
    inputs = Inputs(inputs.x, ids.to(who.device), inputs.weights)
    truth = oracle(who.resolved, inputs, who.parameters)
    verdict = judge(call(who, inputs), baseline(who.resolved, inputs, who.parameters).out, truth, BUDGETS["bf16"])
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("pattern", ["one_expert_empty", "last_two_experts", "first_two_experts"])
def test_experts_without_tokens(device, pattern):
    check_layer(subject("base", device), [pattern], [64], show=quiet)


@pytest.mark.parametrize("experts", [(0, 1, 2, 4, 5, 6, 7), (6, 7), (0, 1)])
def test_ids_from_a_subset_with_repetition(device, experts):
    draw = torch.randint(len(experts), (64, 2), generator=torch.Generator().manual_seed(0))
    check_ids(subject("base", device), torch.tensor(experts, dtype=torch.int32)[draw])


@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens_with_one_compiled_kernel(device, tokens):
    who = subject("base", device)
    before = compile_count()
    check_layer(who, ["balanced"], [tokens], show=quiet)
    assert compile_count() == before


def test_no_tokens(device):
    who = subject("base", device)
    given = arguments(who.resolved, 0, device=device)
    assert given["x"].shape == (0, 256)
    assert who.layer(**given).shape == (0, 256)
    who.layer.check()


def test_no_routes(device):
    who = subject("base", device)
    out = who.layer(**arguments(who.resolved, 64, "all_masked", device))
    who.layer.check()
    assert out.shape == (64, 256)
    assert bool((out == 0).all())


def test_top_1(device):
    check_layer(subject("top_1", device), ["balanced", "all_to_one", "masked"], [64], show=quiet)


def test_top_1_weights_of_rank_one_are_refused_with_both_shapes(device):
    who = subject("top_1", device)
    given = arguments(who.resolved, 64, device=device)
    with pytest.raises(ArgumentError, match=r"weights: shape \(64,\), expected \(64, 1\)"):
        who.layer(**{**given, "weights": given["weights"][:, 0]})


@pytest.mark.parametrize("expert", [2, 5])
def test_both_slots_the_same_expert(device, expert):
    check_ids(subject("base", device), torch.full((64, 2), expert, dtype=torch.int32))


def test_rows_of_2_2_and_5_5(device):
    check_ids(subject("base", device), torch.tensor([[2, 2], [5, 5]] * 32, dtype=torch.int64))


def test_all_eight_slots_the_same_expert(device):
    check_layer(subject("top_8", device), ["all_to_one", "duplicates"], [64], show=quiet)


def test_masked_slots_with_nan_weights(device):
    """-1 in slot 0 of even tokens and in both slots of tokens 0, 31 and 63."""
    who = subject("base", device)
    inputs = make_inputs(who.resolved, 64, "masked", who.device)
    assert bool((inputs.ids[::2, 0] == -1).all()) and bool((inputs.ids[[0, 31, 63]] == -1).all())
    assert bool(inputs.weights[inputs.ids < 0].isnan().all()) and not bool(inputs.x.isfinite().all())
    check_layer(who, ["masked"], [64], show=quiet)
    out = call(who, inputs)
    assert bool(out.isfinite().all())
    assert bool((out[[0, 31, 63]] == 0).all())


@pytest.mark.parametrize("name", [name for name in VARIANTS if name[:2] in {"h_", "i_"}])
def test_sizes_that_are_no_multiple_of_a_tile(device, name):
    check_layer(subject(name, device), ["ragged", "masked"], [64], show=quiet)


@pytest.mark.parametrize("name", ["bf16_weights", "shared", "gated_shared", "gpt_oss_expert"])
def test_every_kind_of_layer(device, name):
    check_layer(subject(name, device), ["balanced", "ragged"], [64, 129], show=quiet)


@pytest.mark.parametrize(("size", "neighbours"), [(100, ("96", "104")), (4097, ("4096", "4104"))])
def test_rows_that_are_no_multiple_of_16_bytes_are_refused_by_check(device, size, neighbours, tmp_path):
    path = tmp_path / "odd.yaml"
    text = f"hidden_size: {size}\nexperts: {{num: 8, intermediate_size: 256}}\nrouter: {{input: ids, top_k: 2}}\n"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert all(part in str(caught.value) for part in ("odd.yaml:1", "hidden_size", "multiple of 8", *neighbours))
    with pytest.raises(ValidationError, match="hidden_size"):
        spec(hidden_size=size)


def test_columns_of_a_wider_x_are_refused_by_name(device):
    who = subject("base", device)
    given = arguments(who.resolved, 64, device=device)
    base = torch.zeros(64, 300, dtype=torch.bfloat16, device=device)
    with pytest.raises(ArgumentError, match=r"x: strides \(300, 1\)"):
        who.layer(**{**given, "x": base[:, :256]})


def test_a_transposed_x_is_refused_by_name(device):
    who = subject("base", device)
    given = arguments(who.resolved, 64, device=device)
    base = torch.zeros(256, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ArgumentError, match=r"x: strides \(1, 64\)"):
        who.layer(**{**given, "x": base.t()})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_other_column_of_wider_ids(device, dtype):
    """Small tensors may be strided; the numbers are those of a compact copy, to the bit."""
    who = subject("base", device)
    given = arguments(who.resolved, 64, device=device)
    wide = torch.full((64, 4), 7, dtype=dtype, device=device)
    wide[:, ::2] = given["logits_or_ids"]
    weights = torch.full((64, 4), math.nan, device=device)
    weights[:, 1::2] = given["weights"]
    strided = {**given, "logits_or_ids": wide[:, ::2], "weights": weights[:, 1::2]}
    assert torch.equal(who.layer(**strided), who.layer(**given))


def test_transposed_weights_are_refused_and_never_copied(device):
    who = subject("base", device)
    given = arguments(who.resolved, 64, device=device)
    with pytest.raises(ArgumentError, match=r"(?s)w_down: strides .* does not copy"):
        who.layer(**{**given, "w_down": given["w_down"].transpose(1, 2)})


def test_one_row_of_a_wider_buffer(device):
    """A single row is compact whatever its stride says."""
    who = subject("base", device)
    given = arguments(who.resolved, 1, device=device)
    wide = torch.zeros(1, 300, dtype=torch.bfloat16, device=device)
    wide[:, :256] = given["x"]
    assert torch.equal(who.layer(**{**given, "x": wide[:, :256]}), who.layer(**given))
