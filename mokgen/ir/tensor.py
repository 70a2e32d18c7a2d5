"""A named tensor between stages: element type and shape, no storage."""

from __future__ import annotations

from dataclasses import dataclass

Extent = int | str  # a number, or the name of a size known only at run time ("T") or in the plan ("P_MAX")


@dataclass(frozen=True)
class TensorRef:
    """One tensor of the graph. Edges carry it; regions and kernel arguments give it a place."""

    name: str
    dtype: str  # key of facts.formats.FORMATS
    shape: tuple[Extent, ...]

    def text(self) -> str:
        extents = ", ".join(str(extent) for extent in self.shape)
        return f"{self.name} {self.dtype} ({extents})"
