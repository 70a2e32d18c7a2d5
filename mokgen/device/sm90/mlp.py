"""Tensor maps of one MLP (gate|up, activation, down) as the tiles of `mma` see it on Hopper."""

from typing import NamedTuple

import cutlass.cute as cute

from mokgen.device.sm90 import copy, epilogue, mma

HALF_BOX = (mma.TILE_N // 2, mma.TILE_K)
A_BOX = (mma.TILE_M, mma.TILE_K)
B_BOX = (mma.TILE_N, mma.TILE_K)


class Maps(NamedTuple):
    """Comments give the modes of the tensor; E is 1 for the shared expert."""

    gate_up: copy.Tma  # (I, H, gate or up, E)
    down: copy.Tma  # (H, I, E)
    hidden_store: copy.Tma  # (rows, I)
    hidden_load: copy.Tma  # (rows, I)
    y_store: copy.Tma  # (rows, H)


def gate_up_view(weights: cute.Tensor, sizes: tuple[int, int, int], row_stride: int, half_stride: int) -> cute.Tensor:
    """(I, H, gate or up, E) over a gate|up weight; sizes = (I, H, E), strides in elements.

    With the half as a mode of its own no box crosses from gate into up, whatever I.
    """
    inter, hidden, experts = sizes
    return copy.view(weights.iterator, (inter, hidden, 2, experts), (row_stride, 1, half_stride, 2 * inter * hidden))


def down_view(weights: cute.Tensor, sizes: tuple[int, int, int]) -> cute.Tensor:
    """(H, I, E) over a down weight; sizes = (I, H, E)."""
    inter, hidden, experts = sizes
    return copy.view(weights.iterator, (hidden, inter, experts), (inter, 1, hidden * inter))


def halves(smem_b: cute.Tensor) -> cute.Tensor:
    """The bytes of B (256, 64, stages) as (128, 64, 2 * stages): gate of stage s at 2s, up at 2s + 1."""
    stages = cute.size(smem_b, mode=[2])
    return cute.make_tensor(smem_b.iterator, mma.layout_b(HALF_BOX[0], 2 * stages).outer)


def make_maps(gate_up: cute.Tensor, down: cute.Tensor, hidden: cute.Tensor, y: cute.Tensor, stages: int) -> Maps:
    """Maps over the weights and the two workspace matrices; modes as in `Maps`."""
    layout_out = mma.layout_out(2 * epilogue.CHUNKS)
    return Maps(
        gate_up=copy.load_map(gate_up, mma.layout_b(HALF_BOX[0], 2 * stages), HALF_BOX),
        down=copy.load_map(down, mma.layout_b(B_BOX[0], stages), B_BOX),
        hidden_store=copy.store_map(hidden, layout_out, epilogue.CHUNK_SHAPE),
        hidden_load=copy.load_map(hidden, mma.layout_a(stages), A_BOX),
        y_store=copy.store_map(y, layout_out, epilogue.CHUNK_SHAPE),
    )
