"""Tile decisions and knobs: what each may be, its default, and the numbers the default was derived from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mokgen.errors import PlanError
from mokgen.facts.arch import ArchTraits
from mokgen.ir.requests import TileConfig
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.model import Choice
from mokgen.stages.base import TILE_ROWS, ceil_div

TILE_N = 256
TILE_K = 64
BF16_BYTES = 2
CHUNK_ROWS, CHUNK_COLUMNS = 64, 64  # an output chunk: what a consumer warpgroup hands to one TMA store
CHUNKS = 4  # two per consumer warpgroup
TASK_WORDS = 8  # int32 words of a task record
LAUNCH_SHARED_BYTES = 1024  # of a small kernel's shared memory, left to the launch
MAX_ROUTE_WARPS = 16
# Hidden rows are read again for every slab, under the MMAs. A sixteenth of their bare copy time is charged against the
# reduction they hide; re-reads that take more than a third of fc2's time would show, so such widths are left out.
REREAD_CHARGE = 1 / 16
REREAD_LIMIT = 1 / 3


@dataclass(frozen=True)
class Knob:
    """A plan number a spec may set. `legal` lists the values for a layer, ascending."""

    meaning: str
    legal: Callable[[ResolvedLayer, ArchTraits], tuple[int, ...]]


def column_tiles(layer: ResolvedLayer) -> int:
    """Column tiles of fc2."""
    return ceil_div(layer.hidden_size, TILE_N)


def stage_bytes() -> int:
    """Operands of one pipeline stage: A (128, 64) and B (256, 64) bf16."""
    return (TILE_ROWS + TILE_N) * TILE_K * BF16_BYTES


def out_chunk_bytes() -> int:
    return CHUNKS * CHUNK_ROWS * CHUNK_COLUMNS * BF16_BYTES


def schedule_shared_bytes(experts: int, warps: int, ctas: int) -> int:
    """Shared memory of a schedule CTA: int32 counts per bin of its warps and of the cluster's CTAs, an mbarrier, sums.

    There is a bin more than experts, for routes that go nowhere. The order is that of the kernel's allocations.
    """
    bins, lanes = 4 * (experts + 1), 4 * 32
    total = 0
    for size, align in (
        (warps * bins, 16),
        (ctas * bins, 16),
        (8, 8),
        (4 * experts, 16),
        (bins, 16),
        (bins, 16),
        (lanes, 16),
        (lanes, 16),
    ):
        total = ceil_div(total, align) * align + size
    return total


def route_shared_bytes(experts: int, warps: int) -> int:
    """Shared memory of a route CTA: a token's fp32 scores per warp."""
    return 4 * warps * experts


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()))


