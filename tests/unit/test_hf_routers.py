"""route against the routers of Hugging Face transformers: equal ids, weights within 1e-6.

Their classes run as they are, with an identity as the router's linear layer, so that hidden states are the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import subject

from mokgen.facts.tolerance import ROUTER_WEIGHT_ABS
from mokgen.reference.inputs import make_logits, make_routed_inputs
from mokgen.reference.oracle import route

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

TOKENS = 700
SEEDS = (0, 1, 2)


def deepseek_v3(layer) -> torch.nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = layer.router
    config = transformers.DeepseekV3Config(
        hidden_size=layer.num_experts,
        n_routed_experts=layer.num_experts,
        num_experts_per_tok=router.top_k,
        n_group=router.groups,
        topk_group=router.top_groups,
        norm_topk_prob=router.normalize,
        routed_scaling_factor=router.scale,
    )
    return DeepseekV3TopkRouter(config)


def qwen3_moe(layer) -> torch.nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = transformers.Qwen3MoeConfig(
        hidden_size=layer.num_experts,
        num_experts=layer.num_experts,
        num_experts_per_tok=layer.top_k,
        norm_topk_prob=layer.router.normalize,
    )
    return Qwen3MoeTopKRouter(config)


def mixtral(layer) -> torch.nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    config = transformers.MixtralConfig(
        hidden_size=layer.num_experts, num_local_experts=layer.num_experts, num_experts_per_tok=layer.top_k
    )
    return MixtralTopKRouter(config)


def gpt_oss(layer) -> torch.nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    config = transformers.GptOssConfig(
        hidden_size=layer.num_experts, num_local_experts=layer.num_experts, num_experts_per_tok=layer.top_k
    )
    return GptOssTopKRouter(config)


ROUTERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "router_deepseek_v3": deepseek_v3,
    "router_qwen3_moe": qwen3_moe,
    "router_mixtral": mixtral,
    "router_gpt_oss": gpt_oss,
}


def theirs(name: str, layer, logits: torch.Tensor, selection_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights (T, K) by Hugging Face's class."""
    router = ROUTERS[name](layer).to(logits.device).float()
    with torch.no_grad():
        router.weight.copy_(torch.eye(layer.num_experts))
        if selection_bias is not None:
            router.e_score_correction_bias.copy_(selection_bias)
        if getattr(router, "bias", None) is not None:
            router.bias.zero_()
        found = router(logits)
    if not isinstance(found, tuple) or len(found) != 3:
        pytest.skip(f"transformers {transformers.__version__}: this router does not return (logits, weights, ids)")
    return found[2], found[1]


def in_order(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By rising id: theirs come in no particular order where they ask torch.topk for none."""
    ids, order = ids.long().sort(dim=1)
    return ids, weights.double().gather(1, order)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ROUTERS)
def test_route_equals_hugging_face(device, name, seed):
    who = subject(name, device)
    logits = make_routed_inputs(who.resolved, who.parameters, TOKENS, device, seed).logits
    bias = who.parameters.selection_bias
    ids, weights = in_order(*theirs(name, who.resolved, logits, bias))
    for found in (who.layer.route(logits, bias), route(who.resolved, logits, bias)):
        our_ids, our_weights = in_order(*found)
        assert torch.equal(our_ids, ids)
        assert float((our_weights - weights).abs().max()) <= ROUTER_WEIGHT_ABS


def test_the_weights_are_not_trivial(device):
    """A router that returned zeros or equal weights would pass a comparison with itself."""
    who = subject("router_deepseek_v3", device)
    logits = make_logits(who.resolved, TOKENS, device)
    _, weights = theirs("router_deepseek_v3", who.resolved, logits, who.parameters.selection_bias)
    torch.testing.assert_close(weights.sum(1), torch.full((TOKENS,), 2.5, device=device))
    assert float(weights.std()) > 1e-3
