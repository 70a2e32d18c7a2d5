"""Ordering between warps, CTAs and launches: mbarrier arrivals, counters in global memory, bounded waits.

Nothing here knows a stage or a tile. Counters are int32 words of the workspace, zeroed by the schedule kernel.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Constexpr, Int32, Int64, range_constexpr

ERROR_WAIT_EXPIRED = 8  # first word of the wait record in the pinned error words
POLL_NANOSECONDS = 64


@cute.jit
def arrive(barrier: Int32, on: Boolean):
    """Arrive once at the mbarrier at shared address `barrier` where `on` holds.

    Written without a scope on purpose: `.release.cluster` makes the compiler put a full memory barrier into the
    main loop (25 % of the time of a K block, H200). The readers released here were wgmma, already waited for.
    """
    cute.arch.inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier], predicate=on)


@cute.jit
def arrive_many(barrier: Int32, count: Int32):
    """Arrive `count` times at once: one thread stands in for a whole group."""
    cute.arch.inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, count])


@cute.jit
def signal(counter: cute.Pointer, amount: Int32):
    """Add to a global counter so that what this thread has seen completed is visible to who acquires the counter."""
    cute.arch.fence_proxy("async.global")
    cute.arch.red(counter, amount, op="add", dtype="s32", sem="release", scope="gpu")


def slot_of(count, slots: int):
    """Slot of the count-th use of a ring; count >= 0."""
    return count & (slots - 1) if slots & (slots - 1) == 0 else count % slots


def phase_of(count, slots: int):
    """Parity of the mbarrier phase that the count-th use of a ring completes."""
    turns = count >> (slots.bit_length() - 1) if slots & (slots - 1) == 0 else count // slots
    return turns & 1


@cute.jit
def claim_ahead(ticket: cute.Pointer, lane: Int32):
    """Take the next number of a ticket counter; only lane 0 holds it and nothing waits for it until `claimed`."""
    number = Int32(0)
    if lane == 0:
        number = cute.arch.atomic_add(ticket, Int32(1), sem="relaxed", scope="gpu")
    return number


@cute.jit
def claimed(number: Int32):
    """The number `claim_ahead` took, in all lanes of the warp."""
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def claim(ticket: cute.Pointer, lane: Int32):
    """Next number of a ticket counter, the same in all lanes of the calling warp."""
    return claimed(claim_ahead(ticket, lane))


@cute.jit
def make_barriers(smem, count: Constexpr[int], arrivals: Constexpr[int]):
    """`count` mbarriers in shared memory, `arrivals` arrivals a phase; a thread of warp 0 initialises them."""
    barriers = smem.allocate_array(Int64, count)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for i in range_constexpr(count):
                cute.arch.mbarrier_init(barriers + i, arrivals)
    return barriers


@cute.jit
def words(workspace: cute.Tensor, offset: Constexpr[int], count: Constexpr[int]):
    """The int32 region of `count` words at byte `offset` of the workspace."""
    address = workspace.iterator.toint() + offset
    return cute.make_tensor(cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=16), cute.make_layout(count))


class Waits(NamedTuple):
    """What every bounded wait of a launch shares."""

    counters: cute.Tensor  # (COUNTER_WORDS,) int32
    error_index: Constexpr  # word that is 1 once a wait of this launch has expired
    limit_ns: Int64
    error_address: Int64  # pinned host words, int32[16]


@cute.jit
def report_expiry(waits: Waits, role: Int32, kind: Int32, index: Int32, have: Int32, want: Int32):
    """Write the post-mortem into the pinned words; the flag last, so that who sees it sees the rest."""
    cta, _, _ = cute.arch.block_idx()
    base = waits.error_address + Int64(4 * ERROR_WAIT_EXPIRED)
    words = cute.make_tensor(cute.make_ptr(Int32, base, AddressSpace.gmem, assumed_align=4), cute.make_layout(8))
    words[1] = cta
    words[2] = role
    words[3] = kind
    words[4] = index
    words[5] = have
    words[6] = want
    words[7] = Int32(0)
    cute.arch.fence_acq_rel_sys()
    words[0] = Int32(1)


@cute.jit
def wait_at_least(waits: Waits, index: Int32, want: Int32, role: Constexpr[int], kind: Int32, lane: Int32):
    """Wait until counters[index] >= want, at most limit_ns nanoseconds; acquire at gpu scope.

    When the limit passes, or another wait of the launch has expired before, the wait returns all the same: outputs are
    then invalid, the error word is set and the pinned record tells CTA, role, task kind, counter, have and want.
    Call with a whole warp; its lanes poll one word, which is one request.
    """
    counter = waits.counters.iterator + index
    have = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    if have < want:
        begin = cute.arch.globaltimer()
        waiting = Int32(1)
        while waiting == 1:
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(POLL_NANOSECONDS)])
            have = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            broken = cute.arch.load(waits.counters.iterator + waits.error_index, Int32, sem="relaxed", scope="gpu")
            if have >= want or broken != 0:
                waiting = Int32(0)
            elif cute.arch.globaltimer() - begin > waits.limit_ns:
                waiting = Int32(0)
                if lane == 0:
                    error = waits.counters.iterator + waits.error_index
                    if cute.arch.atomic_exch(error, Int32(1), sem="relaxed", scope="gpu") == 0:
                        report_expiry(waits, Int32(role), kind, index, have, want)
