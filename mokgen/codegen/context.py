"""What the template of the forward megakernel may see: constants by section, arguments, a few texts chosen here.

Choices between functions of the device library are made in Python and reach the template as names; the template only
leaves out what a layer does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mokgen.ir.requests import Argument
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.constants import LAYER
from mokgen.plan.model import Constant, LayerPlan

SCALAR_TYPES = {"int32": "Int32", "int64": "Int64"}
FORWARD_TEMPLATE = "forward.py.jinja"
INDENT, LINE_LENGTH = 4, 120
MEANINGS = {
    "NUM_STAGES": "operand stages",
    "TASK_SLOTS": "tasks in the ring",
    "CONSUMER_LAG": "K blocks the second warpgroup runs behind the first",
    "GATHERS_IN_FLIGHT": "K blocks of gathered rows under way before the oldest is handed over",
    "REDUCE_TOKENS": "of a reduce item",
    "SLAB_TILES": "fc2 column tiles of a slab",
    "STAGE_FULL_ARRIVALS": "fc1: each load warp and the TMA announcement; fc2: one thread arrives as often",
    "STAGE_EMPTY_ARRIVALS": "each mma warp",
    "TASK_FULL_ARRIVALS": "the scheduler",
    "TASK_EMPTY_ARRIVALS": "every warp",
    "HIDDEN_READY_ARRIVALS": "column tiles x 2 warpgroups",
    "SHARED_HIDDEN_READY_ARRIVALS": "the same for the shared expert",
    "SLAB_DONE_ARRIVALS_PER_TILE": "warpgroups",
    "ERROR": "1 once a bounded wait has expired",
    "HIDDEN_READY": "a word per row block",
    "SHARED_HIDDEN_READY": "a word per 128 tokens",
    "SLAB_DONE": "a word per slab",
}


@dataclass(frozen=True)
class Section:
    """Constants under one heading, as lines of text."""

    title: str
    constants: tuple[str, ...]


def forward_context(plan: LayerPlan, stem: str) -> dict[str, Any]:
    """Context of forward.py.jinja with every constant of the plan; `used_only` drops what the text does not name."""
    layer, kernel = plan.layer, plan.kernel("forward")
    shared = layer.shared.num > 0
    return {
        "STEM": stem,
        "ARCH": plan.arch,
        "SUMMARY": summary(layer),
        "SECTIONS": sections((*kernel.constants, *activation_constants(layer))),
        "ARGUMENTS": [argument_line(argument) for argument in kernel.arguments],
        "ARGUMENT_PARAMETERS": [parameter(argument) for argument in kernel.arguments],
        "SHARED": shared,
        "SHARED_GATE": shared and layer.shared.gate == "sigmoid",
        "SHARED_KIND": shared_kind(layer),
        "BIAS": layer.expert_bias,
        "ACTIVATION": layer.activation,
        "FC1_EPILOGUE_TEXT": fc1_text(layer),
        "FC2_EPILOGUE_TEXT": "Round to bf16" + (" with the bias added" if layer.expert_bias else "") + ", stored to y.",
        "ORDER_TEXT": order_text(shared),
        "LAUNCH_CALL": launch_call(layer),
        **gate_up_strides(layer),
    }


def used_only(found: Iterable[Section], text: str) -> list[Section]:
    """Sections without the constants that `text` only defines."""
    found = tuple(found)
    definitions = {line for section in found for line in section.constants}
    body = "\n".join(line for line in text.splitlines() if line not in definitions)
    names = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", body))
    kept = []
    for section in found:
        lines = tuple(line for line in section.constants if line.split(" = ")[0] in names)
        if lines:
            kept.append(Section(section.title, lines))
    return kept


def sections(constants: Iterable[Constant | tuple[str, str]]) -> list[Section]:
    """Constants under the plan's headings, in the plan's order; pairs (name, text) join the layer's section."""
    lines: dict[str, list[str]] = {}
    for constant in constants:
        if isinstance(constant, Constant):
            meaning = f"  # {MEANINGS[constant.name]}" if constant.name in MEANINGS else ""
            lines.setdefault(constant.section, []).append(f"{constant.name} = {constant.value}{meaning}")
        else:
            lines.setdefault(LAYER, []).append(f"{constant[0]} = {constant[1]}")
    return [Section(title, tuple(entries)) for title, entries in lines.items()]


