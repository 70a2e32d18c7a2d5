"""Plain torch forms of the two small kernels, written from the contract alone: no mokgen import, any device.

Shape suffixes: T tokens, K top-k slots, E experts.
"""

import torch

TILE_M = 128
NO_ROUTE = -1


def schedule_tables(ids_TK: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    """Tables of one call, int32 on ids' device: block_start (E + 1,), block_expert (B,), block_rows (B,),
    row_token (128 B,), slot_row (T K,), and `first_invalid` (): route of the first id outside [-1, E), -1 for none."""
    top_k = ids_TK.shape[1]
    ids = ids_TK.reshape(-1).to(torch.int64)
    routed = (ids >= 0) & (ids < num_experts)
    invalid = (~routed & (ids != NO_ROUTE)).nonzero().flatten()
    routes = routed.nonzero().flatten()
    routes = routes[ids[routes].sort(stable=True).indices]  # by expert, then ascending
    experts = ids[routes]
    counts = torch.bincount(experts, minlength=num_experts)
    blocks = (counts + TILE_M - 1) // TILE_M
    block_start = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
    rank = torch.arange(len(routes), device=ids.device) - (counts.cumsum(0) - counts)[experts]
    rows = TILE_M * block_start[experts] + rank
    slot_row = torch.full_like(ids, NO_ROUTE).scatter_(0, routes, rows)
    row_token = ids.new_full((int(block_start[-1]) * TILE_M,), NO_ROUTE).scatter_(0, rows, routes // top_k)
    block_expert = torch.arange(num_experts, device=ids.device).repeat_interleave(blocks)
    block = torch.arange(len(block_expert), device=ids.device) - block_start[block_expert]
    block_rows = (counts[block_expert] - TILE_M * block).clamp(max=TILE_M)
    tables = {
        "block_start": block_start,
        "block_expert": block_expert,
        "block_rows": block_rows,
        "row_token": row_token,
        "slot_row": slot_row,
        "first_invalid": invalid[0] if len(invalid) else ids.new_tensor(-1),
    }
    return {name: table.to(torch.int32) for name, table in tables.items()}


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Indices by descending value; NaN ranks as -inf, equal values by ascending index."""
    ranked = torch.where(values.isnan(), float("-inf"), values) + 0.0  # + 0.0: -0 and +0 are equal
    return ranked.sort(dim=-1, descending=True, stable=True).indices


def _closed_experts(choice_TE: torch.Tensor, router: dict) -> torch.Tensor:
    """True (T, E) where the expert's group is not among the best top_groups."""
    grouped = choice_TE.unflatten(-1, (router["groups"], -1))
    grouped = torch.where(grouped.isnan(), float("-inf"), grouped)
    if router["group_score"] == "max":
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    kept = _descending(group_scores)[:, : router["top_groups"]]
    closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return closed.unsqueeze(-1).expand_as(grouped).flatten(-2)


def route(
    logits_TE: torch.Tensor,
    router: dict,
    selection_bias_E: torch.Tensor | None = None,
    logit_bias_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (T, K) int32 in descending order of choice, and weights (T, K) fp32. `router` has the fields of the spec."""
    score = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}[router["score"]]
    values = logits_TE.float()
    if logit_bias_E is not None:
        values = values + logit_bias_E
    if router["order"] == "score_then_topk":
        values = score(values)
    choice = values if selection_bias_E is None else values + selection_bias_E
    order = _descending(choice)
    if router["top_groups"] < router["groups"]:
        is_closed = _closed_experts(choice, router).gather(1, order)
        order = order.gather(1, is_closed.to(torch.int8).sort(dim=-1, stable=True).indices)
    ids = order[:, : router["top_k"]]
    weights = values.gather(1, ids)
    if router["order"] == "topk_then_score":
        weights = score(weights)
    if router["normalize"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * router["scale"]
