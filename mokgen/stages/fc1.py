"""fc1: gathered rows of x times gate and up weights, activation in the epilogue, to hidden (P, I).

A tile computes 128 gate and the 128 matching up columns side by side, so that both halves of an activation meet in one
thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mokgen.facts.activations import ACTIVATIONS
from mokgen.ir.requests import Access, Argument, RegionRequest, StageRequest, Step, TaskRequest, TileConfig, TileSpace
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer
from mokgen.stages.base import (
    TILE_ROWS,
    StageDef,
    Tensors,
    TileView,
    always,
    ceil_div,
    hidden_ref,
    row_token_ref,
    table_refs,
    x_ref,
)

if TYPE_CHECKING:
    import torch


def weight_refs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    experts, columns = layer.num_local_experts, 2 * layer.intermediate_size
    weight = TensorRef("w_gate_up", layer.weight_dtype, (experts, columns, layer.hidden_size))
    return (weight, TensorRef("b_gate_up", "bf16", (experts, columns))) if layer.expert_bias else (weight,)


def inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (x_ref(layer), *weight_refs(layer), *table_refs(layer), row_token_ref())


def outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (hidden_ref(layer),)


def tile_space(layer: ResolvedLayer, tiles: TileConfig, rows: str, intermediate_size: int) -> TileSpace:
    """Tiles of a gate|up GEMM over `rows`; the shared expert's has its own rows and width."""
    return TileSpace(
        rows=rows,
        tile_rows=tiles.tile_m,
        tile_columns=tiles.hidden_columns,
        columns=intermediate_size,
        column_tiles=ceil_div(intermediate_size, tiles.hidden_columns),
        k_blocks=ceil_div(layer.hidden_size, tiles.tile_k),
    )


def steps() -> tuple[Step, ...]:
    """All four warps of the load warpgroup gather A; one of them brings B too."""
    loads = tuple(Step(role, "fc1.load_tile") for role in ("load", "scheduler", "reduce"))
    return (*loads, Step("mma", "epilogue.gated"))


def requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    ref = hidden_ref(layer)
    region = RegionRequest(ref.name, ref.dtype, ref.shape, (tiles.tile_m, tiles.hidden_columns), "activation output")
    task = TaskRequest(
        name="fc1",
        code=1,
        queue="main",
        priority=1,
        slabs="none",
        gathers=True,
        space=tile_space(layer, tiles, "row_blocks", layer.intermediate_size),
        reads=(Access("row_token", "tile", "all"),),
        writes=(Access("hidden", "tile", "tile"),),
        steps=steps(),
        waiter="load",
        signaller="mma",
        signal_unit="group",
        deferred=True,
    )
    x = Argument("x", "bf16", ("T", layer.hidden_size))
    weights = tuple(Argument(weight.name, weight.dtype, weight.shape) for weight in weight_refs(layer))
    return StageRequest(regions=(region,), tasks=(task,), arguments=(x, *weights))


def gathered_rows(x_TH: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Rows of x by token, fp32; zeros where token is -1. Selection, so that no other row's NaN comes in."""
    import torch

    rows = torch.zeros(len(token), x_TH.shape[1])
    live = token >= 0
    rows[live] = x_TH[token[live].long()].float()
    return rows


def weight_rows(layer: ResolvedLayer, interleaved: bool, columns: slice) -> tuple[slice, slice]:
    """Rows of a gate_up weight that make activation columns `columns`: gate rows, up rows."""
    if interleaved:
        return slice(2 * columns.start, 2 * columns.stop, 2), slice(2 * columns.start + 1, 2 * columns.stop, 2)
    size = layer.intermediate_size
    return columns, slice(size + columns.start, size + columns.stop)


def activate(
    layer: ResolvedLayer,
    rows: torch.Tensor,
    gate: tuple[torch.Tensor, torch.Tensor | None],
    up: tuple[torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """hidden (rows, columns) bf16 from fp32 rows and (weight, bias) of gate and up: fp32 sums, one rounding."""
    import torch

    sums = []
    for weight, bias in (gate, up):
        total = rows @ weight.float().T
        sums.append(total if bias is None else total + bias.float())
    activation = ACTIVATIONS[layer.activation]
    return activation.reference(sums[0], sums[1], layer.alpha, layer.clamp).to(torch.bfloat16)


def routed_columns(
    layer: ResolvedLayer, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice
) -> torch.Tensor:
    """hidden columns of one expert: weight (2I, H), bias (2I,)."""
    gate, up = weight_rows(layer, layer.gate_up_layout == "interleaved", columns)
    if bias is None:
        return activate(layer, rows, (weight[gate], None), (weight[up], None))
    return activate(layer, rows, (weight[gate], bias[gate]), (weight[up], bias[up]))


def run_tile(view: TileView) -> None:
    layer = view.layer
    rows = gathered_rows(view.argument("x"), view.read("row_token", view.rows))
    bias = view.argument("b_gate_up")[view.expert] if layer.expert_bias else None
    weight = view.argument("w_gate_up")[view.expert]
    view.write("hidden", routed_columns(layer, rows, weight, bias, view.columns))


def reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """hidden (128 B, I) bf16."""
    import torch

    rows = gathered_rows(tensors["x"], tensors["row_token"])
    hidden = torch.zeros(len(rows), layer.intermediate_size, dtype=torch.bfloat16)
    starts = (tensors["block_start"] * TILE_ROWS).tolist()
    for expert in range(layer.num_local_experts):
        segment = slice(starts[expert], starts[expert + 1])
        bias = tensors["b_gate_up"][expert] if layer.expert_bias else None
        columns = slice(0, layer.intermediate_size)
        hidden[segment] = routed_columns(layer, rows[segment], tensors["w_gate_up"][expert], bias, columns)
    return {"hidden": hidden}


STAGE = StageDef("fc1", "forward", always, inputs, outputs, requests, reference, run_tile)
