"""Layers that several tests share, made from specs in code."""

from __future__ import annotations

from typing import Any

import torch

from mokgen.lower.build import lower
from mokgen.lower.layer import ResolvedLayer
from mokgen.lower.resolve import resolve
from mokgen.plan.schedule import make_plan
from mokgen.runtime.layer import Layer, layer_of_plan
from mokgen.spec.moe import MoeSpec


def resolved(max_tokens: int = 1024, **changes: Any) -> ResolvedLayer:
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
    return resolve(MoeSpec.model_validate(data))


def cpu_layer(max_tokens: int = 1024, **changes: Any) -> Layer:
    """A layer on the CPU executor."""
    layer = resolved(max_tokens, **changes)
    return layer_of_plan(make_plan(lower(layer), "sm_90a"), "test", "0" * 64)


def arguments(layer: ResolvedLayer, tokens: int = 64, pattern: str = "balanced") -> dict[str, torch.Tensor]:
    """Keyword arguments of `Layer.forward`, with the ids as `logits_or_ids`."""
    from mokgen.reference.inputs import make_inputs, make_parameters, present

    given = present(make_inputs(layer, tokens, pattern)) | present(make_parameters(layer))
    given.pop("selection_bias", None)
    given.pop("logit_bias", None)
    given["logits_or_ids"] = given.pop("ids")
    return given
