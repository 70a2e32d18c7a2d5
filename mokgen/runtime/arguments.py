"""What the tensors of a call must be, checked on the host before anything is launched.

Checks are exact: dtype, shape, row-major contiguity, device, 16-byte alignment. Expert weights and x are never copied;
ids, routing weights and gate logits are small and may be. `Fit` answers for a whole call whether it can be launched as
it is; only where it says no does `prepare` look closer, to copy what may be copied and to say what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from mokgen.errors import ArgumentError
from mokgen.facts.formats import FORMATS, ROW_ALIGN_BYTES
from mokgen.lower.layer import ResolvedLayer

T = TypeVar("T")
Tensor = torch.Tensor
Facts = tuple[tuple[torch.dtype, ...], tuple[int, ...], tuple[int, ...]] | None  # dtypes, shape, strides

BF16, FP32 = torch.bfloat16, torch.float32
ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Expected:
    """One argument: extents `rest`, behind the number of tokens where it is `per_token`."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    rest: tuple[int, ...]
    meaning: str
    per_token: bool = False

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens, *self.rest) if self.per_token else self.rest

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides, which do not depend on the number of tokens."""
        shape, strides = self.shape(1), [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        return tuple(strides)

    def shape_text(self, tokens: int | None) -> str:
        """The shape for people; None: the number of tokens is not known yet."""
        if tokens is None and self.per_token:
            return _show(("T", *self.rest))
        return _show(self.shape(tokens or 0))


@dataclass(frozen=True)
class CallArguments:
    """Everything a layer's call may take; None: must be absent. `parameters` stand in the order of `op.PARAMETERS`."""

    x: Expected
    ids: Expected
    weights: Expected
    logits: Expected | None
    parameters: tuple[tuple[str, Expected | None], ...]
    shared_gate_logits: Expected | None
    selection_bias: Expected | None
    logit_bias: Expected | None

    def in_order(self, own_routing: bool) -> tuple[Expected | None, ...]:
        """One entry for each tensor of the operator: of a call with logits, or of one with ids and weights."""
        parameters = tuple(want for _, want in self.parameters)
        if own_routing:
            router = (self.selection_bias, self.logit_bias)
            return (self.x, self.logits, None, *parameters, self.shared_gate_logits, *router)
        return (self.x, self.ids, self.weights, *parameters, self.shared_gate_logits, None, None)


def expected_arguments(layer: ResolvedLayer) -> CallArguments:
    """The arguments of a layer, from what the layer is."""
    experts, hidden, inter = layer.num_local_experts, layer.hidden_size, layer.intermediate_size
    router, shared = layer.router, layer.shared
    own_routing = router.input == "logits"
    weight_dtype = FP32 if own_routing else FORMATS[router.weight_dtype].torch_dtype()

    logits_dtype, every = FORMATS[router.logits_dtype].torch_dtype(), layer.num_experts

    def bf16(rest: tuple[int, ...], meaning: str, there: bool = True) -> tuple[bool, tuple[int, ...], str]:
        return there, rest, meaning

    merged = shared.intermediate_size
    shapes = {
        "w_gate_up": bf16((experts, 2 * inter, hidden), "(E, 2I, H)"),
        "w_down": bf16((experts, hidden, inter), "(E, H, I)"),
        "b_gate_up": bf16((experts, 2 * inter), "(E, 2I)", layer.expert_bias),
        "b_down": bf16((experts, hidden), "(E, H)", layer.expert_bias),
        "w_shared_gate_up": bf16((2 * merged, hidden), "(2Is, H)", shared.num > 0),
        "w_shared_down": bf16((hidden, merged), "(H, Is)", shared.num > 0),
    }
    parameters = tuple(
        (name, Expected(name, (BF16,), rest, meaning) if there else None)
        for name, (there, rest, meaning) in shapes.items()
    )

    def router_bias(name: str, there: bool) -> Expected | None:
        return Expected(name, (FP32,), (every,), "(E,)") if own_routing and there else None

    return CallArguments(
        x=Expected("x", (BF16,), (hidden,), "(T, H)", True),
        ids=Expected("ids", ID_DTYPES, (router.top_k,), "(T, K)", True),
        weights=Expected("weights", (weight_dtype,), (router.top_k,), "(T, K)", True),
        logits=Expected("logits", (logits_dtype,), (every,), "(T, E)", True) if own_routing else None,
        parameters=parameters,
        shared_gate_logits=_shared_gate(shared.gate),
        selection_bias=router_bias("selection_bias", router.selection_bias),
        logit_bias=router_bias("logit_bias", router.logit_bias),
    )


