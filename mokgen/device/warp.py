"""What the 32 lanes of one warp compute together: groups of equal values, reductions, scans.

Every function that combines lanes must be reached by all 32 of a warp.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

WARP_LANES = 32
FULL_MASK = 0xFFFFFFFF
LAST_INDEX = 0x7FFFFFFF  # larger than any index that `first_of_largest` compares


@cute.jit
def rank_among_equals(value: Int32):
    """How many lower lanes hold the same value, and how many lanes do in all."""
    equals = Int32(cute.arch.match_sync(FULL_MASK, value))
    below = Int32(cute.arch.lanemask_lt())
    return cute.arch.popc(equals & below), cute.arch.popc(equals)


@cute.jit
def sum_int(value: Int32):
    """Sum over the lanes."""
    return cute.arch.warp_redux_sync(value, "add")


@cute.jit
def max_int(value: Int32):
    """Largest value of the lanes, as signed numbers."""
    return cute.arch.warp_redux_sync(value, "max")


@cute.jit
def min_int(value: Int32):
    """Smallest value of the lanes, as signed numbers."""
    return cute.arch.warp_redux_sync(value, "min")


@cute.jit
def first_of_largest(value: Int32, index: Int32):
    """Lowest index among the lanes that hold the largest value."""
    largest = max_int(value)
    return min_int(index if value == largest else Int32(LAST_INDEX))


@cute.jit
def ballot(on):
    """Bit l is set where lane l's `on` holds."""
    return Int32(cute.arch.vote_ballot_sync(on))


@cute.jit
def is_first_of(mask: Int32):
    """True in one lane only: the lowest whose bit is set in `mask`; the caller's own bit must be set."""
    return (mask & Int32(cute.arch.lanemask_lt())) == 0


@cute.jit
def inclusive_scan(value: Int32, lane: Int32):
    """Sum over this lane and all lower ones."""
    total = value
    for step in range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
        total = total + (below if lane >= (1 << step) else Int32(0))
    return total


@cute.jit
def sum_float(value: Float32):
    """Sum over the lanes by exchange with lane ^ 16, 8, 4, 2, 1: the order of torch's softmax, for equal bits."""
    total = value
    for step in range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, 16 >> step)
    return total


@cute.jit
def max_float(value: Float32):
    """Largest value of the lanes; NaN loses against any number."""
    largest = value
    for step in range_constexpr(5):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 16 >> step))
    return largest


def registers_for(width: int) -> int:
    """Registers per lane that hold `width` values, value i in lane i % 32."""
    return (width + WARP_LANES - 1) // WARP_LANES
