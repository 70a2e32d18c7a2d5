"""schedule: expert ids (T, K) to the destination table of the pool.

The pool holds the routed rows by ascending expert, each expert's segment padded to whole row blocks, rows inside a
segment by ascending route (token * K + slot). Ids outside [-1, E) count as -1 here; who records or raises them does so
before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mokgen.ir.requests import Argument, RegionRequest, StageRequest, TileConfig
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer
from mokgen.stages.base import (
    TILE_ROWS,
    StageDef,
    Tensors,
    always,
    ids_ref,
    row_token_ref,
    slot_row_ref,
    table_refs,
)

if TYPE_CHECKING:
    import torch


def inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (ids_ref(layer),)


def outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (*table_refs(layer), row_token_ref(), slot_row_ref(layer))


MEANINGS = {
    "block_start": "prefix of row blocks per expert; the last entry is the number of row blocks",
    "block_expert": "expert of a row block",
    "block_rows": "rows of a row block that are not padding, 1..128",
    "row_token": "token of a pool row, -1 on padding rows of used blocks",
    "slot_row": "pool row of a route, -1 for no route",
}


def requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    regions = [RegionRequest(ref.name, ref.dtype, ref.shape, (1,), MEANINGS[ref.name]) for ref in outputs(layer)]
    arguments = (
        # W = K * id_words: int64 ids are passed as their 32-bit halves, so that one kernel takes both.
        Argument("ids", "int32", ("T", "W")),
        Argument("id_words", "int32", None),
        Argument("workspace", "uint8", ("WORKSPACE_BYTES",)),
        Argument("error_address", "int64", None),
    )
    return StageRequest(regions=tuple(regions), arguments=arguments)


def reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The table for one call, trimmed: block tables (B,), row_token (128 B,), slot_row (T K,), all int32."""
    import torch

    ids = tensors["ids"].reshape(-1).to(torch.int64)
    experts = layer.num_local_experts
    live = (ids >= 0) & (ids < experts)
    routes = live.nonzero().squeeze(-1)
    routes = routes[ids[routes].argsort(stable=True)]  # by expert, then by route
    counts = torch.bincount(ids[routes], minlength=experts)
    blocks = (counts + TILE_ROWS - 1) // TILE_ROWS
    block_start = torch.zeros(experts + 1, dtype=torch.int64)
    block_start[1:] = blocks.cumsum(0)
    total = int(block_start[-1])
    block_expert = torch.repeat_interleave(torch.arange(experts), blocks)
    position = torch.arange(total) - block_start[block_expert]
    block_rows = (counts[block_expert] - position * TILE_ROWS).clamp(max=TILE_ROWS)

    first_route = counts.cumsum(0) - counts
    expert = ids[routes]
    rows = block_start[expert] * TILE_ROWS + torch.arange(len(routes)) - first_route[expert]
    row_token = torch.full((total * TILE_ROWS,), -1, dtype=torch.int64)
    row_token[rows] = routes // layer.top_k
    slot_row = torch.full((len(ids),), -1, dtype=torch.int64)
    slot_row[routes] = rows
    table = {
        "block_start": block_start,
        "block_expert": block_expert,
        "block_rows": block_rows,
        "row_token": row_token,
        "slot_row": slot_row,
    }
    return {name: value.to(torch.int32) for name, value in table.items()}


STAGE = StageDef("schedule", "schedule", always, inputs, outputs, requests, reference)
