"""Error words: what kernels write into pinned host memory when something is wrong, and how that reads to a person.

Two records share int32[16]. Words 0-4: a routing id outside [-1, E). Words 8-15: a bounded wait that expired. The first
word of a record is its flag and is written last; a record is read only when its flag is set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mokgen.errors import DeviceWaitError, RoutingError

WORDS = 16
ID_FLAG, ID_TOKEN, ID_SLOT, ID_LOW, ID_HIGH = 0, 1, 2, 3, 4
WAIT_FLAG, WAIT_CTA, WAIT_ROLE, WAIT_TASK, WAIT_COUNTER, WAIT_HAVE, WAIT_WANT, WAIT_RANK = 8, 9, 10, 11, 12, 13, 14, 15


@dataclass(frozen=True)
class Names:
    """What the numbers of a wait record mean, as the plan has it."""

    roles: Mapping[int, str]
    kinds: Mapping[int, str]
    counters: tuple[tuple[str, int, int], ...]  # name, first word, length

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> Names:
        """From the plain data of plan.json."""
        forward = next(kernel for kernel in plan["kernels"] if kernel["name"] == "forward")
        return cls(
            {row["code"]: row["name"] for row in forward["roles"]},
            {row["code"]: row["name"] for row in forward["kinds"]},
            tuple((row["name"], row["word"], row["length"]) for row in plan["counters"]),
        )

    def counter(self, word: int) -> str:
        for name, first, length in self.counters:
            if first <= word < first + length:
                return name if length == 1 else f"{name}[{word - first}]"
        return f"counters[{word}]"


class ErrorWords:
    """int32[16] that a device writes and the host reads without any CUDA call.

    The memory is never given back: a captured CUDA graph keeps the address and may be replayed after the layer is gone.
    """

    _kept: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self) -> None:
        memory = torch.zeros(WORDS, dtype=torch.int32)
        if torch.cuda.is_available():
            memory = memory.pin_memory()
        self._kept.append(memory)
        self.address = memory.data_ptr()
        # Plain integers by index: half the cost of a torch element read, and that is paid on every call.
        self.words = (ctypes.c_int32 * WORDS).from_address(self.address)

    def clear(self) -> None:
        for index in range(WORDS):
            self.words[index] = 0

    def record_id(self, token: int, slot: int, value: int) -> None:
        """Write the ids record as the schedule kernel does; used where the schedule runs on the host."""
        self.words[ID_TOKEN], self.words[ID_SLOT] = token, slot
        self.words[ID_LOW], self.words[ID_HIGH] = _signed(value & 0xFFFFFFFF), _signed((value >> 32) & 0xFFFFFFFF)
        self.words[ID_FLAG] = 1

    def take(self) -> tuple[int, ...]:
        """All words; the records are cleared, so that the next call starts clean."""
        words = tuple(self.words)
        self.clear()
        return words


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def id_error(words: tuple[int, ...], num_experts: int, when: str) -> RoutingError:
    value = (words[ID_HIGH] << 32) | (words[ID_LOW] & 0xFFFFFFFF)
    return RoutingError(
        f"token {words[ID_TOKEN]}, slot {words[ID_SLOT]}: expert id {value} is outside [-1, {num_experts})",
        where=f"ids of {when}",
        hint="such a slot counts as no route; -1 says that on purpose",
    )


def wait_error(words: tuple[int, ...], names: Names, when: str, cause: str = "") -> DeviceWaitError:
    """cause: what is known of it beyond the record, which holds the wait that expired first."""
    role, kind = words[WAIT_ROLE], words[WAIT_TASK]
    return DeviceWaitError(
        f"a wait inside the forward kernel expired: rank {words[WAIT_RANK]}, CTA {words[WAIT_CTA]}, "
        f"{names.roles.get(role, f'role {role}')} warps, task {names.kinds.get(kind, f'kind {kind}')}, "
        f"counter {names.counter(words[WAIT_COUNTER])} = {words[WAIT_HAVE]}, needed {words[WAIT_WANT]}"
        + (f"; {cause}" if cause else ""),
        where=f"outputs of {when} are invalid",
        hint="the next call starts clean; if the GPU was paused or shared, raise layer.wait_limit_ns",
    )
