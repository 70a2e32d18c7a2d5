"""What a stage is, what its task function sees, and tensors several stages name.

Shape suffixes here and in the stage files: T tokens, K top-k slots, E experts, H hidden, I intermediate, P pool rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mokgen.ir.requests import StageRequest, TileConfig
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer

if TYPE_CHECKING:
    import torch

TILE_ROWS = 128  # row block of the pool and of the shared expert's tokens: what the schedule kernel pads to


class TileView(Protocol):
    """One task as its torch function sees it: own rows and columns, and reads that are refused before the write."""

    @property
    def layer(self) -> ResolvedLayer: ...

    @property
    def tokens(self) -> int: ...

    @property
    def expert(self) -> int:
        """Expert of the row block; 0 where the task has none."""
        ...

    @property
    def rows(self) -> slice: ...

    @property
    def columns(self) -> slice: ...

    def argument(self, name: str) -> torch.Tensor:
        """A tensor the caller of the op gave."""
        ...

    def read(self, name: str, rows: slice | torch.Tensor, columns: slice | None = None) -> torch.Tensor:
        """Cells of a workspace region; an error where one of them is not yet written."""
        ...

    def write(self, name: str, value: torch.Tensor) -> None:
        """Store `value` at the task's own rows and columns of a region or of the output."""
        ...


Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class StageDef:
    """One stage kind. `run_tile` is the torch form of one task; `reference` computes the stage's outputs whole."""

    name: str
    kernel: str  # launch the stage is part of
    applies: Callable[[ResolvedLayer], bool]
    inputs: Callable[[ResolvedLayer], tuple[TensorRef, ...]]
    outputs: Callable[[ResolvedLayer], tuple[TensorRef, ...]]
    requests: Callable[[ResolvedLayer, TileConfig], StageRequest]
    reference: Callable[[ResolvedLayer, Tensors], dict[str, torch.Tensor]]
    run_tile: Callable[[TileView], None] | None = None


def always(layer: ResolvedLayer) -> bool:
    return True


def has_shared(layer: ResolvedLayer) -> bool:
    return layer.shared.num > 0


def x_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("x", "bf16", ("T", layer.hidden_size))


def ids_ref(layer: ResolvedLayer) -> TensorRef:
    """Expert of each slot; the op takes int64 too."""
    return TensorRef("ids", "int32", ("T", layer.top_k))


def weights_ref(layer: ResolvedLayer) -> TensorRef:
    dtype = layer.router.weight_dtype if layer.router.input == "ids" else "fp32"
    return TensorRef("topk_weights", dtype, ("T", layer.top_k))


def table_refs(layer: ResolvedLayer) -> tuple[TensorRef, ...]:
    """Row blocks of the pool, read by whoever turns a ticket into a tile."""
    return (
        TensorRef("block_start", "int32", (layer.num_local_experts + 1,)),
        TensorRef("block_expert", "int32", ("B_MAX",)),
        TensorRef("block_rows", "int32", ("B_MAX",)),
    )


def row_token_ref() -> TensorRef:
    return TensorRef("row_token", "int32", ("P_MAX",))


def slot_row_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("slot_row", "int32", (layer.max_tokens * layer.top_k,))


def hidden_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("hidden", "bf16", ("P_MAX", layer.intermediate_size))


def y_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("y", "bf16", ("P_MAX", layer.hidden_size))


def shared_hidden_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("shared_hidden", "bf16", ("SHARED_ROWS_MAX", layer.shared.intermediate_size))


def shared_y_ref(layer: ResolvedLayer) -> TensorRef:
    return TensorRef("shared_y", "bf16", ("SHARED_ROWS_MAX", layer.hidden_size))


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)
