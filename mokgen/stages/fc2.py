"""fc2: hidden (P, I) times the expert's down weight (H, I), to the unweighted rows y (P, H) bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    table_refs,
    y_ref,
)

if TYPE_CHECKING:
    import torch


def weight_refs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    experts, hidden = layer.num_local_experts, layer.hidden_size
    weight = TensorRef("w_down", layer.weight_dtype, (experts, hidden, layer.intermediate_size))
    return (weight, TensorRef("b_down", "bf16", (experts, hidden))) if layer.expert_bias else (weight,)


def inputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (hidden_ref(layer), *weight_refs(layer), *table_refs(layer))


def outputs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    return (y_ref(layer),)


def tile_space(layer: ResolvedLayer, tiles: TileConfig, rows: str, intermediate_size: int) -> TileSpace:
    """Tiles of a down GEMM over `rows`."""
    return TileSpace(
        rows=rows,
        tile_rows=tiles.tile_m,
        tile_columns=tiles.tile_n,
        columns=layer.hidden_size,
        column_tiles=ceil_div(layer.hidden_size, tiles.tile_n),
        k_blocks=ceil_div(intermediate_size, tiles.tile_k),
    )


def steps() -> tuple[Step, ...]:
    """TMA brings A and B; one warp issues it."""
    return (Step("load", "fc2.load_tile"), Step("mma", "epilogue.plain"))


def requests(layer: ResolvedLayer, tiles: TileConfig) -> StageRequest:
    ref = y_ref(layer)
    region = RegionRequest(ref.name, ref.dtype, ref.shape, (tiles.tile_m, tiles.tile_n), "unweighted expert outputs")
    task = TaskRequest(
        name="fc2",
        code=3,
        queue="main",
        priority=1,
        slabs="tiles",
        gathers=False,
        space=tile_space(layer, tiles, "row_blocks", layer.intermediate_size),
        reads=(Access("hidden", "tile", "all"),),
        writes=(Access("y", "tile", "tile"),),
        steps=steps(),
        waiter="load",
        signaller="mma",
        signal_unit="group",
        deferred=True,
    )
    arguments = tuple(Argument(weight.name, weight.dtype, weight.shape) for weight in weight_refs(layer))
    return StageRequest(regions=(region,), tasks=(task,), arguments=arguments)


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y (rows, columns) bf16 = hidden (rows, I) @ weight (columns, I)^T + bias, fp32 sums, one rounding."""
    import torch

    total = hidden.float() @ weight.float().T
    return (total if bias is None else total + bias.float()).to(torch.bfloat16)


def run_tile(view: TileView) -> None:
    layer = view.layer
    hidden = view.read("hidden", view.rows, slice(0, layer.intermediate_size))
    bias = view.argument("b_down")[view.expert, view.columns] if layer.expert_bias else None
    view.write("y", project(hidden, view.argument("w_down")[view.expert, view.columns], bias))


def reference(layer: ResolvedLayer, tensors: Tensors) -> dict[str, torch.Tensor]:
    """y (128 B, H) bf16."""
    import torch

    hidden = tensors["hidden"]
    y = torch.zeros(len(hidden), layer.hidden_size, dtype=torch.bfloat16)
    starts = (tensors["block_start"] * TILE_ROWS).tolist()
    for expert in range(layer.num_local_experts):
        segment = slice(starts[expert], starts[expert + 1])
        bias = tensors["b_down"][expert] if layer.expert_bias else None
        y[segment] = project(hidden[segment], tensors["w_down"][expert], bias)
    return {"y": y}


STAGE = StageDef("fc2", "forward", always, inputs, outputs, requests, reference, run_tile)
