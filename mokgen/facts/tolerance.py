"""How much error a kernel may add to what its number format costs anyway.

The measure is relative: `kernel error <= factor * error of a torch pipeline that rounds where the kernel rounds`, both
against the fp64 oracle. There is no absolute floor: where the pipeline is exact the kernel must be exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Factors on the baseline's error: relative L2 over the whole tensor, and of the worst row."""

    relative_l2: float
    worst_row: float


BUDGETS: dict[str, Budget] = {"bf16": Budget(relative_l2=1.25, worst_row=2.0)}

ROUTER_WEIGHT_ABS = 1e-6  # router weights are fp32 throughout; ids are exact
