"""Number formats of tensors: width and the name torch gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROW_ALIGN_BYTES = 16  # rows of every matrix start on multiples of this: TMA strides and 16-byte gathers need it


@dataclass(frozen=True)
class NumberFormat:
    name: str
    bits: int
    torch_name: str

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def row_multiple(self) -> int:
        """Elements a row length must be a multiple of."""
        return ROW_ALIGN_BYTES // self.bytes

    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


FORMATS: dict[str, NumberFormat] = {
    row.name: row
    for row in (
        NumberFormat("bf16", 16, "bfloat16"),
        NumberFormat("fp32", 32, "float32"),
        NumberFormat("fp64", 64, "float64"),
        NumberFormat("uint8", 8, "uint8"),
        NumberFormat("int32", 32, "int32"),
        NumberFormat("int64", 64, "int64"),
    )
}

# `precision.kind` values: those with kernels, and those legal in a spec without kernels so far.
PRECISIONS = ("bf16",)
PLANNED_PRECISIONS = ("fp8_block", "mxfp8")
