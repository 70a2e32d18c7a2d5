"""The torch operators `mokgen::moe_forward` and `mokgen::moe_route`, and the registry of the layers they run.

One operator serves every layer: its first argument names a loaded layer, so that a traced graph holds a string and
tensors only. CUDA runs the compiled kernels, CPU the plan's executor, and tracing sees shapes alone. Nothing here reads
a value of a tensor.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.utils._device import DeviceContext

from mokgen.errors import UnsupportedError

Tensor = torch.Tensor

PARAMETERS = ("w_gate_up", "w_down", "b_gate_up", "b_down", "w_shared_gate_up", "w_shared_down")
FORWARD = "mokgen::moe_forward"
ROUTE = "mokgen::moe_route"
FORWARD_SCHEMA = (
    "moe_forward(str layer, Tensor x, Tensor routing, Tensor? weights, Tensor w_gate_up, Tensor w_down, "
    "Tensor? b_gate_up, Tensor? b_down, Tensor? w_shared_gate_up, Tensor? w_shared_down, "
    "Tensor? shared_gate_logits, Tensor? selection_bias, Tensor? logit_bias) -> Tensor"
)
ROUTE_SCHEMA = "moe_route(str layer, Tensor logits, Tensor? selection_bias, Tensor? logit_bias) -> (Tensor, Tensor)"

# Definitions live as long as this object.
LIBRARY = torch.library.Library("mokgen", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
LIBRARY.define(FORWARD_SCHEMA, tags=_TAGS)  # type: ignore[no-untyped-call]
LIBRARY.define(ROUTE_SCHEMA, tags=_TAGS)  # type: ignore[no-untyped-call]


class Runner(Protocol):
    """What the registry holds; `mokgen.runtime.layer.Layer` is the implementation."""

    top_k: int

    def run(self, *given: Tensor | None) -> Tensor: ...

    def run_route(
        self, logits: Tensor, selection_bias: Tensor | None, logit_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


_runners: WeakValueDictionary[str, Runner] = WeakValueDictionary()


def register(runner: Runner, wanted: str) -> str:
    """Enter a layer and return its name for the operator: `wanted`, or with a number when that is in use.

    The name of a process's first layer of a kind is the same in every process, so compiled graphs can be cached.
    """
    name, number = wanted, 1
    while name in _runners:
        number += 1
        name = f"{wanted}-{number}"
    _runners[name] = runner
    return name


def _runner(name: str) -> Runner:
    runner = _runners.get(name)
    if runner is None:
        raise RuntimeError(f"layer {name} is not loaded in this process; keep the object load_layer returned")
    return runner


# Thread-local dispatch keys of a program that only computes; inference mode leaves the second out.
_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_IN_PLACE = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_ORDINARY_KEYS = ((_BACKEND | _IN_PLACE).raw_repr(), _BACKEND.raw_repr())
_ORDINARY_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def only_computes(given: tuple[Tensor | None, ...]) -> bool:
    """Whether the dispatcher would do no more with a call of these tensors, x first, than run the CUDA implementation.

    Then a call may go there directly, which saves 4 us of host time.
    """
    return isinstance(given[0], Tensor) and given[0].is_cuda and nobody_looks_on(given)


def nobody_looks_on(given: tuple[Tensor | None, ...]) -> bool:
    """No autograd, tensor subclass, dispatch or function mode, tracer, functorch transform or profiler is concerned."""
    return (
        _ORDINARY_TYPES.issuperset(map(type, given))
        and torch._C._dispatch_tls_local_include_set().raw_repr() in _ORDINARY_KEYS
        and (not torch._C._len_torch_function_stack() or _modes_are_default_devices())
        and not torch._C._autograd._profiler_enabled()
        and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*given))
    )


def _modes_are_default_devices() -> bool:
    """A default device, which is a function mode too, concerns only what makes tensors from nothing."""
    modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
    return all(type(mode) is DeviceContext for mode in modes)


def _forward(layer: str, *given: Tensor | None) -> Tensor:
    return _runner(layer).run(*given)


def _route(
    layer: str, logits: Tensor, selection_bias: Tensor | None, logit_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _runner(layer).run_route(logits, selection_bias, logit_bias)


def _fake_forward(layer: str, x: Tensor, routing: Tensor, weights: Tensor | None, *rest: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _fake_route(
    layer: str, logits: Tensor, selection_bias: Tensor | None, logit_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], _runner(layer).top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _no_backward(*_: Any) -> Any:
    raise UnsupportedError(
        "this layer has no backward kernels",
        where="passes: [forward]",
        hint="call it under torch.no_grad(), or detach its inputs",
    )


for _kind in ("CUDA", "CPU"):
    LIBRARY.impl("moe_forward", _forward, _kind)  # type: ignore[no-untyped-call]
    LIBRARY.impl("moe_route", _route, _kind)  # type: ignore[no-untyped-call]
torch.library.register_fake(FORWARD, _fake_forward, lib=LIBRARY)
torch.library.register_fake(ROUTE, _fake_route, lib=LIBRARY)
torch.library.register_autograd(FORWARD, _no_backward, lib=LIBRARY)
torch.library.register_autograd(ROUTE, _no_backward, lib=LIBRARY)

moe_forward = torch.ops.mokgen.moe_forward.default
moe_route = torch.ops.mokgen.moe_route.default