def _shared_gate(gate: str) -> Expected | None:
    return Expected("shared_gate_logits", (FP32,), (), "(T,)", True) if gate == "sigmoid" else None


class Fit:
    """Whether every tensor of a call can go to the kernels as it is; False wherever `prepare` has to look closer.

    A look at one tensor takes half a microsecond. Weights and biases that the last call had too are therefore not
    looked at again: they are known by their identity, so one that was changed in place passes here. The kernels' stub,
    which compares dtype, shape, strides, alignment and device of every tensor of every launch, refuses it; then
    `forget` and `prepare`.

    wanted: as `CallArguments.in_order` gives it.
    """

    __slots__ = ("_lasting", "_max_tokens", "_passing", "_seen", "_shape", "_wanted")

    def __init__(self, wanted: tuple[Expected | None, ...], max_tokens: int) -> None:
        self._wanted, self._max_tokens = wanted, max_tokens
        self._shape: tuple[int, ...] = ()  # of x in the last call
        self._passing: tuple[Facts, ...] = ()  # what its tensors had to be
        self._lasting = _facts(_lasting(wanted), 0)
        self._seen: tuple[int, ...] = ()

    def __call__(self, given: tuple[Tensor | None, ...]) -> bool:
        x = given[0]
        assert x is not None
        shape, device = x.shape, x.device
        if shape != self._shape:
            if len(shape) != 2 or shape[0] > self._max_tokens:
                return False
            self._shape, self._passing = tuple(shape), _facts(_passing(self._wanted), shape[0])
        if not _all_are(_passing(given), self._passing, device):
            return False
        lasting = _lasting(given)
        seen = tuple(map(id, lasting))
        if seen != self._seen:
            if not _all_are(lasting, self._lasting, device):
                return False
            self._seen = seen
        return True

    def forget(self) -> None:
        self._seen = ()


def _passing(row: tuple[T, ...]) -> tuple[T, ...]:
    """Of an operator's tensors, those that are new in every call: x, routing, weights, shared_gate_logits."""
    return row[0], row[1], row[2], row[9]


def _lasting(row: tuple[T, ...]) -> tuple[T, ...]:
    """The others: weights and biases of the experts and of the router."""
    return row[3:9] + row[10:]


def _facts(wanted: tuple[Expected | None, ...], tokens: int) -> tuple[Facts, ...]:
    return tuple(None if want is None else (want.dtypes, want.shape(tokens), want.strides) for want in wanted)


def _all_are(given: tuple[Tensor | None, ...], wanted: tuple[Facts, ...], device: torch.device) -> bool:
    for tensor, want in zip(given, wanted, strict=True):
        if tensor is None or want is None:
            if (tensor is None) is not (want is None):
                return False
            continue
        dtypes, shape, strides = want
        if (
            tensor.dtype not in dtypes
            or tensor.shape != shape
            # Not is_contiguous(): that overlooks the stride of an extent of 1, which the kernels' stub refuses.
            or tensor.stride() != strides
            or tensor.device != device
            or tensor.data_ptr() % ROW_ALIGN_BYTES
        ):
            return False
    return True


def prepare(
    expected: CallArguments, given: tuple[Tensor | None, ...], own_routing: bool, max_tokens: int
) -> tuple[Tensor | None, ...]:
    """A call's tensors, in the operator's order, as the kernels take them; ArgumentError for the first wrong one."""
    x, routing, weights, *parameters, gate, selection_bias, logit_bias = given
    assert x is not None
    tokens, device = check_tokens(expected.x, x, max_tokens), x.device
    x = check(expected.x, x, tokens, device)
    pairs = zip(expected.parameters, parameters, strict=True)
    parameters = [check_optional(want, name, tensor, tokens, device) for (name, want), tensor in pairs]
    if gate is not None and expected.shared_gate_logits is not None:
        gate = check_small(expected.shared_gate_logits, gate, tokens, device)
    gate = check_optional(expected.shared_gate_logits, "shared_gate_logits", gate, tokens, device)
    if own_routing:
        assert expected.logits is not None
        routing = check(expected.logits, routing, tokens, device)
    else:
        routing = check_small(expected.ids, routing, tokens, device)
        weights = check_small(expected.weights, weights, tokens, device)
        for want, tensor in ((expected.selection_bias, selection_bias), (expected.logit_bias, logit_bias)):
            if want is not None and tensor is not None:
                what = "given beside ids and weights, which skip the router"
                raise ArgumentError(what, where=want.name, hint=f"leave {want.name} out, or pass logits")
    selection, logit = (expected.selection_bias, expected.logit_bias) if own_routing else (None, None)
    selection_bias = check_optional(selection, "selection_bias", selection_bias, tokens, device)
    logit_bias = check_optional(logit, "logit_bias", logit_bias, tokens, device)
    return (x, routing, weights, *parameters, gate, selection_bias, logit_bias)


