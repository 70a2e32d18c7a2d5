"""Turns what pydantic reports into diagnostics a person can act on: place, field, value, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from mokgen.errors import Diagnostic
from mokgen.spec.rules import Fault

Path = tuple[str | int, ...]
Positions = Mapping[Path, str]

_SCALARS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a map of keys",
    "model_type": "a map of keys",
    "model_attributes_type": "a map of keys",
    "finite_number": "a finite number",
}
_BOUNDS = {"greater_than_equal": ("ge", ">="), "greater_than": ("gt", ">"), "less_than_equal": ("le", "<=")}


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def position(positions: Positions, path: Path, fallback: str) -> str:
    """Place of a path, or of the nearest enclosing key that has one (a missing key has none of its own)."""
    for length in range(len(path), 0, -1):
        if path[:length] in positions:
            return positions[path[:length]]
    return fallback


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for a word close to a known one, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def diagnostics(
    error: ValidationError, data: Mapping[str, Any], model: type[BaseModel], positions: Positions, file: str
) -> list[Diagnostic]:
    """One diagnostic per fault of `data`, sorted as the models list their fields."""
    faults: dict[str, Fault] = {}
    for entry in error.errors(include_url=False):
        if entry["type"] == "rules":
            faults.update({fault.field: fault for fault in entry["ctx"]["faults"]})
            continue
        path = _data_path(data, entry)
        fault = _fault(path, entry, data, model)
        # A union reports each of its members, a list its own length besides an item's fault: the first tells most.
        inside = any(name.startswith(fault.field + ".") for name in faults)
        if fault.field not in faults and not (entry["type"] == "too_short" and inside):
            faults[fault.field] = fault
    return [_diagnostic(fault, positions, file) for fault in faults.values()]


def _diagnostic(fault: Fault, positions: Positions, file: str) -> Diagnostic:
    path = tuple(int(part) if part.isdigit() else part for part in fault.field.split("."))
    return Diagnostic(f"{fault.field}: {fault.what}", position(positions, path, file), fault.hint)


def _data_path(data: Any, entry: Mapping[str, Any]) -> Path:
    """Pydantic's location without the names of union members, which are no keys of the file."""
    path: list[str | int] = []
    node = data
    parts = entry["loc"]
    for index, part in enumerate(parts):
        if isinstance(node, dict) and part in node or isinstance(node, list) and isinstance(part, int):
            node = node[part]
            path.append(part)
        elif index == len(parts) - 1 and entry["type"] == "missing":
            path.append(part)
    return tuple(path)


def _fault(path: Path, entry: Mapping[str, Any], data: Mapping[str, Any], model: type[BaseModel]) -> Fault:
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    field = dotted(path)
    if kind == "missing":
        return Fault(field, "missing", f"add {path[-1]}: to {dotted(path[:-1]) or 'the spec'}")
    if kind == "extra_forbidden":
        known = _known_keys(path[:-1], data, model)
        return Fault(field, f"unknown key{did_you_mean(str(path[-1]), known)}", _unknown_hint(path, data, known))
    if kind == "union_tag_not_found":
        return Fault(f"{field}.input", "missing", "add input: ids or input: logits")
    if kind == "union_tag_invalid":
        tags = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        return Fault(f"{field}.input", _not_one_of(context["tag"], tags), f"one of {', '.join(tags)}")
    if kind == "literal_error":
        names = [name.strip("' ") for name in context["expected"].replace(" or ", ", ").split(",")]
        return Fault(field, _not_one_of(value, names), f"one of {', '.join(names)}")
    if kind in _BOUNDS:
        key, sign = _BOUNDS[kind]
        return Fault(field, f"{show(value)} is out of range", f"{sign} {context[key]:g}")
    if kind == "too_short":
        return Fault(field, "an empty list", "at least one entry")
    wanted = "a whole number or text" if path[0] == "plan" and len(path) > 1 else _SCALARS.get(kind, entry["msg"])
    return Fault(field, f"{show(value)} is not {wanted}", _type_hint(value, wanted))


def _not_one_of(value: Any, names: list[str]) -> str:
    guess = did_you_mean(value, names) if isinstance(value, str) else ""
    return f"{show(value)} is not allowed{guess}"


def show(value: Any) -> str:
    """A value as a YAML file would show it, with the kind where the look deceives."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return "a list"
    return repr(value)


def _type_hint(value: Any, wanted: str) -> str:
    if isinstance(value, str) and wanted in {"a whole number", "a number"} and value.replace(".", "", 1).isdigit():
        return f"write {value} without quotes"
    if isinstance(value, float) and wanted == "a whole number" and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and wanted == "true or false":
        return "YAML 1.2 knows true and false only, not yes, no, on, off"
    return f"give {wanted}"


def _known_keys(path: Path, data: Mapping[str, Any], model: type[BaseModel]) -> list[str]:
    if not path:
        return [*model.model_fields, "extends"]
    if path == ("router",):
        from mokgen.spec.moe import RouterIds, RouterLogits

        chosen = RouterIds if data["router"]["input"] == "ids" else RouterLogits
        return list(chosen.model_fields)
    annotation = model.model_fields[str(path[0])].annotation
    return list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _unknown_hint(path: Path, data: Mapping[str, Any], known: list[str]) -> str:
    hint = f"allowed: {', '.join(known)}"
    if path[0] == "router" and data["router"]["input"] == "ids":
        hint += "; the other router fields belong to input: logits"
    return hint
