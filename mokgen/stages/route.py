"""route: logits (T, E) to expert ids and weights (T, K). Exists only when the router's input is logits.

Scores are fp32; a NaN ranks with -inf; ties go to the lowest expert id; experts of closed groups are never chosen. So
ids are distinct and in range for any input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mokgen.ir.requests import Argument, StageRequest, TileConfig
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer, RouterLayer
from mokgen.stages.base import StageDef, Tensors, ids_ref, weights_ref

if TYPE_CHECKING:
    import torch

NORMALIZE_FLOOR = 1e-20  # added to the sum, so that K zero scores give weight 0 and not NaN


def applies(layer: ResolvedLayer) -> bool:
    return layer.router.input == "logits"


def inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    experts = layer.num_experts
    refs = [TensorRef("logits", layer.router.logits_dtype, ("T", experts))]
    if layer.router.selection_bias:
        refs.append(TensorRef("selection_bias", "fp32", (experts,)))
    if layer.router.logit_bias:
        refs.append(TensorRef("logit_bias", "fp32", (experts,)))
    return tuple(refs)


def outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (ids_ref(layer), weights_ref(layer))


def requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    arguments = [Argument(ref.name, ref.dtype, ref.shape) for ref in inputs(layer)]
    arguments.append(Argument("ids", "int32", ("T", layer.top_k)))
    arguments.append(Argument("weights", "fp32", ("T", layer.top_k)))
    return StageRequest(arguments=tuple(arguments))


def score(logits: torch.Tensor, router: RouterLayer) -> torch.Tensor:
    return logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()


def largest(values: torch.Tensor, count: int, allowed: torch.Tensor | None = None) -> torch.Tensor:
    """Indices (T, count) of the largest values per row, descending, a NaN as -inf, ties to the lowest index.

    Where `allowed` is false an index comes after all allowed ones, whatever the values.
    """
    import torch

    order = torch.where(values.isnan(), -torch.inf, values).sort(dim=-1, descending=True, stable=True).indices
    if allowed is not None:
        behind = (~allowed.gather(-1, order)).to(torch.int8)
        order = order.gather(-1, behind.sort(dim=-1, stable=True).indices)
    return order[:, :count]


def in_kept_group(choice_TE: torch.Tensor, router: RouterLayer) -> torch.Tensor:
    """Boolean (T, E): the expert is in one of the best `top_groups` groups."""
    import torch

    grouped = choice_TE.view(
        len(choice_TE), router.groups, choice_TE.shape[-1] // router.groups
    )  # (T, groups, E / groups)
    grouped = torch.where(grouped.isnan(), -torch.inf, grouped)
    if router.group_score == "top2_sum":
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(-1, largest(group_scores, router.top_groups), True)
    return kept.unsqueeze(-1).expand_as(grouped).flatten(-2)


def reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """ids (T, K) int32 and topk_weights (T, K) fp32."""
    import torch

    router = layer.router
    logits_TE = tensors["logits"].float()
    if router.logit_bias:
        logits_TE = logits_TE + tensors["logit_bias"].float()
    scores_TE = logits_TE if router.order == "topk_then_score" else score(logits_TE, router)
    choice_TE = scores_TE + tensors["selection_bias"].float() if router.selection_bias else scores_TE
    allowed_TE = in_kept_group(choice_TE, router) if router.top_groups < router.groups else None
    ids_TK = largest(choice_TE, layer.top_k, allowed_TE)
    weights_TK = scores_TE.gather(-1, ids_TK)
    if router.order == "topk_then_score":
        weights_TK = score(weights_TK, router)
    if router.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + NORMALIZE_FLOOR)
    return {"ids": ids_TK.to(torch.int32), "topk_weights": weights_TK * router.scale}


STAGE = StageDef("route", "route", applies, inputs, outputs, requests, reference)
