"""Seeded parameters and routed inputs of a layer; the routing patterns that tests and benchmarks share.

Reads a `ResolvedLayer` and nothing else of mokgen but number formats. Every function is pure: the same layer, tokens,
pattern, seed and kind of device give the same bits.

Letters: T tokens, E experts, K top-k, H hidden, I intermediate, Is intermediate of the merged shared experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from mokgen.facts.formats import FORMATS
from mokgen.lower.layer import ResolvedLayer

Tensor = torch.Tensor

REDRAWS = 50
LOGIT_GAP = 1e-4  # logits this close count as a near tie: fp32 exponentials of two libraries may order them differently


@dataclass(frozen=True)
class Parameters:
    """Weights of one layer, under the names `Layer.forward` gives them; None where the layer has no such tensor."""

    w_gate_up: Tensor  # (E, 2I, H) bf16
    w_down: Tensor  # (E, H, I) bf16
    b_gate_up: Tensor | None = None  # (E, 2I) bf16
    b_down: Tensor | None = None  # (E, H) bf16
    w_shared_gate_up: Tensor | None = None  # (2Is, H) bf16
    w_shared_down: Tensor | None = None  # (H, Is) bf16
    selection_bias: Tensor | None = None  # (E,) fp32
    logit_bias: Tensor | None = None  # (E,) fp32


@dataclass(frozen=True)
class Inputs:
    """Per-call tensors. `logits` is set for layers that route by themselves; ids and weights always are."""

    x: Tensor  # (T, H) bf16
    ids: Tensor  # (T, K) int32 or int64
    weights: Tensor  # (T, K) fp32 or bf16
    logits: Tensor | None = None  # (T, E) fp32 or bf16
    shared_gate_logits: Tensor | None = None  # (T,) fp32

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


def present(data: Parameters | Inputs) -> dict[str, Tensor]:
    """The tensors that exist, by name."""
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    return {name: value for name, value in values.items() if value is not None}


def generator(device: torch.device | str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def make_parameters(layer: ResolvedLayer, device: torch.device | str = "cpu", seed: int = 0) -> Parameters:
    """Random weights scaled so that hidden rows and outputs are of order one."""
    random = generator(device, seed)
    hidden, inter, experts = layer.hidden_size, layer.intermediate_size, layer.num_local_experts

    def normal(*shape: int, scale: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype).mul_(scale)

    values: dict[str, Tensor] = {
        "w_gate_up": normal(experts, 2 * inter, hidden, scale=1 / math.sqrt(hidden)),
        "w_down": normal(experts, hidden, inter, scale=1 / math.sqrt(inter)),
    }
    if layer.expert_bias:
        values["b_gate_up"] = normal(experts, 2 * inter, scale=0.25)
        values["b_down"] = normal(experts, hidden, scale=0.25)
    if layer.shared.num:
        shared = layer.shared.intermediate_size
        values["w_shared_gate_up"] = normal(2 * shared, hidden, scale=1 / math.sqrt(hidden))
        values["w_shared_down"] = normal(hidden, shared, scale=1 / math.sqrt(shared))
    if layer.router.input == "logits":
        for name in ("selection_bias", "logit_bias"):
            if getattr(layer.router, name):
                values[name] = normal(layer.num_experts, scale=0.1, dtype=torch.float32)
    return Parameters(**values)


# --- routing patterns: (layer, tokens, random) -> ids (T, K) int64 on the generator's device -------------------------


def _distinct(layer: ResolvedLayer, tokens: int, random: torch.Generator, allowed: Tensor) -> Tensor:
    """Uniform draws from `allowed`: distinct within a token while K fits, else with repetition."""
    device, top_k = random.device, layer.top_k
    if len(allowed) < top_k:
        return allowed[torch.randint(len(allowed), (tokens, top_k), generator=random, device=device)]
    order = torch.rand(tokens, len(allowed), generator=random, device=device).argsort(dim=1)
    return allowed[order[:, :top_k]]


def balanced(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Every expert gets the same number of routes, give or take one; experts of a token are distinct."""
    experts, device = layer.num_experts, random.device
    names = torch.randperm(experts, generator=random, device=device)
    routes = torch.arange(tokens * layer.top_k, device=device).remainder(experts)
    order = torch.randperm(tokens, generator=random, device=device)
    return names[routes].reshape(tokens, layer.top_k)[order]