def check(expected: Expected, tensor: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """The tensor as the kernels take it, its memory unmoved; ArgumentError if it cannot be taken as it lies there."""
    if (
        tensor is None
        or tensor.dtype not in expected.dtypes
        or tensor.shape != expected.shape(tokens)
        or tensor.device != device
        or not tensor.is_contiguous()
        or tensor.data_ptr() % ROW_ALIGN_BYTES
    ):
        raise fault(expected, tensor, tokens, device)
    # An extent of 1 may carry any stride.
    return tensor if tensor.stride() == expected.strides else tensor.view(-1).view(tensor.shape)


def check_optional(
    expected: Expected | None, name: str, tensor: Tensor | None, tokens: int, device: torch.device
) -> Tensor | None:
    """`check` for an argument that some layers do not have; given to such a layer it is refused."""
    if expected is not None:
        return check(expected, tensor, tokens, device)
    if tensor is not None:
        raise ArgumentError("given, but this layer has no such argument", where=name, hint=f"leave {name} out")
    return None


def check_small(expected: Expected, tensor: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """`check` for a small tensor: a strided or misaligned one is copied instead of refused."""
    if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % ROW_ALIGN_BYTES):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return check(expected, tensor, tokens, device)


def check_tokens(expected: Expected, x: Tensor, max_tokens: int) -> int:
    """Number of tokens of `x`, which must have two dimensions and at most `max_tokens` rows."""
    if x.dim() != 2:
        raise fault(expected, x, None, x.device)
    tokens = x.shape[0]
    if tokens > max_tokens:
        raise ArgumentError(
            f"{tokens} tokens; the layer is built for at most {max_tokens}",
            where="x",
            hint=f"split the batch, or build with topology.max_tokens_per_rank >= {tokens}",
        )
    return tokens


def fault(expected: Expected, tensor: Tensor | None, tokens: int | None, device: torch.device) -> ArgumentError:
    """The first thing wrong with an argument, in words: what was given, what is needed."""
    shape = expected.shape_text(tokens)
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
    need = f"{expected.name} {expected.meaning} = {shape} {wanted}, row-major"
    if tensor is None:
        return ArgumentError("missing", where=expected.name, hint=f"needed: {need}")
    if tensor.dtype not in expected.dtypes:
        got = str(tensor.dtype).removeprefix("torch.")
        return ArgumentError(f"dtype {got}, expected {wanted}", where=expected.name, hint=f"needed: {need}")
    if tokens is None or tensor.shape != expected.shape(tokens):
        what = f"shape {_show(tuple(tensor.shape))}, expected {shape}"
        return ArgumentError(what, where=expected.name, hint=f"needed: {need}")
    if tensor.device != device:
        return ArgumentError(f"on {tensor.device}, but x is on {device}", where=expected.name)
    if not tensor.is_contiguous():
        strides = _show(torch.empty(tensor.shape, device="meta").stride())
        return ArgumentError(
            f"strides {_show(tensor.stride())} of shape {shape}, expected row-major {strides}",
            where=expected.name,
            hint=f"pass {expected.name}.contiguous(); mokgen does not copy it behind your back",
        )
    return ArgumentError(
        f"starts at address {tensor.data_ptr():#x}, {tensor.data_ptr() % ROW_ALIGN_BYTES} bytes past a multiple of "
        f"{ROW_ALIGN_BYTES}",
        where=expected.name,
        hint=f"pass {expected.name}.clone(), or slice its buffer at a multiple of {ROW_ALIGN_BYTES} bytes",
    )


def _show(values: tuple[int | str, ...]) -> str:
    inside = ", ".join(str(value) for value in values)
    return f"({inside},)" if len(values) == 1 else f"({inside})"
