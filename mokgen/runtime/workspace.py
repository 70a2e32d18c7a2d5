"""Device memory the kernels of a call share: one growing buffer per (device, stream) for all layers of the process.

Calls on one stream run one after the other, so they may use the same bytes; calls on two streams never do. While a
CUDA graph is captured, or warmed up in a private pool, every call takes fresh memory from that pool instead, because a
graph may be replayed on any stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mokgen.facts.formats import FORMATS


@dataclass(frozen=True)
class RegionView:
    """One region of the workspace: name, number format, shape and byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        elements = 1
        for extent in self.shape:
            elements *= extent
        return elements * FORMATS[self.dtype].bytes


@dataclass(frozen=True)
class Layout:
    """The workspace of one layer as its manifest lists it."""

    num_bytes: int
    regions: tuple[RegionView, ...]

    def view(self, workspace: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed tensors over the regions of `workspace` uint8 (num_bytes,), sharing its memory."""
        views = {}
        for region in self.regions:
            raw = workspace[region.offset : region.offset + region.num_bytes]
            views[region.name] = raw.view(FORMATS[region.dtype].torch_dtype()).view(region.shape)
        return views

    def shape(self, name: str) -> tuple[int, ...] | None:
        return next((region.shape for region in self.regions if region.name == name), None)

    @property
    def tile_m(self) -> int:
        """Rows of a row block."""
        rows, blocks = self.shape("row_token"), self.shape("block_expert")
        assert rows is not None and blocks is not None
        return rows[0] // blocks[0]


class _Buffer:
    """The memory of one (device, stream): views of it by size, which calls get, and whose call got one last."""

    __slots__ = ("base", "tokens", "user", "views")

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        self.views = {base.numel(): base}
        self.user, self.tokens = "", 0

    def view(self, num_bytes: int) -> torch.Tensor:
        view = self.views.get(num_bytes)
        if view is None:
            view = self.views[num_bytes] = self.base[:num_bytes]
        return view


_pool: dict[tuple[int, int], _Buffer] = {}


def take(num_bytes: int, device: int, user: str, tokens: int) -> torch.Tensor:
    """uint8 (num_bytes,) that the current stream of `device`, the current device, may use until its next `take`.

    user, tokens: whose call it is for and of how many tokens, for post-mortems.
    """
    if torch.cuda.is_current_stream_capturing():
        return _fresh(num_bytes, device)
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    buffer = _pool.get(key)
    if buffer is None or buffer.base.numel() < num_bytes:
        # The old buffer goes back to the allocator of the stream it was used on: later calls come after earlier ones.
        _pool.pop(key, None)
        buffer = _Buffer(_fresh(num_bytes, device))
        if _in_default_pool(buffer.base):
            _pool[key] = buffer
    buffer.user, buffer.tokens = user, tokens
    return buffer.view(num_bytes)


def left_by(user: str, num_bytes: int) -> list[tuple[torch.Tensor, int]]:
    """Buffers that nobody has taken since `user` did, each with the number of tokens of the call it was taken for."""
    return [(buffer.view(num_bytes), buffer.tokens) for buffer in _pool.values() if buffer.user == user]


def _fresh(num_bytes: int, device: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", device))


def _in_default_pool(tensor: torch.Tensor) -> bool:
    """False for memory of a private pool, which its owner (a graph about to be captured) takes back as a whole."""
    if torch.cuda.get_allocator_backend() != "native":
        return True
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    return True


def clear() -> None:
    """Give every buffer back to torch's allocator; the next call takes a new one."""
    _pool.clear()


def held_bytes() -> Iterable[tuple[tuple[int, int], int]]:
    """((device index, stream), bytes) of every buffer held."""
    return [(key, buffer.base.numel()) for key, buffer in _pool.items()]
