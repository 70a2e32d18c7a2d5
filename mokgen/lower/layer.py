"""The layer a spec means, with every derived number filled in.

Owns `ResolvedLayer` and nothing else; imports no other room, so that plan, reference and runtime can read it.
After `resolve` no code asks "is this set?": absent features have a neutral value (0 shared experts, clamp = inf).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RouterLayer:
    """How tokens choose experts (design: `router`). Score arithmetic is fp32, ties go to the lowest expert id."""

    input: str  # "ids": ids and weights are arguments; "logits": `route` computes them from logits (T, E)
    top_k: int
    score: str  # "softmax" | "sigmoid"
    order: str  # "score_then_topk" | "topk_then_score" (gpt-oss: softmax over the chosen logits)
    normalize: bool  # divide the chosen weights by their sum
    scale: float  # factor on the weights, last
    selection_bias: bool  # bias (E,) fp32 added to scores for the choice only (DeepSeek-V3)
    logit_bias: bool  # bias (E,) fp32 added to logits
    groups: int  # 1: no group limit
    top_groups: int  # groups kept; == groups when there is no limit
    group_score: str  # "max" | "top2_sum"
    weight_dtype: str  # dtype of the weights argument when input == "ids": "fp32" | "bf16"
    logits_dtype: str  # "fp32" | "bf16"


@dataclass(frozen=True)
class SharedLayer:
    """Shared experts merged along the intermediate axis into one MLP."""

    num: int  # 0: none
    intermediate_size: int  # num * intermediate size of one; 0 when num == 0
    gate: str  # "none" | "sigmoid" (factor sigmoid(shared_gate_logits[t]) on the shared output)


@dataclass(frozen=True)
class ResolvedLayer:
    """One MoE layer on one rank; sizes in elements, all optionals resolved.

    Tensors (row-major): x (T, H) bf16; w_gate_up (E, 2I, H); w_down (E, H, I); b_gate_up (E, 2I) and b_down (E, H) bf16
    when `expert_bias`; w_shared_gate_up (2*Is, H) [gate rows, then up rows], w_shared_down (H, Is) when shared.num > 0.
    """

    hidden_size: int
    num_experts: int
    num_local_experts: int
    intermediate_size: int
    activation: str  # key of facts.activations.ACTIVATIONS
    alpha: float  # factor inside the sigmoid (1.0 for plain SwiGLU)
    clamp: float  # limit on gate (above) and up (both sides); inf: none
    expert_bias: bool
    gate_up_layout: str  # "concatenated": gate rows 0..I-1, up rows I..2I-1; "interleaved": gate 2j, up 2j+1
    weight_dtype: str  # "bf16"
    router: RouterLayer
    shared: SharedLayer
    precision: str  # "bf16"
    ep_size: int
    transport: str
    placement: str
    max_tokens: int  # per rank; the compiled kernel takes any T from 0 to this
    capacity: str
    passes: tuple[str, ...]
    save: str
    determinism: str  # "run_to_run" | "batch_invariant"
    checks: str  # "fast" | "checked"
    archs: tuple[str, ...]
    knobs: tuple[tuple[str, int | str], ...]  # the spec's `plan:` overrides, sorted by name

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data; inverse of `from_dict`. An infinite clamp is written as the string "inf"."""
        data = asdict(self)
        data["clamp"] = "inf" if self.clamp == float("inf") else self.clamp
        data["passes"], data["archs"] = list(self.passes), list(self.archs)
        data["knobs"] = [list(knob) for knob in self.knobs]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ResolvedLayer:
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            raise ValueError(f"resolved layer fields differ: {sorted(set(data) ^ known)}")
        rest = {key: value for key, value in data.items() if key not in {"router", "shared"}}
        rest["clamp"] = float(rest["clamp"])
        rest["passes"], rest["archs"] = tuple(rest["passes"]), tuple(rest["archs"])
        rest["knobs"] = tuple((name, value) for name, value in rest["knobs"])
        return cls(router=RouterLayer(**data["router"]), shared=SharedLayer(**data["shared"]), **rest)
