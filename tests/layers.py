"""Layers that several tests share, made from specs in code, on the CPU executor or with kernels on a GPU.

`VARIANTS` lists every small layer that a GPU test may ask for; tests/gpu/build_layers.py compiles them all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from mokgen.lower.build import lower
from mokgen.lower.layer import ResolvedLayer, RouterLayer
from mokgen.lower.resolve import resolve
from mokgen.plan.model import LayerPlan
from mokgen.plan.schedule import make_plan
from mokgen.runtime.layer import Layer, layer_of_plan, load_layer
from mokgen.spec.moe import MoeSpec
from mokgen.testing import Subject

DEEPSEEK = {
    "input": "logits",
    "top_k": 8,
    "score": "sigmoid",
    "scale": 2.5,
    "selection_bias": True,
    "groups": 8,
    "top_groups": 4,
    "group_score": "top2_sum",
}
NARROW = {"hidden_size": 64, "experts__intermediate_size": 64}  # where the router is what is tested
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "top_1": {"router__top_k": 1},
    "top_8": {"router__top_k": 8},
    "checked": {"checks": "checked"},
    "bf16_weights": {"router__weight_dtype": "bf16"},
    "shared": {"shared__num": 1},
    "gated_shared": {"shared__num": 2, "shared__intermediate_size": 192, "shared__gate": "sigmoid"},
    "gpt_oss_expert": {
        "experts__activation": "swigluoai",
        "experts__bias": True,
        "experts__gate_up_layout": "interleaved",
    },
    **{f"h_{size}": {"hidden_size": size} for size in (64, 192, 2880, 3584)},
    **{f"i_{size}": {"experts__intermediate_size": size} for size in (64, 192, 768, 1408, 2688)},
    "invariant": {
        "determinism": "batch_invariant",
        "experts__activation": "swigluoai",
        "experts__bias": True,
        "router__top_k": 4,
        "shared__num": 1,
        "shared__gate": "sigmoid",
    },
    "invariant_router": {"determinism": "batch_invariant", "experts__num": 256, "router": DEEPSEEK},
    "router_deepseek_v3": {**NARROW, "experts__num": 256, "router": DEEPSEEK},
    "router_qwen3_moe": {**NARROW, "experts__num": 128, "router": {"input": "logits", "top_k": 8}},
    "router_mixtral": {**NARROW, "router": {"input": "logits", "top_k": 2}},
    "router_gpt_oss": {
        **NARROW,
        "experts__num": 32,
        "router": {"input": "logits", "top_k": 4, "order": "topk_then_score", "normalize": False},
    },
}


def spec(max_tokens: int = 1024, **changes: Any) -> MoeSpec:
    """H = I = 256, E = 8, K = 2, ids as input, unless `changes` (as `router__top_k=4`) say otherwise."""
    data: dict[str, Any] = {
        "hidden_size": 256,
        "experts": {"num": 8, "intermediate_size": 256},
        "router": {"input": "ids", "top_k": 2},
        "topology": {"max_tokens_per_rank": max_tokens},
    }
    for name, value in changes.items():
        place, _, last = name.rpartition("__")
        target = data
        for part in filter(None, place.split("__")):
            target = target.setdefault(part, {})
        target[last] = value
    return MoeSpec.model_validate(data)


def resolved(max_tokens: int = 1024, **changes: Any) -> ResolvedLayer:
    return resolve(spec(max_tokens, **changes))


def router_plan(experts: int, router: RouterLayer, max_tokens: int, **knobs: int) -> LayerPlan:
    """Plan of a layer whose routing is what is tested: any router, experts of 64 x 64."""
    base = resolved(max_tokens, hidden_size=64, experts__intermediate_size=64)
    return make_plan(
        lower(
            replace(
                base, num_experts=experts, num_local_experts=experts, router=router, knobs=tuple(sorted(knobs.items()))
            )
        )
    )


def cpu_layer(max_tokens: int = 1024, **changes: Any) -> Layer:
    """A new layer on the CPU executor."""
    layer = resolved(max_tokens, **changes)
    return layer_of_plan(make_plan(lower(layer), "sm_90a"), "test", "0" * 64)


@cache
def subject(name: str, device: str) -> Subject:
    """A variant on "cpu" or, with its kernels from the cache (or compiled now), on "cuda"; one object per run."""
    if device == "cpu":
        return Subject(cpu_layer(**VARIANTS[name]), torch.device("cpu"), f"{name} on the CPU executor")
    layer = load_layer(resolved(**VARIANTS[name]))
    return Subject(layer, torch.device("cuda", torch.cuda.current_device()), f"{name} on a GPU")


def arguments(layer: ResolvedLayer, tokens: int = 64, pattern: str = "balanced", device: str = "cpu") -> dict[str, Any]:
    """Keyword arguments of `Layer.forward` for given routes, with the ids as `logits_or_ids`."""
    from mokgen.reference.inputs import make_inputs, make_parameters, present

    inputs, parameters = make_inputs(layer, tokens, pattern, device), make_parameters(layer, device)
    given: dict[str, Any] = present(inputs) | present(parameters)
    given.pop("selection_bias", None)
    given.pop("logit_bias", None)
    given["logits_or_ids"] = given.pop("ids")
    return given
