"""`determinism: batch_invariant`: a token's bits do not change with the tokens beside it, on a GPU and on the executor.

Other tokens move a token's rows to other places of a tile, to other tiles and beside other rows; nothing of that may
enter its sums.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import subject

from mokgen.reference.inputs import make_inputs, make_routed_inputs, present
from mokgen.testing import Subject

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

TOKENS = 300
LAYERS = ("invariant", "invariant_router")
CASES = [("invariant", pattern) for pattern in ("balanced", "zipf", "all_to_one", "masked")]
CASES += [("invariant_router", "router")]  # makes its own routes
PER_TOKEN = ("x", "logits_or_ids", "weights", "shared_gate_logits")


def whole_call(who: Subject, pattern: str) -> dict[str, Any]:
    """Arguments of a call of TOKENS tokens with every row filled; a layer with a router routes by itself."""
    layer, device = who.resolved, who.device
    if layer.router.input == "logits":
        inputs = make_routed_inputs(layer, who.parameters, TOKENS, device)
    else:
        inputs = make_inputs(layer, TOKENS, pattern, device)
    given: dict[str, Any] = present(inputs) | present(who.parameters)
    if layer.router.input == "logits":
        given["ids"], given["weights"] = given.pop("logits"), None
    given["logits_or_ids"] = given.pop("ids")
    return given


def outputs(who: Subject, given: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Output rows of `tokens` in a call of those tokens alone, in that order."""
    index = tokens.to(who.device)
    part = {name: value[index] if name in PER_TOKEN and value is not None else value for name, value in given.items()}
    with torch.no_grad():
        out = who.layer(**part)
    who.layer.check()
    return out


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


SUBSETS = {
    "the first alone": torch.tensor([0]),
    "the last alone": torch.tensor([TOKENS - 1]),
    "the first row block": torch.arange(128),
    "every third": torch.arange(0, TOKENS, 3),
    "all but the first": torch.arange(1, TOKENS),
    "all, the other way round": torch.arange(TOKENS).flip(0),
    "all, shuffled": torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1)),
    "one among copies of another": torch.tensor([7] * 200 + [11] + [7] * 99),
    "each twice": torch.arange(TOKENS).repeat_interleave(2),
}


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize(("name", "pattern"), CASES)
def test_bits_of_a_token_do_not_depend_on_the_others(device, name, pattern, subset):
    who = subject(name, device)
    assert who.resolved.determinism == "batch_invariant"
    given, tokens = whole_call(who, pattern), SUBSETS[subset]
    whole = outputs(who, given, torch.arange(TOKENS))
    part = outputs(who, given, tokens)
    assert torch.equal(bits(part), bits(whole)[tokens.to(whole.device)])
    assert len(whole.unique(dim=0)) > TOKENS // 4, "rows must differ for the comparison to say anything"


@pytest.mark.parametrize("name", LAYERS)
def test_other_values_in_other_rows_change_nothing(device, name):
    """Neighbours a thousand times larger, infinite or NaN."""
    who = subject(name, device)
    given = whole_call(who, "balanced")
    every, kept = torch.arange(TOKENS), torch.arange(0, TOKENS, 2)
    whole = outputs(who, given, every)
    for factor in (1000.0, torch.inf, torch.nan):
        x = given["x"].clone()
        x[1::2] *= factor
        out = outputs(who, given | {"x": x}, every)
        assert torch.equal(bits(out)[kept], bits(whole)[kept])
        assert not torch.equal(bits(out), bits(whole))
