"""The oracle against a token-by-token loop, the router against hand-made cases, the judge against planted errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mokgen.facts.tolerance import BUDGETS
from mokgen.lower.layer import ResolvedLayer, RouterLayer, SharedLayer
from mokgen.reference import compare
from mokgen.reference.inputs import (
    PATTERNS,
    Inputs,
    Parameters,
    make_inputs,
    make_logits,
    make_parameters,
    make_routed_inputs,
    present,
)
from mokgen.reference.oracle import baseline, near_ties, oracle, pool_table, route

IDS = RouterLayer("ids", 2, "softmax", "score_then_topk", True, 1.0, False, False, 1, 1, "max", "fp32", "fp32")
NO_SHARED = SharedLayer(0, 0, "none")


def make_layer(**changes) -> ResolvedLayer:
    values = {
        "hidden_size": 64,
        "num_experts": 8,
        "num_local_experts": 8,
        "intermediate_size": 24,
        "activation": "swiglu",
        "alpha": 1.0,
        "clamp": math.inf,
        "expert_bias": False,
        "gate_up_layout": "concatenated",
        "weight_dtype": "bf16",
        "router": IDS,
        "shared": NO_SHARED,
        "precision": "bf16",
        "ep_size": 1,
        "transport": "local",
        "placement": "contiguous",
        "max_tokens": 64,
        "capacity": "dropless",
        "passes": ("forward",),
        "save": "minimal",
        "determinism": "run_to_run",
        "checks": "fast",
        "archs": ("sm_90a",),
        "knobs": (),
    }
    num = changes.get("num_experts", 8)
    return ResolvedLayer(**{**values, "num_local_experts": num, **changes})


LAYERS = {
    "plain": make_layer(),
    "top_3_of_5": make_layer(num_experts=5, router=replace(IDS, top_k=3)),
    "bf16_weights": make_layer(router=replace(IDS, weight_dtype="bf16")),
    "gpt_oss": make_layer(
        activation="swigluoai", alpha=1.702, clamp=0.5, expert_bias=True, gate_up_layout="interleaved"
    ),
    "shared": make_layer(shared=SharedLayer(2, 48, "none")),
    "gated_shared": make_layer(shared=SharedLayer(1, 16, "sigmoid")),
}


def scalar_sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def activate(layer: ResolvedLayer, gate: float, up: float) -> float:
    gate, up = min(gate, layer.clamp), max(-layer.clamp, min(up, layer.clamp))
    glu = gate * scalar_sigmoid(layer.alpha * gate)
    return glu * (up + 1) if layer.activation == "swigluoai" else glu * up


def expert(layer: ResolvedLayer, x, w_gate_up, w_down, b_gate_up=None, b_down=None, interleaved=False) -> torch.Tensor:
    """One token through one expert, written with scalars where the layouts could be confused."""
    sums = (w_gate_up.double() @ x.double()).tolist()
    if b_gate_up is not None:
        sums = [value + float(bias) for value, bias in zip(sums, b_gate_up, strict=True)]
    size = len(sums) // 2
    pairs = [(sums[2 * i], sums[2 * i + 1]) if interleaved else (sums[i], sums[size + i]) for i in range(size)]
    hidden = torch.tensor([activate(layer, gate, up) for gate, up in pairs], dtype=torch.float64)
    y = w_down.double() @ hidden
    return y if b_down is None else y + b_down.double()


def slow_layer(layer: ResolvedLayer, inputs: Inputs, p: Parameters) -> torch.Tensor:
    out = torch.zeros(inputs.tokens, layer.hidden_size, dtype=torch.float64)
    for t in range(inputs.tokens):
        if p.w_shared_gate_up is not None:
            shared = expert(layer, inputs.x[t], p.w_shared_gate_up, p.w_shared_down)
            gate = 1.0 if inputs.shared_gate_logits is None else scalar_sigmoid(float(inputs.shared_gate_logits[t]))
            out[t] += gate * shared
        for k in range(layer.top_k):
            e = int(inputs.ids[t, k])
            if e >= 0:
                biases = (None, None) if p.b_down is None else (p.b_gate_up[e], p.b_down[e])
                interleaved = layer.gate_up_layout == "interleaved"
                y = expert(layer, inputs.x[t], p.w_gate_up[e], p.w_down[e], *biases, interleaved)
                out[t] += float(inputs.weights[t, k]) * y
    return out


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", LAYERS)
def test_oracle_equals_a_loop_over_tokens(name, pattern):
    layer = LAYERS[name]
    parameters, inputs = make_parameters(layer), make_inputs(layer, 9, pattern)
    found, expected = oracle(layer, inputs, parameters), slow_layer(layer, inputs, parameters)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_baseline_costs_what_bf16_costs(name):
    layer = LAYERS[name]
    parameters, inputs = make_parameters(layer), make_inputs(layer, 64, "balanced")
    found = compare.errors(baseline(layer, inputs, parameters).out, oracle(layer, inputs, parameters))
    assert 1e-3 < found.relative_l2 < 5e-3  # bf16 steps are 2^-8 wide, three roundings in a row
    assert found.relative_l2 < found.worst_row < 1e-2


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_patterns_have_shape_range_and_seed(name, tokens):
    layer = make_layer(num_experts=8, router=replace(IDS, top_k=3))
    inputs = make_inputs(layer, tokens, name, seed=3)
    assert inputs.ids.shape == inputs.weights.shape == (tokens, 3)
    assert inputs.ids.dtype == torch.int32 and inputs.x.dtype == torch.bfloat16
    assert bool(((inputs.ids >= -1) & (inputs.ids < 8)).all())
    assert torch.equal(inputs.weights.isnan(), inputs.ids < 0)
    again, other = make_inputs(layer, tokens, name, seed=3), make_inputs(layer, tokens, name, seed=4)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*map(values, (inputs, again)), strict=True))
    if not bool(inputs.weights.isnan().all()):
        assert not torch.equal(inputs.weights.nan_to_num(), other.weights.nan_to_num())


def values(inputs: Inputs) -> list[torch.Tensor]:
    return list(present(inputs).values())


def test_patterns_do_what_their_names_say():
    layer = make_layer(router=replace(IDS, top_k=2))
    used = {name: set(make_inputs(layer, 64, name).ids.flatten().tolist()) for name in PATTERNS}
    assert used["balanced"] == set(range(8))
    assert used["one_expert_empty"] == {0, 1, 2, 4, 5, 6, 7}
    assert used["last_two_experts"] == {6, 7}
    assert used["first_two_experts"] == {0, 1}
    assert used["all_to_one"] == {4}
    assert used["all_masked"] == {-1}
    masked = make_inputs(layer, 64, "masked").ids
    assert bool((masked[::2, 0] == -1).all()) and bool((masked[[0, 31, 63]] == -1).all())
    pairs = make_inputs(layer, 64, "duplicates").ids
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    counts = torch.bincount(make_inputs(layer, 500, "ragged").ids.flatten(), minlength=8)
    assert counts[:6].tolist() == [1, 127, 128, 129, 255, 257]
    zipf = torch.bincount(make_inputs(layer, 4000, "zipf").ids.flatten(), minlength=8).sort(descending=True).values
    assert zipf[0] > 2 * zipf[3] > 0


def test_unread_rows_of_x_hold_nan_and_inf_and_reach_no_result():
    layer = LAYERS["plain"]
    inputs = make_inputs(layer, 9, "masked")
    assert not bool(inputs.x.isfinite().all())
    out = oracle(layer, inputs, make_parameters(layer))
    assert bool(out.isfinite().all()) and bool((out[0] == 0).all())


# --- router -----------------------------------------------------------------------------------------------------------


def router_layer(experts: int = 8, **changes) -> ResolvedLayer:
    plain = replace(IDS, input="logits", **changes)
    return make_layer(num_experts=experts, router=plain)


def test_ties_go_to_the_lowest_id():
    layer = router_layer(top_k=3)
    ids, weights = route(layer, torch.zeros(2, 8))
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, dtype=torch.float64))
    ids, _ = route(layer, torch.tensor([[0.0, 1, 3, 1, 3, 1, 0, 3]]))
    assert ids.tolist() == [[2, 4, 7]]


def test_selection_bias_chooses_and_does_not_weigh():
    layer = router_layer(top_k=2, score="sigmoid", normalize=False, scale=2.5, selection_bias=True)
    logits, bias = torch.tensor([[2.0, 1, 0, -1, -2, -3, -4, -5]]), torch.tensor([0.0] * 7 + [2.0])
    ids, weights = route(layer, logits, bias)
    assert ids.tolist() == [[7, 0]]
    expected = [2.5 * scalar_sigmoid(-5.0), 2.5 * scalar_sigmoid(2.0)]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("group_score", "best"), [("max", [0, 1]), ("top2_sum", [2, 3])])
def test_group_limit_keeps_the_best_group(group_score, best):
    layer = router_layer(top_k=2, score="sigmoid", groups=4, top_groups=1, group_score=group_score)
    logits = torch.tensor([[3.0, -3, 2, 2, 0, 0, 0, 0]])
    assert sorted(route(layer, logits)[0][0].tolist()) == best


def test_a_closed_group_never_comes_before_an_open_one():
    """All scores of the open group are below zero: a mask with 0 instead of selection would let others in."""
    layer = router_layer(top_k=2, score="sigmoid", groups=4, top_groups=1, selection_bias=True)
    bias = torch.full((8,), -5.0)
    logits = torch.tensor([[0.0, 0, 0, 0, 4, 0, 0, 0]])
    assert route(layer, logits, bias)[0].tolist() == [[4, 5]]


def test_topk_then_score_normalises_over_the_chosen():
    layer = router_layer(top_k=2, order="topk_then_score", normalize=False, logit_bias=True)
    logits, bias = torch.tensor([[1.0, 2, 3, 4, 0, 0, 0, 0]]), torch.tensor([9.0] + [0] * 7)
    ids, weights = route(layer, logits, None, bias)
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[10.0, 4.0]], dtype=torch.float64).softmax(1))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
@pytest.mark.parametrize("groups", [1, 4])
def test_ids_are_distinct_and_in_range_for_any_logits(score, order, groups):
    layer = router_layer(top_k=4, score=score, order=order, groups=groups, top_groups=(groups + 1) // 2)
    odd = [math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, -0.0]
    draw = torch.randint(len(odd), (500, 8), generator=torch.Generator().manual_seed(0))
    ids, _ = route(layer, torch.tensor(odd)[draw])
    assert bool(((ids >= 0) & (ids < 8)).all())
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_a_nan_ties_with_minus_infinity_and_comes_before_a_closed_group():
    layer = router_layer(top_k=3, order="topk_then_score", groups=2, top_groups=1)
    nan, low = math.nan, -math.inf
    assert route(layer, torch.tensor([[nan, low, 3.0, nan, 2, 2, 2, 2]]))[0].tolist() == [[2, 0, 1]]
    assert route(layer, torch.tensor([[low, nan, 3.0, low, 2, 2, 2, 2]]))[0].tolist() == [[2, 0, 1]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_of_tests_have_no_near_ties(dtype):
    layer = router_layer(experts=64, logits_dtype=dtype)
    logits = make_logits(layer, 50).float().sort(dim=1).values
    gaps = logits.diff(dim=1)
    assert bool(((gaps == 0) | (gaps > 1e-4)).all())
    assert dtype == "bf16" or bool((gaps > 0).all())


def test_near_ties_are_found_and_exact_ties_are_not():
    layer = router_layer(top_k=2, score="sigmoid")
    step = 1e-7
    logits = torch.tensor(
        [[3.0, 1, 1 + step, 0, 0, 0, 0, 0], [3.0, 1, 1, 0, 0, 0, 0, 0], [3.0, 2, 1, 1 + step, 0, 0, 0, 0]]
    )
    assert near_ties(layer, logits).tolist() == [True, False, False]
    assert near_ties(layer, logits, torch.zeros(8)).tolist() == [True, True, False]
    assert not bool(near_ties(router_layer(top_k=2, order="topk_then_score"), logits).any())
    grouped = router_layer(top_k=1, score="sigmoid", groups=4, top_groups=1)
    logits = torch.tensor([[3.0, 0, 3 + 1e-6, 0, 0, 0, 0, 0], [3.0, 3 + 1e-6, 1, 0, 0, 0, 0, 0]])
    assert near_ties(grouped, logits).tolist() == [True, True]


def test_routed_inputs_have_no_near_tie():
    layer = router_layer(experts=256, top_k=8, score="sigmoid", selection_bias=True, groups=8, top_groups=4)
    parameters = make_parameters(layer)
    logits = make_routed_inputs(layer, parameters, 3000).logits
    assert bool(near_ties(layer, make_logits(layer, 3000), parameters.selection_bias).any())  # they do happen
    assert not bool(near_ties(layer, logits, parameters.selection_bias).any())


# --- tables and judgement ---------------------------------------------------------------------------------------------


def test_pool_table_of_a_small_case():
    layer = make_layer(num_experts=4)
    table = pool_table(layer, torch.tensor([[3, 1], [-1, 3], [1, 1]]), tile_m=2)
    assert table.block_start.tolist() == [0, 0, 2, 2, 3]
    assert table.block_expert.tolist() == [1, 1, 3]
    assert table.block_rows.tolist() == [2, 1, 2]
    assert table.row_token.tolist() == [0, 2, 2, -1, 0, 1]
    assert table.slot_row.tolist() == [4, 0, -1, 5, 1, 2]


def test_pool_table_without_a_route():
    table = pool_table(make_layer(), torch.full((3, 2), -1), tile_m=128)
    assert table.block_start.tolist() == [0] * 9
    assert table.row_token.numel() == table.block_expert.numel() == 0
    assert table.slot_row.tolist() == [-1] * 6


def judged(change) -> compare.Verdict:
    layer = LAYERS["plain"]
    parameters, inputs = make_parameters(layer), make_inputs(layer, 64, "masked")
    truth, base = oracle(layer, inputs, parameters), baseline(layer, inputs, parameters).out
    value = base.clone()
    change(value)
    return compare.judge(value, base, truth, BUDGETS["bf16"])


def test_the_baseline_itself_is_within_budget():
    verdict = judged(lambda value: None)
    assert verdict.ok and verdict.kernel == verdict.baseline


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value[5].add_(0.05),
        lambda value: value[5].zero_(),
        lambda value: value[5, :1].fill_(math.nan),
        lambda value: value[5, :1].fill_(math.inf),
        lambda value: value[0, :1].fill_(1e-30),  # the truth of this row is exactly zero
        lambda value: value.mul_(1.01),
        lambda value: value.copy_(value[[0, 1, 2, 3, 5, 4, *range(6, 64)]]),
    ],
    ids=["offset", "lost row", "nan", "inf", "not exactly zero", "scaled", "swapped rows"],
)
def test_planted_errors_are_found(change):
    assert not judged(change).ok


def test_an_empty_output_is_within_budget():
    nothing = torch.zeros(0, 8)
    assert compare.judge(nothing.bfloat16(), nothing, nothing.double(), BUDGETS["bf16"]).ok


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        compare.errors(torch.zeros(2, 3), torch.zeros(3, 2))


def test_first_bad_buffer_names_the_first():
    good, table = torch.randn(4, 8).bfloat16(), torch.arange(5, dtype=torch.int32)
    bad = good.clone()
    bad[2] = 0
    other = table.clone()
    other[3] = 9
    checks = [compare.BufferCheck("row_token", table, table), compare.BufferCheck("hidden", bad, good)]
    assert str(compare.first_bad_buffer(checks)).startswith("hidden: ")
    assert compare.first_bad_buffer([compare.BufferCheck("hidden", good, good.clone())]) is None
    fault = compare.first_bad_buffer([compare.BufferCheck("row_token", other, table), *checks])
    assert fault == "row_token: 1 of 5 differ, first at (3,): 9, expected 3"
