"""The CPU implementation of the operators: the plan's executor, fed with the call's tensors.

No GPU is emulated: the executor runs the plan's tasks with torch in ticket order and refuses reads of what is not yet
written. It is for tests and for development on a machine without a GPU, and refuses full-size calls with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mokgen.runtime.errors import ErrorWords

if TYPE_CHECKING:
    from mokgen.execute import LayerPlan

Tensor = torch.Tensor


def record_wrong_ids(ids: Tensor, num_experts: int, words: ErrorWords) -> None:
    """Record the first id outside [-1, num_experts) of ids (T, K), as the schedule kernel does."""
    wrong = ((ids < -1) | (ids >= num_experts)).nonzero()
    if len(wrong):
        token, slot = (int(place) for place in wrong[0])
        words.record_id(token, slot, int(ids[token, slot]))
