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
    """One argument; extent None in `shape` is the number of tokens."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | None, ...]
    meaning: str

    def with_tokens(self, tokens: int) -> tuple[int, ...]:
        return tuple(tokens if extent is None else extent for extent in self.shape)


@dataclass(frozen=True)
class CallArguments:
    """Everything a layer's call may take. `parameters` stand in the order of `op.PARAMETERS`; None: must be absent."""

    x: Expected
    ids: Expected
    weights: Expected
    logits: Expected | None
    parameters: tuple[Expected | None, ...]
    shared_gate_logits: Expected | None
    selection_bias: Expected | None
    logit_bias: Expected | None


def expected_arguments(layer: ResolvedLayer) -> CallArguments:
    """The arguments of a layer, from what the layer is."""
    experts, hidden, inter = layer.num_local_experts, layer.hidden_size, layer.intermediate_size
    router, shared = layer.router, layer.shared
    own_routing = router.input == "logits"
    weight_dtype = FP32 if own_routing else FORMATS[router.weight_dtype].torch_dtype()

    def given(yes: bool, name: str, dtype: torch.dtype, shape: tuple[int | None, ...], meaning: str) -> Expected | None:
        return Expected(name, (dtype,), shape, meaning) if yes else None

    bias, merged = layer.expert_bias, shared.intermediate_size
    every = layer.num_experts
    return CallArguments(
        x=Expected("x", (BF16,), (None, hidden), "(T, H)"),
        ids=Expected("ids", ID_DTYPES, (None, router.top_k), "(T, K)"),
        weights=Expected("weights", (weight_dtype,), (None, router.top_k), "(T, K)"),
        logits=given(own_routing, "logits", FORMATS[router.logits_dtype].torch_dtype(), (None, every), "(T, E)"),
        parameters=(
            Expected("w_gate_up", (BF16,), (experts, 2 * inter, hidden), "(E, 2I, H)"),
            Expected("w_down", (BF16,), (experts, hidden, inter), "(E, H, I)"),
            given(bias, "b_gate_up", BF16, (experts, 2 * inter), "(E, 2I)"),
            given(bias, "b_down", BF16, (experts, hidden), "(E, H)"),
            given(shared.num > 0, "w_shared_gate_up", BF16, (2 * merged, hidden), "(2Is, H)"),
            given(shared.num > 0, "w_shared_down", BF16, (hidden, merged), "(H, Is)"),
        ),
        shared_gate_logits=given(shared.gate == "sigmoid", "shared_gate_logits", FP32, (None,), "(T,)"),
        selection_bias=given(own_routing and router.selection_bias, "selection_bias", FP32, (every,), "(E,)"),
        logit_bias=given(own_routing and router.logit_bias, "logit_bias", FP32, (every,), "(E,)"),
    )


def check(expected: Expected, tensor: Tensor | None, tokens: int, device: torch.device) -> None:
    """Raise ArgumentError unless the kernels can take `tensor` as it lies in memory."""
    if (
        tensor is None
        or tensor.dtype not in expected.dtypes
        or tensor.shape != expected.with_tokens(tokens)
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
        raise fault(expected, x, -1, x.device)
    tokens = x.shape[0]
    if tokens > max_tokens:
        raise ArgumentError(
            f"{tokens} tokens; the layer is built for at most {max_tokens}",
            where="x",
            hint=f"split the batch, or build with topology.max_tokens_per_rank >= {tokens}",
        )
    return tokens


def fault(expected: Expected, tensor: Tensor | None, tokens: int, device: torch.device) -> ArgumentError:
    """The first thing wrong with an argument, in words: what was given, what is needed."""
    shape: tuple[int | str, ...] = expected.with_tokens(tokens)
    if tokens < 0:
        shape = tuple("T" if extent is None else extent for extent in expected.shape)
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
    need = f"{expected.name} {expected.meaning} = {_show(shape)} {wanted}, row-major"
    if tensor is None:
        return ArgumentError("missing", where=expected.name, hint=f"needed: {need}")
    if tensor.dtype not in expected.dtypes:
        got = str(tensor.dtype).removeprefix("torch.")
        return ArgumentError(f"dtype {got}, expected {wanted}", where=expected.name, hint=f"needed: {need}")
    if tokens < 0 or tensor.shape != shape:
        what = f"shape {_show(tuple(tensor.shape))}, expected {_show(shape)}"
        return ArgumentError(what, where=expected.name, hint=f"needed: {need}")
    if tensor.device != device:
        return ArgumentError(f"on {tensor.device}, but x is on {device}", where=expected.name)
    if not tensor.is_contiguous():
        strides = _show(torch.empty(tensor.shape, device="meta").stride())
        return ArgumentError(
            f"strides {_show(tensor.stride())} of shape {_show(shape)}, expected row-major {strides}",
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
