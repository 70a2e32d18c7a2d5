"""What the counters of a failed call say about its cause.

A wait that expires first need not be the one that matters: reduce warps wait from the start of a launch for what a
stuck tile never stores. But after the first expiry no wait holds anybody up, so every task that can run still runs and
signals. What is short once the launch has ended was never signalled, and is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mokgen.errors import MokgenError
from mokgen.runtime import workspace
from mokgen.runtime.workspace import Layout

if TYPE_CHECKING:
    from mokgen.execute import LayerPlan

SHOWN = 3  # counters a message names


def cause(read_plan: Callable[[], LayerPlan], layout: Layout, user: str) -> str:
    """What the last call of layer `user` left short, in words; empty if that cannot be known.

    It waits for the device. Not known: the workspace was taken by another call since, or belongs to a CUDA graph; the
    plan is of a form that this mokgen cannot read.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return ""
    try:
        plan = read_plan()
        for memory, tokens in workspace.left_by(user, layout.num_bytes):
            torch.cuda.synchronize(memory.device)
            views = layout.view(memory)
            words: list[int] = views["counters"].tolist()
            if words[plan.counter("error").word] == 1:
                return verdict(plan, words, int(views["block_start"][-1]), tokens)
    except (MokgenError, OSError, RuntimeError):  # the last: a lost context, or torch.cuda.set_sync_debug_mode
        return ""
    return ""


def verdict(plan: LayerPlan, words: Sequence[int], row_blocks: int, tokens: int) -> str:
    """The counters that are short after a call of `tokens` tokens and `row_blocks` row blocks, in plan order."""
    short = [f"{name} = {have} of {want}" for name, have, want in short_counters(plan, words, row_blocks, tokens)]
    if not short:
        return "every counter was complete in the end: the wait was slow, not stuck"
    more = f" and {len(short) - SHOWN} more" if len(short) > SHOWN else ""
    return f"short in the end: {', '.join(short[:SHOWN])}{more}"


def short_counters(
    plan: LayerPlan, words: Sequence[int], row_blocks: int, tokens: int
) -> Iterator[tuple[str, int, int]]:
    """(name, have, want) of each counter below what its waiters need; `words` is the counters region."""
    forward = plan.kernel("forward")
    waits = {wait.counter: (kind, wait) for kind in forward.kinds for wait in kind.waits}
    blocks = _blocks(plan, row_blocks, tokens)
    for counter in plan.counters:
        if counter.name not in waits:
            continue
        kind, wait = waits[counter.name]
        used = blocks[kind.space.rows] if wait.index == "row" else counter.length
        for index in range(used):
            have, want = words[counter.word + index], wait.want({**blocks, "slab_width": _slab_width(plan, index)})
            if have < want:
                yield (f"{counter.name}[{index}]" if counter.length > 1 else counter.name), have, want


def _blocks(plan: LayerPlan, row_blocks: int, tokens: int) -> Mapping[str, int]:
    """Row blocks of a call by the name of their space."""
    spaces = {kind.space.rows: kind.space.tile_rows for kind in plan.kernel("forward").kinds}
    counted = {name: -(-tokens // rows) for name, rows in spaces.items()}
    return {"shared_blocks": 0, **counted, "row_blocks": row_blocks}


def _slab_width(plan: LayerPlan, slab: int) -> int:
    """Column tiles of a slab; the last may be narrower."""
    forward = plan.kernel("forward")
    assert forward.tiles is not None
    columns = max((kind.space.column_tiles for kind in forward.kinds if kind.slabs == "tiles"), default=0)
    return min(forward.tiles.slab_tiles, columns - slab * forward.tiles.slab_tiles)
