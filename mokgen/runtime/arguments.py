"""What the tensors of a call must be, checked on the host before anything is launched.

Checks are exact and cheap (under a microsecond a tensor, so nothing is cached): dtype, shape, row-major contiguity,
device, 16-byte alignment. Expert weights and x are never copied; ids, routing weights and gate logits are small and may
be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mokgen.errors import ArgumentError
from mokgen.facts.formats import FORMATS, ROW_ALIGN_BYTES
from mokgen.lower.layer import ResolvedLayer

Tensor = torch.Tensor

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


def check(expected: Expected, tensor: Tensor | None, tokens: int, device: torch.device) -> None:
    """Raise ArgumentError unless the kernels can take `tensor` as it lies in memory."""
    if (
        tensor is None
        or tensor.dtype not in expected.dtypes
        or tensor.shape != expected.shape(tokens)
        or tensor.device != device
        or not tensor.is_contiguous()
        or tensor.data_ptr() % ROW_ALIGN_BYTES
    ):
        raise fault(expected, tensor, tokens, device)


def check_optional(
    expected: Expected | None, name: str, tensor: Tensor | None, tokens: int, device: torch.device
) -> None:
    """`check` for an argument that some layers do not have; given to such a layer it is refused."""
    if expected is not None:
        check(expected, tensor, tokens, device)
    elif tensor is not None:
        raise ArgumentError("given, but this layer has no such argument", where=name, hint=f"leave {name} out")


def check_small(expected: Expected, tensor: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """`check` for a small tensor: a strided or misaligned one is copied instead of refused."""
    if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % ROW_ALIGN_BYTES):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    check(expected, tensor, tokens, device)
    assert tensor is not None
    return tensor


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
