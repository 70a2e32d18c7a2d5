"""The kernels of one artifact as three Python calls; nothing is checked here.

The manifest names every kernel's arguments in call order. They are matched with ours once, at load, so that a launch
builds one tuple and calls one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import itemgetter

import torch

from mokgen.errors import ArtifactMismatchError

Tensor = torch.Tensor
Kernel = Callable[..., None]
Pick = Callable[[tuple[object, ...]], tuple[object, ...]]

ROUTE_ARGUMENTS = ("logits", "selection_bias", "logit_bias", "ids", "weights")
SCHEDULE_ARGUMENTS = ("ids", "id_words", "workspace", "error_address")
FORWARD_ARGUMENTS = (
    "x",
    "topk_weights",
    "w_gate_up",
    "w_down",
    "b_gate_up",
    "b_down",
    "w_shared_gate_up",
    "w_shared_down",
    "shared_gate_logits",
    "out",
    "workspace",
    "ctas",
    "wait_limit_ns",
    "error_address",
)
SAME = {"topk_weights": "weights"}  # names the route kernel may give its output


@cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def id_words_of(ids: Tensor) -> tuple[Tensor, int]:
    """int32 view of ids and how many words one id takes; int64 ids are read as two words each, never narrowed."""
    return (ids.view(torch.int32), 2) if ids.dtype == torch.int64 else (ids, 1)


class Launcher:
    """Launches on torch's current stream; tensors must already be what the kernels expect."""

    def __init__(self, functions: Mapping[str, Kernel], arguments: Mapping[str, tuple[str, ...]]) -> None:
        self._has_route = "route" in functions
        if self._has_route:
            self._route = functions["route"]
            self._route_pick = _picker("route", arguments["route"], ROUTE_ARGUMENTS)
        self._schedule = functions["schedule"]
        self._schedule_pick = _picker("schedule", arguments["schedule"], SCHEDULE_ARGUMENTS)
        self._forward = functions["forward"]
        self._forward_pick = _picker("forward", arguments["forward"], FORWARD_ARGUMENTS)

    def route(
        self, logits: Tensor, selection_bias: Tensor | None, logit_bias: Tensor | None, ids: Tensor, weights: Tensor
    ) -> None:
        """Fill ids (T, K) int32 and weights (T, K) fp32."""
        self._route(*self._route_pick((logits, selection_bias, logit_bias, ids, weights)))

    def schedule(self, ids: Tensor, workspace: Tensor, error_address: int) -> None:
        """Write counters and tables of `workspace` for ids (T, K) int32 or int64."""
        words, id_words = id_words_of(ids)
        self._schedule(*self._schedule_pick((words, id_words, workspace, error_address)))

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        parameters: tuple[Tensor | None, ...],
        shared_gate_logits: Tensor | None,
        out: Tensor,
        workspace: Tensor,
        ctas: int,
        wait_limit_ns: int,
        error_address: int,
    ) -> None:
        """The megakernel, after `schedule` of the same routes on the same stream."""
        given = (x, weights, *parameters, shared_gate_logits, out, workspace, ctas, wait_limit_ns, error_address)
        self._forward(*self._forward_pick(given))


def _picker(kernel: str, wanted: tuple[str, ...], known: tuple[str, ...]) -> Pick:
    """Function from our tuple of arguments to the kernel's."""
    places = {name: index for index, name in enumerate(known)}
    missing = [name for name in wanted if name not in places and SAME.get(name) not in places]
    if missing:
        raise ArtifactMismatchError(
            f"kernel {kernel} takes {', '.join(missing)}, which this mokgen does not know",
            where="manifest.json",
            hint="build the layer again with this mokgen",
        )
    return itemgetter(*(places[name] if name in places else places[SAME[name]] for name in wanted))
