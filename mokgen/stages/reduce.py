"""reduce: weighted sum over a token's slots, plus the shared expert, to out (T, H) bf16.

fp32, shared expert first, then slots in slot order, one rounding. Slots without a route are left out by selection:
their weights and any NaN in them reach no result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mokgen.ir.requests import Access, Argument, StageRequest, Step, TaskRequest, TileConfig, TileSpace
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer
from mokgen.stages.base import (
    StageDef,
    Tensors,
    TileView,
    always,
    shared_y_ref,
    slot_row_ref,
    weights_ref,
    y_ref,
)

if TYPE_CHECKING:
    import torch


def has_gate(layer: ResolvedLayer) -> bool:
    return layer.shared.num > 0 and layer.shared.gate == "sigmoid"


def inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    refs = [weights_ref(layer), slot_row_ref(layer), y_ref(layer)]
    if layer.shared.num > 0:
        refs.append(shared_y_ref(layer))
    if has_gate(layer):
        refs.append(TensorRef("shared_gate_logits", "fp32", ("T",)))
    return tuple(refs)


def outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (TensorRef("out", "bf16", ("T", layer.hidden_size)),)


def requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    reads = [Access("slot_row", "any", "all"), Access("y", "any", "tile")]
    if layer.shared.num > 0:
        reads.append(Access("shared_y", "any", "tile"))
    task = TaskRequest(
        name="reduce",
        code=4,
        queue="reduce",
        priority=0,
        slabs="whole",
        gathers=False,
        space=TileSpace(
            rows="token_blocks",
            tile_rows=tiles.reduce_tokens,
            tile_columns=tiles.slab_tiles * tiles.tile_n,
            columns=layer.hidden_size,
            column_tiles=tiles.num_slabs,
            k_blocks=0,
        ),
        reads=tuple(reads),
        writes=(Access("out", "tile", "tile"),),
        steps=(Step("reduce", "reduce.reduce_token"), Step("mma", "reduce.reduce_token")),
        waiter="reduce",
        signaller="reduce",
        signal_unit="one",
        deferred=False,
    )
    weights = weights_ref(layer)
    arguments = [Argument("topk_weights", weights.dtype, ("T", layer.top_k))]
    if has_gate(layer):
        arguments.append(Argument("shared_gate_logits", "fp32", ("T",)))
    arguments.append(Argument("out", "bf16", ("T", layer.hidden_size)))
    return StageRequest(tasks=(task,), arguments=tuple(arguments))


def weighted_sum(
    start: torch.Tensor, slot_rows: torch.Tensor, weights: torch.Tensor, y_rows: list[torch.Tensor]
) -> torch.Tensor:
    """start (T, C) fp32 + sum over slots in slot order; y_rows[k] holds the rows of slot k's routes only."""
    total = start.clone()
    for slot, rows in enumerate(y_rows):
        live = slot_rows[:, slot] >= 0
        total[live] += weights[live, slot].float().unsqueeze(-1) * rows.float()
    return total


def shared_part(view_rows: torch.Tensor, gate_logits: torch.Tensor | None) -> torch.Tensor:
    """The shared expert's share in fp32: rows (T, C), times sigmoid of the gate logits (T,) where there is a gate."""
    rows = view_rows.float()
    return rows if gate_logits is None else gate_logits.float().sigmoid().unsqueeze(-1) * rows


def run_tile(view: TileView) -> None:
    import torch

    layer, slots = view.layer, view.layer.top_k
    tokens = slice(view.rows.start, min(view.rows.stop, view.tokens))
    routes = slice(tokens.start * slots, tokens.stop * slots)
    slot_rows = view.read("slot_row", routes).view(-1, slots)
    if layer.shared.num > 0:
        gate = view.argument("shared_gate_logits")[tokens] if has_gate(layer) else None
        start = shared_part(view.read("shared_y", tokens, view.columns), gate)
    else:
        start = torch.zeros(len(slot_rows), view.columns.stop - view.columns.start)
    y_rows = []
    for slot in range(slots):
        column = slot_rows[:, slot]
        y_rows.append(view.read("y", column[column >= 0], view.columns))
    total = weighted_sum(start, slot_rows, view.argument("topk_weights")[tokens], y_rows)
    view.write("out", total.to(torch.bfloat16))


def reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """out (T, H) bf16."""
    import torch

    weights, y = tensors["topk_weights"], tensors["y"]
    tokens = len(weights)
    slot_rows = tensors["slot_row"].view(-1, layer.top_k)
    start = torch.zeros(tokens, layer.hidden_size)
    if layer.shared.num > 0:
        start = shared_part(tensors["shared_y"][:tokens], tensors.get("shared_gate_logits"))
    y_rows = []
    for slot in range(layer.top_k):
        column = slot_rows[:, slot]
        y_rows.append(y[column[column >= 0].long()])
    return {"out": weighted_sum(start, slot_rows, weights, y_rows).to(torch.bfloat16)}


STAGE = StageDef("reduce", "forward", always, inputs, outputs, requests, reference, run_tile)
