"""Gated activations an expert may use; `mokgen.device.activations` has a function of the same name for each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ActivationDef:
    """hidden = reference(gate, up, alpha, clamp); alpha and clamp are the values used where a spec leaves them null."""

    name: str
    alpha: float
    clamp: float  # inf: none
    formula: str
    reference: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
    source: str


def _clamped(gate: torch.Tensor, up: torch.Tensor, clamp: float) -> tuple[torch.Tensor, torch.Tensor]:
    if math.isinf(clamp):
        return gate, up
    return gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)


def swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, clamp: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * up, elementwise in the dtype of the arguments."""
    gate, up = _clamped(gate, up, clamp)
    return gate * (gate * alpha).sigmoid() * up


def swigluoai(gate: torch.Tensor, up: torch.Tensor, alpha: float, clamp: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), elementwise in the dtype of the arguments."""
    gate, up = _clamped(gate, up, clamp)
    return gate * (gate * alpha).sigmoid() * (up + 1)


ACTIVATIONS: dict[str, ActivationDef] = {
    row.name: row
    for row in (
        ActivationDef(
            "swiglu", 1.0, math.inf, "gate * sigmoid(alpha * gate) * up", swiglu, "Shazeer 2020, arXiv 2002.05202"
        ),
        ActivationDef(
            "swigluoai",
            1.702,
            7.0,
            "gate * sigmoid(alpha * gate) * (up + 1)",
            swigluoai,
            "Hugging Face transformers, GptOssExperts: alpha 1.702, limit 7.0",
        ),
    )
}
