"""The spec's documentation, made from its models: the JSON schema and the text of docs/spec.md."""

from __future__ import annotations

from typing import Any

from mokgen.spec.moe import MoeSpec

SECTIONS = {
    "ExpertSpec": "experts",
    "RouterLogits": "router, input: logits",
    "RouterIds": "router, input: ids",
    "SharedSpec": "shared",
    "PrecisionSpec": "precision",
    "TopologySpec": "topology",
    "TargetSpec": "target",
}

INTRODUCTION = """\
# The spec

<!-- Made by `mokgen schema --markdown` from mokgen/spec/; do not edit. -->

A spec is a YAML 1.2 file that describes one mixture-of-experts layer. `mokgen check FILE` tells whether it is legal;
every refusal names the place, the rule and the nearest legal values.

- Unknown and duplicate keys are refused. Types are exact: `4096.0`, `"4096"` and `true` are no whole numbers.
- `extends: other.yaml` (relative to the file) takes another spec as the base: maps merge by key, everything else
  replaces. A `null` means "as if not written", so it takes back what the base set.
- `--set router.top_k=4` on the command line goes last; its value is YAML.
- File names, comments and key order mean nothing: two specs of the same layer give the same kernels.
- A choice marked "no kernels yet" is legal and refused with the nearest choice that has kernels.

## Rules between fields

- `hidden_size`, `experts.intermediate_size` and `shared.intermediate_size` are multiples of 8 (16 bytes of bf16).
- These, and the merged width `shared.num * shared.intermediate_size`, are at most 1048576; `experts.num` at most 4096.
- `1 <= router.top_k <= experts.num`.
- `router.groups` divides `experts.num`; `top_groups` is at most `groups`; the kept groups hold at least `top_k`
  experts; `group_score: top2_sum` needs two experts in a group.
- `selection_bias` and `groups` work on scores before the choice, so they need `order: score_then_topk`.
- With `router.input: ids` only `top_k` and `weight_dtype` may stand in `router`.
- `topology.ep_size` divides `experts.num`; `transport: local` has one rank.
- `determinism: batch_invariant` excludes `capacity: drop`.
- `max_tokens_per_rank * top_k + 127 * experts.num` is below 2^31.
"""


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec file: that of `MoeSpec` and the loader's `extends`."""
    schema = MoeSpec.model_json_schema()
    schema["properties"]["extends"] = {"type": "string", "description": "Spec file taken as the base."}
    return schema


def markdown() -> str:
    """The text of docs/spec.md."""
    schema = MoeSpec.model_json_schema()
    parts = [INTRODUCTION, _section("Top level", schema, schema)]
    parts += [_section(f"`{SECTIONS[name]}`", schema["$defs"][name], schema) for name in SECTIONS]
    return "\n".join(parts)


def _section(title: str, model: dict[str, Any], schema: dict[str, Any]) -> str:
    lines = [f"## {title}", ""]
    if title != "Top level":
        lines += [model["description"], ""]
    lines += ["| field | values | default | meaning |", "|---|---|---|---|"]
    required = model.get("required", [])
    for name, entry in model["properties"].items():
        default = "required" if name in required else _default(entry.get("default"))
        lines.append(f"| `{name}` | {_values(entry, schema)} | {default} | {_meaning(entry, schema)} |")
    return "\n".join([*lines, ""])


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return "all defaults" if value else "`{}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value}`"


def _values(entry: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a field accepts, in words."""
    if "$ref" in entry or "oneOf" in entry:
        return "a map, see below"
    if "anyOf" in entry:
        return " or ".join(_values(option, schema) for option in entry["anyOf"])
    if "const" in entry:
        return f"`{entry['const']}`"
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    kind = entry.get("type")
    if kind == "array":
        return f"list of {_values(entry['items'], schema)}"
    if kind == "object":
        return f"map from names to {_values(entry['additionalProperties'], schema)}"
    bound = f" >= {entry['minimum']}" if "minimum" in entry else ""
    bound = f" > {entry['exclusiveMinimum']:g}" if "exclusiveMinimum" in entry else bound
    names = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "null": "null"}
    return names[str(kind)] + bound


def _meaning(entry: dict[str, Any], schema: dict[str, Any]) -> str:
    text = entry.get("description", "")
    if not text and "$ref" in entry:
        text = schema["$defs"][entry["$ref"].rsplit("/", 1)[1]]["description"]
    if not text and "oneOf" in entry:
        text = "How tokens choose experts."
    return " ".join(str(text).split()).replace("|", "\\|")
