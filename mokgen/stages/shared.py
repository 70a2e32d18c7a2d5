"""The shared expert: fc1 and fc2 over all tokens in order, with weights of their own and no routing table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mokgen.ir.requests import Access, Argument, RegionRequest, StageRequest, TaskRequest, TileConfig
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer
from mokgen.stages import fc1, fc2
from mokgen.stages.base import (
    TILE_ROWS,
    StageDef,
    Tensors,
    TileView,
    ceil_div,
    has_shared,
    shared_hidden_ref,
    shared_y_ref,
    x_ref,
)

if TYPE_CHECKING:
    import torch


def gate_up_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("w_shared_gate_up", layer.weight_dtype, (2 * layer.shared.intermediate_size, layer.hidden_size))


def down_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("w_shared_down", layer.weight_dtype, (layer.hidden_size, layer.shared.intermediate_size))


def fc1_inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (x_ref(layer), gate_up_ref(layer))


def fc1_outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (shared_hidden_ref(layer),)


def fc2_inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (shared_hidden_ref(layer), down_ref(layer))


def fc2_outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (shared_y_ref(layer),)


def fc1_requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    ref, weight = shared_hidden_ref(layer), gate_up_ref(layer)
    cell = (tiles.tile_m, tiles.hidden_columns)
    task = TaskRequest(
        name="shared_fc1",
        code=0,
        queue="main",
        priority=0,  # needs no table, so it starts the phase
        slabs="none",
        gathers=True,
        space=fc1.tile_space(layer, tiles, "shared_blocks", layer.shared.intermediate_size),
        reads=(),
        writes=(Access("shared_hidden", "tile", "tile"),),
        steps=fc1.steps(),
        waiter="load",
        signaller="mma",
        signal_unit="group",
        deferred=True,
    )
    return StageRequest(
        regions=(RegionRequest(ref.name, ref.dtype, ref.shape, cell, "activation output of the shared expert"),),
        tasks=(task,),
        arguments=(Argument("x", "bf16", ("T", layer.hidden_size)), Argument(weight.name, weight.dtype, weight.shape)),
    )


def fc2_requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    ref, weight = shared_y_ref(layer), down_ref(layer)
    task = TaskRequest(
        name="shared_fc2",
        code=2,
        queue="main",
        priority=0,
        slabs="tiles",
        gathers=False,
        space=fc2.tile_space(layer, tiles, "shared_blocks", layer.shared.intermediate_size),
        reads=(Access("shared_hidden", "tile", "all"),),
        writes=(Access("shared_y", "tile", "tile"),),
        steps=fc2.steps(),
        waiter="load",
        signaller="mma",
        signal_unit="group",
        deferred=True,
    )
    cell = (tiles.tile_m, tiles.tile_n)
    return StageRequest(
        regions=(RegionRequest(ref.name, ref.dtype, ref.shape, cell, "output of the shared expert"),),
        tasks=(task,),
        arguments=(Argument(weight.name, weight.dtype, weight.shape),),
    )


def token_rows(x_TH: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows of x in fp32, zeros past the last token."""
    import torch

    out = torch.zeros(rows.stop - rows.start, x_TH.shape[1])
    live = x_TH[rows]
    out[: len(live)] = live.float()
    return out


def gate_up_columns(layer: ResolvedLayer, rows: torch.Tensor, weight: torch.Tensor, columns: slice) -> torch.Tensor:
    size = layer.shared.intermediate_size
    gate, up = weight[columns], weight[size + columns.start : size + columns.stop]
    return fc1.activate(layer, rows, (gate, None), (up, None))


def run_fc1_tile(view: TileView) -> None:
    rows = token_rows(view.argument("x"), view.rows)
    weight = view.argument("w_shared_gate_up")
    view.write("shared_hidden", gate_up_columns(view.layer, rows, weight, view.columns))


def run_fc2_tile(view: TileView) -> None:
    hidden = view.read("shared_hidden", view.rows, slice(0, view.layer.shared.intermediate_size))
    view.write("shared_y", fc2.project(hidden, view.argument("w_shared_down")[view.columns], None))


def fc1_reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """shared_hidden (128 * ceil(T / 128), Is) bf16."""
    x_TH = tensors["x"]
    rows = token_rows(x_TH, slice(0, TILE_ROWS * ceil_div(len(x_TH), TILE_ROWS)))
    columns = slice(0, layer.shared.intermediate_size)
    return {"shared_hidden": gate_up_columns(layer, rows, tensors["w_shared_gate_up"], columns)}


def fc2_reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """shared_y (128 * ceil(T / 128), H) bf16."""
    return {"shared_y": fc2.project(tensors["shared_hidden"], tensors["w_shared_down"], None)}


FC1 = StageDef("shared_fc1", "forward", has_shared, fc1_inputs, fc1_outputs, fc1_requests, fc1_reference, run_fc1_tile)
FC2 = StageDef("shared_fc2", "forward", has_shared, fc2_inputs, fc2_outputs, fc2_requests, fc2_reference, run_fc2_tile)
