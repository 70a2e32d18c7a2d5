"""How far a result is from the truth, whether that is within budget, and which buffer is the first bad one.

Values are judged by relative L2 over the tensor and by the worst row, as a factor of what a torch pipeline that rounds
at the same places loses; tables are exact. Nothing here passes on a share of elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mokgen.facts.tolerance import Budget

Tensor = torch.Tensor

ROWS = 8192  # rows in fp64 at a time

# Two bf16 results that round nearly the same fp32 value differ in few elements by one step of 2^-8; half a step in the
# mean square is more than sums of another order ever gave and far less than one wrong row.
SAME_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Errors:
    """Error against the truth. A non-finite value where the truth is finite counts as infinite."""

    relative_l2: float
    worst_row: float
    row: int  # where the worst row is; -1 for an empty tensor


def errors(value: Tensor, truth: Tensor) -> Errors:
    """Relative L2 of `value` (rows, n) against `truth` (rows, n), over all and of the worst row.

    A row whose truth is exactly zero must be exactly zero.
    """
    if value.shape != truth.shape:
        raise ValueError(f"shape {tuple(value.shape)} against {tuple(truth.shape)}")
    if value.numel() == 0:
        return Errors(0.0, 0.0, -1)
    starts = range(0, len(value), ROWS)
    pieces = [_squares(value[start : start + ROWS], truth[start : start + ROWS]) for start in starts]
    wrong, size = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    rows = torch.where(wrong == 0, torch.zeros_like(wrong), (wrong / size).sqrt())
    total = float(wrong.sum())
    relative = 0.0 if total == 0 else math.sqrt(total / float(size.sum())) if float(size.sum()) else math.inf
    worst = int(rows.argmax())
    return Errors(relative, float(rows[worst]), worst)


def _squares(value: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance and squared size of every row, fp64."""
    exact = truth.double()
    difference = (value.double() - exact).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    return difference.square().sum(dim=1), exact.square().sum(dim=1)


@dataclass(frozen=True)
class Verdict:
    """Kernel and baseline errors side by side with the budget."""

    kernel: Errors
    baseline: Errors
    budget: Budget

    @property
    def ok(self) -> bool:
        return (
            self.kernel.relative_l2 <= self.budget.relative_l2 * self.baseline.relative_l2
            and self.kernel.worst_row <= self.budget.worst_row * self.baseline.worst_row
        )

    def __str__(self) -> str:
        return (
            f"relative L2 {self.kernel.relative_l2:.3e}, baseline {self.baseline.relative_l2:.3e} "
            f"(limit {self.budget.relative_l2:g}x); worst row {self.kernel.worst_row:.3e} (row {self.kernel.row}), "
            f"baseline {self.baseline.worst_row:.3e} (limit {self.budget.worst_row:g}x)"
        )


def judge(value: Tensor, baseline: Tensor, truth: Tensor, budget: Budget) -> Verdict:
    """Compare a kernel's output and the baseline with the fp64 truth."""
    return Verdict(errors(value, truth), errors(baseline, truth), budget)


@dataclass(frozen=True)
class BufferCheck:
    """One intermediate buffer: integer tables must be equal, rounded values agree within SAME_ROUNDING."""

    name: str
    got: Tensor
    want: Tensor

    def fault(self) -> str | None:
        """What differs, or None."""
        if self.got.shape != self.want.shape:
            return f"shape {tuple(self.got.shape)}, expected {tuple(self.want.shape)}"
        got, want = self.got, self.want.to(self.got.device)
        if not got.is_floating_point():
            wrong = (got != want).nonzero()
            if len(wrong) == 0:
                return None
            place = tuple(wrong[0].tolist())
            first = f"first at {place}: {int(got[place])}, expected {int(want[place])}"
            return f"{len(wrong)} of {got.numel()} differ, {first}"
        found = errors(got, want)
        if found.relative_l2 <= SAME_ROUNDING and found.worst_row <= 4 * SAME_ROUNDING:
            return None
        return f"relative L2 {found.relative_l2:.3e}, worst row {found.worst_row:.3e} at row {found.row}"


def first_bad_buffer(checks: Iterable[BufferCheck]) -> str | None:
    """Name and fault of the first buffer, in the order in which the stages write them, that is wrong."""
    for check in checks:
        fault = check.fault()
        if fault is not None:
            return f"{check.name}: {fault}"
    return None
