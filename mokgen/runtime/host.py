"""The CPU implementation of the operators: the plan's executor, fed with the call's tensors.

No GPU is emulated: the executor runs the plan's tasks with torch in ticket order and refuses reads of what is not yet
written. It is for tests and for development on a machine without a GPU, and refuses full-size calls with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mokgen.runtime.errors import ErrorWords

if TYPE_CHECKING:
    from mokgen.execute import LayerPlan

Tensor = torch.Tensor


def record_wrong_ids(ids: Tensor, num_experts: int, words: ErrorWords) -> None:
    """Record the first id outside [-1, num_experts) of ids (T, K), as the schedule kernel does."""
    wrong = ((ids < -1) | (ids >= num_experts)).nonzero()
    if len(wrong):
        token, slot = (int(place) for place in wrong[0])
        words.record_id(token, slot, int(ids[token, slot]))


def read_plan(path: Path) -> LayerPlan:
    """The plan stored in an artifact."""
    from mokgen.execute import LayerPlan

    return LayerPlan.from_json(path.read_text(encoding="utf-8"))


def route(
    plan: LayerPlan,
    logits: Tensor,
    selection_bias: Tensor | None,
    logit_bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Fill ids (T, K) int32 and weights (T, K) fp32."""
    from mokgen import execute

    found = execute.route(plan, {"logits": logits, "selection_bias": selection_bias, "logit_bias": logit_bias})
    ids.copy_(found["ids"])
    weights.copy_(found["topk_weights"])


def forward(
    plan: LayerPlan, tensors: Mapping[str, Tensor | None], out: Tensor, interleaving: int | None
) -> dict[str, Tensor]:
    """Fill out (T, H) bf16; returns every buffer of the call by region name, trimmed to the call.

    interleaving: None for ticket order, else the seed of an order in which virtual CTAs take turns.
    """
    from mokgen import execute

    buffers = execute.run(plan, tensors, "ticket" if interleaving is None else interleaving)
    out.copy_(buffers.pop("out"))
    return buffers
