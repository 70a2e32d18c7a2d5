"""The routing contract of docs/architecture.md, clause by clause, on the CPU executor and with the kernels on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from layers import arguments, subject

from mokgen.errors import ArgumentError, RoutingError
from mokgen.reference.inputs import make_logits
from mokgen.reference.oracle import route
from mokgen.testing import check_layer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUTERS = ["router_deepseek_v3", "router_qwen3_moe", "router_mixtral", "router_gpt_oss"]
WRONG_IDS = [8, -2, 255, 2**31 - 1, -(2**31)]
WIDE_IDS = [2**31, 2**32, 2**32 + 3, -(2**32), -(2**32) - 1, 2**63 - 1, -(2**63), (5 << 32) | 0xFFFFFFFF]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def quiet(_: str) -> None:
    pass


def with_ids(given, ids):
    return {**given, "logits_or_ids": ids}


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["balanced", "masked", "duplicates", "all_masked"])
def test_int64_ids_give_the_bits_of_int32_ids(device, pattern):
    who = subject("base", device)
    given = arguments(who.resolved, 65, pattern, device)
    wide = with_ids(given, given["logits_or_ids"].long())
    assert torch.equal(who.layer(**wide), who.layer(**given))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_other_id_dtypes_are_refused_by_name(device, dtype):
    who = subject("base", device)
    given = arguments(who.resolved, 4, device=device)
    with pytest.raises(ArgumentError, match="ids: dtype .*, expected int32 or int64"):
        who.layer(**with_ids(given, given["logits_or_ids"].to(dtype)))


def test_bf16_weights_where_the_spec_says_so(device):
    check_layer(subject("bf16_weights", device), ["balanced", "masked"], [65], show=quiet)


@pytest.mark.parametrize(("name", "wrong"), [("base", torch.bfloat16), ("bf16_weights", torch.float32)])
def test_weights_of_another_dtype_are_refused_by_name(device, name, wrong):
    who = subject(name, device)
    given = arguments(who.resolved, 4, device=device)
    with pytest.raises(ArgumentError, match="weights: dtype"):
        who.layer(**{**given, "weights": given["weights"].to(wrong)})


# --- no route, duplicates, unread rows --------------------------------------------------------------------------------


def test_a_slot_without_a_route_adds_nothing_whatever_its_weight(device):
    who = subject("base", device)
    given = arguments(who.resolved, 64, "masked", device)
    for value in (math.nan, math.inf, 3.0):
        weights = torch.where(given["logits_or_ids"] < 0, value, given["weights"])
        assert torch.equal(who.layer(**{**given, "weights": weights}), who.layer(**given))


def test_a_duplicate_counts_twice(device):
    """Weights a and b on one expert are weight a + b on it, and nothing is lost by merging equal ids."""
    who = subject("base", device)
    given = arguments(who.resolved, 64, "duplicates", device)
    halves = torch.full((64, 2), 0.5, device=device)
    once, ids = given["logits_or_ids"].clone(), given["logits_or_ids"]
    once[:, 1] = -1
    whole = torch.ones(64, 2, device=device)
    assert torch.equal(
        who.layer(**{**given, "weights": halves}), who.layer(**{**given, "logits_or_ids": once, "weights": whole})
    )
    assert torch.equal(ids[:, 0], ids[:, 1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_nobody_selected_reach_no_result(device, value):
    who = subject("base", device)
    given = arguments(who.resolved, 64, "balanced", device)
    ids, x = given["logits_or_ids"].clone(), given["x"].clone()
    ids[::3] = -1
    clean = who.layer(**{**with_ids(given, ids), "x": x})
    x[::3] = value
    dirty = who.layer(**{**with_ids(given, ids), "x": x})
    assert torch.equal(clean, dirty) and bool(dirty.isfinite().all())


def test_a_selected_nan_stays_in_its_own_row(device):
    who = subject("base", device)
    given = arguments(who.resolved, 64, "balanced", device)
    clean = who.layer(**given)
    x = given["x"].clone()
    x[7] = math.nan
    dirty = who.layer(**{**given, "x": x})
    others = [token for token in range(64) if token != 7]
    assert bool(dirty[7].isnan().all()) and torch.equal(dirty[others], clean[others])


# --- ids outside [-1, E) ----------------------------------------------------------------------------------------------


def wrong_call(who, value, device):
    """Arguments with one wrong id at token 37, slot 1, and the same with -1 there."""
    given = arguments(who.resolved, 64, device=device)
    dtype = torch.int32 if -(2**31) <= value < 2**31 else torch.int64
    wrong, masked = given["logits_or_ids"].to(dtype).clone(), given["logits_or_ids"].to(dtype).clone()
    wrong[37, 1], masked[37, 1] = value, -1
    return with_ids(given, wrong), with_ids(given, masked)


@pytest.mark.parametrize("value", WRONG_IDS + WIDE_IDS)
def test_checked_raises_with_token_slot_and_value(device, value):
    who = subject("checked", device)
    wrong, masked = wrong_call(who, value, device)
    with pytest.raises(RoutingError, match=rf"token 37, slot 1: expert id {value} is outside \[-1, 8\)"):
        who.layer(**wrong)
    assert bool(who.layer(**masked).isfinite().all())  # the next call is an ordinary one
    who.layer.check()


@pytest.mark.parametrize("value", WRONG_IDS + WIDE_IDS)
def test_fast_drops_the_route_and_reports_when_asked(device, value):
    who = subject("base", device)
    wrong, masked = wrong_call(who, value, device)
    found = who.layer(**wrong)
    with pytest.raises(RoutingError, match=rf"token 37, slot 1: expert id {value} is outside \[-1, 8\)"):
        who.layer.check()
    assert torch.equal(found, who.layer(**masked))
    who.layer.check()


def test_fast_reports_at_the_next_call(device):
    who = subject("base", device)
    wrong, masked = wrong_call(who, 8, device)
    who.layer(**wrong)
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RoutingError, match="an earlier call"):
        who.layer(**masked)
    who.layer(**masked)
    who.layer.check()


def test_some_wrong_id_is_named_when_there_are_many(device):
    who = subject("base", device)
    given = arguments(who.resolved, 64, device=device)
    ids = given["logits_or_ids"].clone()
    ids[3:], ids[5, 0] = 8, 100
    who.layer(**with_ids(given, ids))
    with pytest.raises(RoutingError, match=r"token \d+, slot [01]: expert id (8|100) is"):
        who.layer.check()


# --- the router -------------------------------------------------------------------------------------------------------


def biases(who, device):
    router, p = who.resolved.router, who.parameters
    return p.selection_bias if router.selection_bias else None, p.logit_bias if router.logit_bias else None


@pytest.mark.parametrize("name", ROUTERS)
def test_router_equals_the_oracle_and_the_layer_uses_it(device, name):
    check_layer(subject(name, device), ["router"], [0, 1, 17], show=quiet)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lowest_id(device, name):
    """Logits of three values only, so that nearly every choice is decided by a tie."""
    who = subject(name, device)
    experts = who.resolved.num_experts
    draw = torch.randint(3, (200, experts), generator=torch.Generator().manual_seed(0)).float().to(device)
    selection = None if who.parameters.selection_bias is None else torch.zeros(experts, device=device)
    ids, weights = who.layer.route(draw, selection, None)
    expected, truth = route(who.resolved, draw, selection, None)
    assert torch.equal(ids, expected)
    assert float((weights.double() - truth).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", ROUTERS)
def test_ids_are_distinct_and_in_range_for_any_logits(device, name):
    who = subject(name, device)
    experts, top_k = who.resolved.num_experts, who.resolved.top_k
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e38, -1e38, 1e-45])
    draw = torch.randint(len(odd), (300, experts), generator=torch.Generator().manual_seed(1))
    logits = odd[draw].to(device)
    logits[0], logits[1], logits[2] = math.nan, math.inf, -math.inf
    ids, _ = who.layer.route(logits, *biases(who, device))
    assert bool(((ids >= 0) & (ids < experts)).all())
    assert all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_can_be_skipped(device, name):
    """ids and weights given to a layer that has a router: the bits of the layer fed with logits."""
    who = subject(name, device)
    given = arguments(who.resolved, 64, device=device)
    logits = make_logits(who.resolved, 64, device)
    selection, logit = biases(who, device)
    ids, weights = who.layer.route(logits, selection, logit)
    routed = {**given, "logits_or_ids": logits, "weights": None, "selection_bias": selection, "logit_bias": logit}
    direct = {**given, "logits_or_ids": ids, "weights": weights}
    assert torch.equal(who.layer(**routed), who.layer(**direct))