def activation_constants(layer: ResolvedLayer) -> tuple[tuple[str, str], ...]:
    clamp = 'float("inf")' if layer.clamp == float("inf") else repr(layer.clamp)
    return ("ALPHA", repr(layer.alpha)), ("CLAMP", clamp)


def argument_line(argument: Argument) -> str:
    if argument.shape is None:
        return f'("{argument.name}", "{argument.dtype}", None)'
    shape = ", ".join(f'"{extent}"' if isinstance(extent, str) else str(extent) for extent in argument.shape)
    return f'("{argument.name}", "{argument.dtype}", ({shape}{"," if len(argument.shape) == 1 else ""}))'


def parameter(argument: Argument) -> str:
    kind = "cute.Tensor" if argument.shape is not None else SCALAR_TYPES[argument.dtype]
    return f"{argument.name}: {kind}"


def launch_call(layer: ResolvedLayer) -> list[str]:
    """`kernel = forward(...)` as a formatter breaks it."""
    names = ["x", "topk_weights"]
    names += ["copy.flat(b_gate_up)", "copy.flat(b_down)"] if layer.expert_bias else []
    names += ["shared_gate_logits"] if shared_kind(layer) == "sigmoid" else []
    names += ["out", "workspace", "routed"] + (["shared"] if layer.shared.num > 0 else [])
    names += ["wait_limit_ns", "error_address"]
    whole = f"kernel = forward({', '.join(names)})"
    if len(whole) + INDENT <= LINE_LENGTH:
        return [whole]
    inside = ", ".join(names)
    if len(inside) + 2 * INDENT <= LINE_LENGTH:
        return ["kernel = forward(", f"    {inside}", ")"]
    return ["kernel = forward(", *(f"    {name}," for name in names), ")"]


def summary(layer: ResolvedLayer) -> str:
    shared = ", the shared expert" if layer.shared.num > 0 else ""
    return f"fc1 with {layer.activation}, fc2{shared} and the weighted reduction over a token's slots."


def fc1_text(layer: ResolvedLayer) -> str:
    bias = ", with the bias added," if layer.expert_bias else ""
    return f"{layer.activation} of the gate and up columns{bias} stored to hidden."


def order_text(shared: bool) -> str:
    if shared:
        return "the shared expert's fc1 tiles, all routed fc1 tiles, then both fc2 slab by slab, then END"
    return "all fc1 tiles, then fc2 slab by slab, then END"


def shared_kind(layer: ResolvedLayer) -> str:
    """How the reduction takes the shared expert's row (`reduce.Shape.shared`)."""
    if layer.shared.num == 0:
        return "none"
    return "sigmoid" if layer.shared.gate == "sigmoid" else "plain"


def gate_up_strides(layer: ResolvedLayer) -> dict[str, str]:
    """Strides of gate|up rows in the weight (elements) and in the bias, as texts of constants."""
    if layer.gate_up_layout == "interleaved":
        return {
            "GATE_UP_ROW_STRIDE": "2 * HIDDEN_SIZE",
            "GATE_UP_HALF_STRIDE": "HIDDEN_SIZE",
            "BIAS_COLUMN_STRIDE": "2",
            "BIAS_HALF_STRIDE": "1",
        }
    return {
        "GATE_UP_ROW_STRIDE": "HIDDEN_SIZE",
        "GATE_UP_HALF_STRIDE": "INTERMEDIATE_SIZE * HIDDEN_SIZE",
        "BIAS_COLUMN_STRIDE": "1",
        "BIAS_HALF_STRIDE": "INTERMEDIATE_SIZE",
    }
