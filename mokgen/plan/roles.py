"""Warp roles of each kernel: warp ranges and register budgets."""

from __future__ import annotations

from mokgen.ir.requests import TileConfig
from mokgen.plan.model import WarpRole

WARP_THREADS = 32
GROUP_WARPS = 4  # setmaxnreg acts on a warpgroup
MMA_ROWS = 64  # rows of A one consumer warpgroup multiplies
LOAD, MMA, SCHEDULER, REDUCE = "load", "mma", "scheduler", "reduce"
CODES = {LOAD: 0, MMA: 1, SCHEDULER: 2, REDUCE: 3}  # as wait records name them
# Registers per thread after setmaxnreg: 128 fp32 accumulators of a (64, 256) tile, their epilogue and addresses; the
# rest of the file goes to the load warpgroup, whose warps also reduce.
MMA_REGISTERS = 224
LOAD_REGISTERS = 56


def forward_roles(tiles: TileConfig) -> tuple[WarpRole, ...]:
    """A load warpgroup of small roles, all of which gather rows, and a consumer warpgroup per 64 rows of the tile."""
    counts = (
        (LOAD, 1, LOAD_REGISTERS),
        (SCHEDULER, 1, LOAD_REGISTERS),
        (REDUCE, 2, LOAD_REGISTERS),
        (MMA, GROUP_WARPS * (tiles.tile_m // MMA_ROWS), MMA_REGISTERS),
    )
    roles, first = [], 0
    for name, warps, registers in counts:
        roles.append(WarpRole(name, CODES[name], first, warps, registers))
        first += warps
    return tuple(roles)


def uniform_role(name: str, warps: int) -> tuple[WarpRole, ...]:
    """A kernel whose warps all do the same, registers left to the compiler."""
    return (WarpRole(name, 0, 0, warps, 0),)


def total_warps(roles: tuple[WarpRole, ...]) -> int:
    return sum(role.num_warps for role in roles)


def units_of(role: WarpRole, unit: str) -> int:
    """How many of `unit` a role has; 0 for a unit nobody knows."""
    counts = {
        "thread": WARP_THREADS * role.num_warps,
        "thread_of_group": WARP_THREADS * min(role.num_warps, GROUP_WARPS),
        "warp": role.num_warps,
        "group": role.num_warps // GROUP_WARPS,
        "one": 1,
    }
    return counts.get(unit, 0)