def _stage_counts(layer: ResolvedLayer, arch: ArchTraits) -> tuple[int, ...]:
    room = arch.smem_bytes_per_cta - out_chunk_bytes() - LAUNCH_SHARED_BYTES  # barriers and records need less
    return tuple(range(2, room // stage_bytes() + 1))


def _knob_or(layer: ResolvedLayer, name: str, default: int) -> int:
    value = dict(layer.knobs).get(name, default)
    return value if isinstance(value, int) else default


def _stages(layer: ResolvedLayer, arch: ArchTraits) -> int:
    return _knob_or(layer, "stages", _stage_counts(layer, arch)[-1])


def _gathers(layer: ResolvedLayer, arch: ArchTraits) -> tuple[int, ...]:
    return tuple(range(_stages(layer, arch)))


def _consumer_lags(layer: ResolvedLayer, arch: ArchTraits) -> tuple[int, ...]:
    """A block is handed over `gathers_in_flight` blocks late, into a ring that the late consumer has not given back:
    their sum stays below the stages, else load warps and consumers wait for each other."""
    stages = _stages(layer, arch)
    return tuple(range(stages - _knob_or(layer, "gathers_in_flight", default_gathers(stages))))


def default_gathers(stages: int) -> int:
    return max(0, min(2, stages - 2))


def _schedule_warps(layer: ResolvedLayer, arch: ArchTraits) -> tuple[int, ...]:
    return tuple(warps for warps in _powers(32) if schedule_fits(layer, arch, warps, 1))


def _schedule_ctas(layer: ResolvedLayer, arch: ArchTraits) -> tuple[int, ...]:
    return tuple(ctas for ctas in _powers(arch.max_cluster) if schedule_fits(layer, arch, 1, ctas))


def schedule_fits(layer: ResolvedLayer, arch: ArchTraits, warps: int, ctas: int) -> bool:
    room = arch.smem_bytes_per_cta - LAUNCH_SHARED_BYTES
    return schedule_shared_bytes(layer.num_local_experts, warps, ctas) <= room


def _route_warps(layer: ResolvedLayer, arch: ArchTraits) -> tuple[int, ...]:
    room = arch.smem_bytes_per_cta - LAUNCH_SHARED_BYTES
    return tuple(warps for warps in _powers(MAX_ROUTE_WARPS) if route_shared_bytes(layer.num_experts, warps) <= room)


KNOBS: dict[str, Knob] = {
    "slab_tiles": Knob("fc2 column tiles of one slab", lambda layer, arch: tuple(range(1, column_tiles(layer) + 1))),
    "group_blocks": Knob("row blocks that share their column tiles in turn", lambda layer, arch: _powers(128)),
    "reduce_tokens": Knob("tokens of one reduce item", lambda layer, arch: _powers(128)),
    "stages": Knob("stages of the operand ring", _stage_counts),
    "consumer_lag": Knob("K blocks the second consumer warpgroup runs late", _consumer_lags),
    "gathers_in_flight": Knob("K blocks of gathered rows a load warp leaves under way", _gathers),
    "task_slots": Knob("tasks a CTA claims ahead", lambda layer, arch: (2, 3, 4, 5, 6, 7, 8)),
    "schedule_clusters": Knob("clusters of the schedule kernel", lambda layer, arch: (1, 2, 3, 4, 5, 6, 7, 8)),
    "schedule_ctas": Knob("CTAs of a cluster of the schedule kernel", _schedule_ctas),
    "schedule_warps": Knob("warps of a CTA of the schedule kernel", _schedule_warps),
    "route_warps": Knob("warps of a CTA of the route kernel, a token each", _route_warps),
}


class KnobReader:
    """Takes knob values from the layer, or a default with its reason, and remembers each as a Choice."""

    def __init__(self, layer: ResolvedLayer, arch: ArchTraits) -> None:
        self.layer, self.arch = layer, arch
        self.given = dict(layer.knobs)
        self.choices: list[Choice] = []
        unknown = sorted(set(self.given) - set(KNOBS))
        if unknown:
            raise PlanError(
                "no knob has this name", where=f"plan.{unknown[0]}", hint="knobs: " + ", ".join(sorted(KNOBS))
            )

    def take(self, name: str, default: int, reason: str) -> int:
        legal = KNOBS[name].legal(self.layer, self.arch)
        if not legal:
            raise PlanError(f"no value fits {self.arch.name}", where=f"plan.{name}", hint=KNOBS[name].meaning)
        value = self.given.get(name, default)
        if value not in legal or isinstance(value, str):
            listed = ", ".join(str(entry) for entry in legal)
            raise PlanError(f"{value!r} is not possible", where=f"plan.{name}", hint=f"legal values: {listed}")
        self.choices.append(Choice(name, value, "spec" if name in self.given else "derived", reason))
        return value


@dataclass(frozen=True)
class SlabTimes:
    """Estimated seconds at full load (max_tokens, no padding) for one slab width."""

    slab_tiles: int
    num_slabs: int
    fc2: float  # fc2's FLOPs at the dense rate
    reread: float  # hidden rows read once per slab, at the copy rate
    slack: float  # what fc2's own traffic (weights, hidden, y) leaves of the copy rate under its MMAs
    reduction: float  # the reduction's traffic at the copy rate
    last_share: float  # of the widest slab in the columns

    @property
    def exposed(self) -> float:
        """Reduction time no GEMM covers: one slab's share, or what does not fit into the slack."""
        return max(self.last_share * self.reduction, self.reduction - self.slack)

    @property
    def cost(self) -> float:
        return self.exposed + REREAD_CHARGE * self.reread

    @property
    def allowed(self) -> bool:
        return self.num_slabs == 1 or self.reread <= REREAD_LIMIT * self.fc2


def slab_times(layer: ResolvedLayer, arch: ArchTraits, slab_tiles: int) -> SlabTimes:
    device, tiles = arch.device, column_tiles(layer)
    rows, slabs = layer.max_tokens * layer.top_k, ceil_div(tiles, slab_tiles)
    shared_rows = layer.max_tokens if layer.shared.num > 0 else 0
    # Multiply-adds and stored hidden elements per unit of H: routed and shared rows times their widths.
    hidden = rows * layer.intermediate_size + shared_rows * layer.shared.intermediate_size
    weights = layer.num_local_experts * layer.intermediate_size + layer.shared.intermediate_size
    y = (rows + shared_rows) * layer.hidden_size
    copy = device.copy_bytes_per_second / BF16_BYTES  # elements per second
    fc2 = 2 * hidden * layer.hidden_size / device.matmul_flops_per_second
    traffic = (y + slabs * hidden + weights * layer.hidden_size) / copy
    return SlabTimes(
        slab_tiles=slab_tiles,
        num_slabs=slabs,
        fc2=fc2,
        reread=slabs * hidden / copy,
        slack=max(0.0, fc2 - traffic),
        reduction=(y + layer.max_tokens * layer.hidden_size) / copy,
        last_share=min(1.0, slab_tiles / tiles),
    )


def best_slab(layer: ResolvedLayer, arch: ArchTraits) -> SlabTimes:
    """Least exposed + REREAD_CHARGE * reread among the allowed widths.

    Widths that give the same number of slabs differ only in the last slab: the narrowest stands for them.
    """
    found: dict[int, SlabTimes] = {}
    for width in range(column_tiles(layer), 0, -1):
        times = slab_times(layer, arch, width)
        if times.allowed:
            found[times.num_slabs] = times
    return min(found.values(), key=lambda times: (times.cost, times.num_slabs))


def choose_tiles(knobs: KnobReader) -> TileConfig:
    """Tiles of the forward megakernel."""
    layer, arch = knobs.layer, knobs.arch
    best = best_slab(layer, arch)
    slab_tiles = knobs.take(
        "slab_tiles",
        best.slab_tiles,
        f"least exposed reduction plus charged re-reads: {best.exposed * 1e6:.1f} us of {best.reduction * 1e6:.1f} us "
        f"exposed, {best.reread * 1e6:.1f} us of hidden re-reads under {best.fc2 * 1e6:.1f} us of fc2",
    )
    deepest = _stage_counts(layer, arch)[-1]
    stages = knobs.take("stages", deepest, f"{stage_bytes()} bytes each, as many as shared memory holds")
    gathers = knobs.take("gathers_in_flight", default_gathers(stages), "hides the latency of a row read")
    return TileConfig(
        tile_m=TILE_ROWS,
        tile_n=TILE_N,
        tile_k=TILE_K,
        stages=stages,
        slab_tiles=slab_tiles,
        num_slabs=ceil_div(column_tiles(layer), slab_tiles),
        group_blocks=knobs.take("group_blocks", 8, "rows of a group stay in L2 while its column tiles pass"),
        reduce_tokens=knobs.take("reduce_tokens", 16, "a warp's work for a few microseconds"),
        consumer_lag=knobs.take(
            "consumer_lag", min(1, stages - gathers - 1), "an epilogue runs under the other warpgroup's MMAs"
        ),
        gathers_in_flight=gathers,
        task_slots=knobs.take("task_slots", 3, "hides claim and decode; a record is 32 bytes"),
    )