def one_expert_empty(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """One expert in the middle of the table has no tokens (E = 8: the ids 0, 1, 2, 4, 5, 6, 7)."""
    experts = torch.arange(layer.num_experts, device=random.device)
    allowed = experts[experts != (layer.num_experts - 1) // 2] if layer.num_experts > 1 else experts
    return _distinct(layer, tokens, random, allowed)


def last_two_experts(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Only the last two experts have tokens, so that the table starts with empty ones (E = 8: ids 6 and 7)."""
    return _distinct(layer, tokens, random, torch.arange(layer.num_experts, device=random.device)[-2:])


def first_two_experts(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Only the first two experts have tokens, so that the table ends with empty ones."""
    return _distinct(layer, tokens, random, torch.arange(layer.num_experts, device=random.device)[:2])


def all_to_one(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Every slot of every token names one expert: the largest segment and, for K > 1, every slot a duplicate."""
    return torch.full((tokens, layer.top_k), layer.num_experts // 2, device=random.device, dtype=torch.int64)


def duplicates(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Slots in pairs name the same expert; every slot counts."""
    device, pairs = random.device, (layer.top_k + 1) // 2
    drawn = torch.randint(layer.num_experts, (tokens, pairs), generator=random, device=device)
    return drawn.repeat_interleave(2, dim=1)[:, : layer.top_k]


def masked(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """-1 in slot 0 of even tokens and in every slot of the first, the middle and the last token."""
    ids = _distinct(layer, tokens, random, torch.arange(layer.num_experts, device=random.device))
    ids[::2, 0] = -1
    for token in {0, max(tokens // 2 - 1, 0), tokens - 1}:
        if tokens:
            ids[token] = -1
    return ids


def all_masked(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """No route at all."""
    return torch.full((tokens, layer.top_k), -1, device=random.device, dtype=torch.int64)


def ragged(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Segment lengths around tile edges: 1, 127, 128, 129, 255, 257 rows in turn, the rest to the last expert."""
    routes, device = tokens * layer.top_k, random.device
    flat = torch.full((routes,), layer.num_experts - 1, device=device, dtype=torch.int64)
    start = 0
    for expert in range(layer.num_experts):
        length = (1, 127, 128, 129, 255, 257)[expert % 6]
        flat[start : start + length] = expert
        start += length
    return flat[torch.randperm(routes, generator=random, device=device)].reshape(tokens, layer.top_k)


def zipf(layer: ResolvedLayer, tokens: int, random: torch.Generator) -> Tensor:
    """Expert of rank r is chosen with weight 1 / (r + 1), ranks in a random order; distinct within a token."""
    experts, device = layer.num_experts, random.device
    weight = 1.0 / torch.arange(1, experts + 1, device=device)
    names = torch.randperm(experts, generator=random, device=device)
    exponential = -torch.rand(tokens, experts, generator=random, device=device).clamp_min(1e-20).log()
    return names[(weight / exponential).topk(layer.top_k, dim=1).indices]


Pattern = Callable[[ResolvedLayer, int, torch.Generator], Tensor]
PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        balanced,
        one_expert_empty,
        last_two_experts,
        first_two_experts,
        all_to_one,
        duplicates,
        masked,
        all_masked,
        ragged,
        zipf,
    )
}


def make_inputs(
    layer: ResolvedLayer,
    tokens: int,
    pattern: str = "balanced",
    device: torch.device | str = "cpu",
    seed: int = 0,
    id_dtype: torch.dtype = torch.int32,
) -> Inputs:
    """Tokens routed after `pattern`. Weights without a route are NaN; x rows nobody reads are NaN or infinite."""
    random = generator(device, seed + 1)
    ids = PATTERNS[pattern](layer, tokens, random)
    weights = torch.rand(ids.shape, generator=random, device=device).add_(0.1)
    weights = weights.div_(weights.sum(dim=1, keepdim=True))
    weights[ids < 0] = float("nan")
    x = torch.randn(tokens, layer.hidden_size, generator=random, device=device, dtype=torch.bfloat16)
    if layer.shared.num == 0:  # a shared expert reads every token
        unread = (ids < 0).all(dim=1).nonzero().flatten()
        x[unread[::2]] = float("nan")
        x[unread[1::2]] = float("inf")
    gate = None
    if layer.shared.gate == "sigmoid":
        gate = torch.randn(tokens, generator=random, device=device)
    dtype = torch.float32 if layer.router.input == "logits" else FORMATS[layer.router.weight_dtype].torch_dtype()
    return Inputs(x, ids.to(id_dtype).contiguous(), weights.to(dtype), None, gate)


def make_logits(layer: ResolvedLayer, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Router logits (T, E) in the layer's dtype; fp32 logits of one token differ by at least LOGIT_GAP.

    bf16 logits hold exact ties, which the contract resolves to the lowest id; two fp32 logits that nearly tie would
    test whose exponential is rounded how.
    """
    random = generator(device, seed + 2)
    dtype = FORMATS[layer.router.logits_dtype].torch_dtype()
    if dtype != torch.float32:
        return torch.randn(tokens, layer.num_experts, generator=random, device=device).mul_(2).to(dtype)
    ranks = torch.rand(tokens, layer.num_experts, generator=random, device=device).argsort(dim=1).argsort(dim=1)
    step = max(4.0 / layer.num_experts, 4 * LOGIT_GAP)
    jitter = torch.rand(ranks.shape, generator=random, device=device).mul_(0.5)
    return (ranks.float() + jitter - layer.num_experts / 2) * step


def make_routed_inputs(
    layer: ResolvedLayer, parameters: Parameters, tokens: int, device: torch.device | str = "cpu", seed: int = 0
) -> Inputs:
    """Inputs of a layer that takes logits; ids and weights are what the router oracle makes of them.

    Tokens whose choice hangs on the rounding of an exponential are drawn again: the contract settles ties, not those.
    """
    from mokgen.reference.oracle import near_ties, route

    biases = (parameters.selection_bias, parameters.logit_bias)
    logits = make_logits(layer, tokens, device, seed)
    for attempt in range(1, REDRAWS):
        again = near_ties(layer, logits, *biases).nonzero().flatten()
        if len(again) == 0:
            break
        logits[again] = make_logits(layer, len(again), device, seed + 1000 * attempt)
    ids, weights = route(layer, logits, *biases)
    plain = make_inputs(layer, tokens, "balanced", device, seed)
    return replace(plain, ids=ids, weights=weights.float(), logits=logits)
