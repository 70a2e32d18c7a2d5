"""`MoeSpec`: the whole description of one MoE layer. Pydantic only; what it means is `lower.resolve`'s business."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from mokgen.facts.activations import ACTIVATIONS
from mokgen.spec.base import FiniteFloat, OneOf, PositiveInt, SpecModel
from mokgen.spec.parts import PrecisionSpec, TargetSpec, TopologySpec
from mokgen.spec.rules import broken_rules


class ExpertSpec(SpecModel):
    """The routed experts: hidden = activation(x @ w_gate_up.T), y = hidden @ w_down.T."""

    num: PositiveInt
    """Number of experts E."""

    intermediate_size: PositiveInt
    """Width I between the two projections; a multiple of 8."""

    activation: Annotated[str, OneOf(ACTIVATIONS)] = "swiglu"
    """`swiglu`: gate * sigmoid(alpha * gate) * up. `swigluoai`: gate * sigmoid(alpha * gate) * (up + 1)."""

    clamp: Annotated[float, Field(gt=0)] | None = None
    """Limit: gate at most this, up within +- this; `.inf`: none. Null: none for `swiglu`, 7.0 for `swigluoai`."""

    alpha: FiniteFloat | None = None
    """Factor inside the sigmoid. Null: 1.0 for `swiglu`, 1.702 for `swigluoai`."""

    bias: bool = False
    """Biases b_gate_up (E, 2I) and b_down (E, H), bf16, added to both projections."""

    gate_up_layout: Literal["concatenated", "interleaved"] = "concatenated"
    """Rows of w_gate_up (E, 2I, H): `concatenated` gate 0..I-1, then up; `interleaved` gate in even rows, up in odd."""

    weight_dtype: Literal["bf16"] = "bf16"
    """Storage of the weights."""


class RouterIds(SpecModel):
    """Routes come from outside: ids (T, K) int32 or int64 and weights (T, K) are arguments of every call."""

    input: Literal["ids"]
    """`ids`: ids and weights are arguments. `logits`: the layer computes them from logits."""

    top_k: PositiveInt
    """Routes per token K. Above 128: no kernels yet."""

    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights argument."""


class RouterLogits(SpecModel):
    """Routes are computed from logits (T, E). Score arithmetic is fp32 and ties go to the lowest expert id."""

    input: Literal["logits"]
    """`ids`: ids and weights are arguments. `logits`: the layer computes them from logits."""

    top_k: PositiveInt
    """Routes per token K. Above 128: no kernels yet."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from logits to scores."""

    order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk"
    """`score_then_topk`: choose by scores over all experts. `topk_then_score`: choose by logits, score the chosen."""

    normalize: bool = True
    """Divide the chosen weights by their sum."""

    scale: FiniteFloat = 1.0
    """Factor on the weights, applied last."""

    selection_bias: bool = False
    """A bias (E,) fp32 is added to the scores for the choice only, not to the weights (DeepSeek-V3)."""

    logit_bias: bool = False
    """A bias (E,) fp32 is added to the logits first. Leave false where the router's linear layer has added it."""

    groups: PositiveInt = 1
    """Groups of neighbouring experts; the choice is limited to the best `top_groups` of them. 1: no limit."""

    top_groups: PositiveInt | None = None
    """Groups kept per token. Null: all."""

    group_score: Literal["max", "top2_sum"] = "max"
    """Score of a group: that of its best expert, or the sum of its two best (selection bias included)."""

    logits_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the logits argument."""


class SharedSpec(SpecModel):
    """Experts every token passes through, merged into one MLP of width num * intermediate_size, without biases."""

    num: Annotated[int, Field(ge=0)] = 0
    """Number of shared experts; 0: none."""

    intermediate_size: PositiveInt | None = None
    """Width of one shared expert; a multiple of 8. Null: that of the routed experts."""

    gate: Literal["none", "sigmoid"] = "none"
    """`sigmoid`: the shared output of token t times sigmoid(shared_gate_logits[t]), an argument (T,) fp32."""


class MoeSpec(SpecModel):
    """One layer: out[t] = sum over slots k of weight[t, k] * expert[id[t, k]](x[t]) + shared(x[t])."""

    hidden_size: PositiveInt
    """Width H of a token; a multiple of 8."""

    experts: ExpertSpec
    router: Annotated[RouterIds | RouterLogits, Field(discriminator="input")]
    shared: SharedSpec = SharedSpec()
    precision: PrecisionSpec = PrecisionSpec()
    topology: TopologySpec = TopologySpec()

    passes: Annotated[tuple[Literal["forward", "backward"], ...], Field(strict=False, min_length=1)] = ("forward",)
    """Passes to build; `backward` has no kernels yet."""

    save: Literal["minimal", "none"] = "minimal"
    """What the forward keeps for the backward: `minimal`, or `none` (recompute). No effect without a backward pass."""

    determinism: Literal["run_to_run", "batch_invariant"] = "run_to_run"
    """`run_to_run`: equal inputs give equal bits. `batch_invariant`: also whatever other tokens stand in the batch."""

    checks: Literal["fast", "checked"] = "fast"
    """Ids outside [-1, E): `fast` drops the route and reports at the next call, `checked` synchronises and raises."""

    target: TargetSpec = TargetSpec()

    plan: dict[str, StrictInt | StrictStr] = {}
    """Knobs of the plan, as `stages: 4`; each has a derived default. `mokgen plan` prints their values."""

    @model_validator(mode="after")
    def _rules(self) -> MoeSpec:
        faults = broken_rules(self)
        if faults:
            text = "; ".join(f"{fault.field}: {fault.what}" for fault in faults)
            raise PydanticCustomError("rules", "{text}", {"text": text, "faults": faults})
        return self
