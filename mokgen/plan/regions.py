"""Workspace and shared memory: sizes and offsets, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from mokgen.errors import PlanError, ResourceError
from mokgen.facts.arch import ArchTraits
from mokgen.facts.formats import FORMATS
from mokgen.ir.graph import OUTPUT, StageGraph
from mokgen.ir.requests import RegionRequest, TileConfig
from mokgen.ir.tensor import Extent
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.model import Counter, Region, SharedRegion
from mokgen.plan.tiles import BF16_BYTES, CHUNKS, TASK_WORDS, out_chunk_bytes
from mokgen.stages.base import TILE_ROWS, ceil_div

REGION_ALIGN = 1024  # TMA tensors want 128 bytes; 1024 keeps rows of the swizzle pattern whole
MAX_ROW_INDEX = 2**31 - 1  # pool rows are int32 in the tables
OPERAND_ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes
COUNTERS = "counters"


def extents(layer: ResolvedLayer) -> dict[str, int]:
    """Named sizes of the workspace.

    A segment wastes at most 127 rows and only experts with a row have a segment, hence B_MAX.
    """
    routes = layer.max_tokens * layer.top_k
    blocks = (routes + (TILE_ROWS - 1) * min(layer.num_local_experts, routes)) // TILE_ROWS
    shared_blocks = ceil_div(layer.max_tokens, TILE_ROWS)
    if TILE_ROWS * blocks > MAX_ROW_INDEX or routes > MAX_ROW_INDEX:
        raise PlanError(
            f"{routes} routes do not fit 32-bit row numbers",
            where="topology.max_tokens_per_rank",
            hint=f"at most {MAX_ROW_INDEX // layer.top_k // 2} tokens with top_k {layer.top_k}",
        )
    return {
        "B_MAX": blocks,
        "P_MAX": TILE_ROWS * blocks,
        "SB_MAX": shared_blocks,
        "SHARED_ROWS_MAX": TILE_ROWS * shared_blocks,
    }


def resolve_shape(shape: tuple[Extent, ...], sizes: Mapping[str, int], name: str) -> tuple[int, ...]:
    for extent in shape:
        if isinstance(extent, str) and extent not in sizes:
            raise PlanError(f"{name}: no size is called {extent}", hint="sizes: " + ", ".join(sorted(sizes)))
    return tuple(extent if isinstance(extent, int) else sizes[extent] for extent in shape)


def lay_out(
    requests: tuple[RegionRequest, ...], counters: tuple[Counter, ...], graph: StageGraph, sizes: Mapping[str, int]
) -> tuple[tuple[Region, ...], int]:
    """Regions one after the other, the counters first; and the bytes of the whole workspace."""
    words = max(counter.word + counter.length for counter in counters)
    request = RegionRequest(COUNTERS, "int32", (words,), (1,), "tickets, error flag and readiness counters")
    tasks = tuple(stage for stage in graph.stages() if graph.kernel_of(stage) == "forward")
    regions, offset = [], 0
    for entry in (request, *requests):
        shape = resolve_shape(entry.shape, sizes, entry.name)
        size = prod(shape) * FORMATS[entry.dtype].bytes
        if entry.name == COUNTERS:
            writer, readers = "schedule", tasks
        else:
            writer = graph.producer_of(entry.name)
            readers = tuple(stage for stage in graph.consumers_of(entry.name) if stage != OUTPUT)
        regions.append(Region(entry.name, entry.dtype, shape, offset, size, entry.cell, writer, readers, entry.meaning))
        offset = align_up(offset + size, REGION_ALIGN)
    return tuple(regions), offset


def align_up(value: int, to: int) -> int:
    return ceil_div(value, to) * to


def shared_memory(tiles: TileConfig, barriers: int, arch: ArchTraits) -> tuple[tuple[SharedRegion, ...], int]:
    """Shared memory of a CTA of the forward kernel, and its total; ResourceError where that does not fit."""
    a_row, b_row = tiles.tile_k * BF16_BYTES, tiles.tile_k * BF16_BYTES
    wanted = (
        ("operand_a", tiles.stages * tiles.tile_m * a_row, OPERAND_ALIGN, f"A ({tiles.tile_m}, {tiles.tile_k}) bf16"),
        ("operand_b", tiles.stages * tiles.tile_n * b_row, OPERAND_ALIGN, f"B ({tiles.tile_n}, {tiles.tile_k}) bf16"),
        ("out_chunks", out_chunk_bytes(), OPERAND_ALIGN, f"{CHUNKS} chunks (64, 64) bf16, two per consumer warpgroup"),
        ("barriers", 8 * barriers, 8, "full and empty mbarriers of the rings"),
        ("task_records", 4 * TASK_WORDS * tiles.task_slots, 16, f"{TASK_WORDS} int32 words per slot"),
    )
    found, offset = [], 0
    for name, size, align, meaning in wanted:
        offset = align_up(offset, align)
        found.append(SharedRegion(name, offset, size, align, meaning))
        offset += size
    if offset > arch.smem_bytes_per_cta:
        table = "; ".join(f"{entry.name} {entry.bytes}" for entry in found)
        raise ResourceError(
            f"shared memory {offset} bytes of {arch.smem_bytes_per_cta}: {table}",
            where="forward",
            hint="fewer plan.stages or plan.task_slots",
        )
    return tuple(found), offset
