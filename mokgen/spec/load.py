"""Reads a spec from YAML 1.2: places of every key, no duplicate keys, `extends:`, `--set a.b=c` last.

Merging is by key: maps merge, everything else replaces, and `null` means "as if not written" (so it takes back what a
base file set). File names, comments and key order leave no trace in the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from mokgen.errors import Diagnostic, MokgenError, PlanError, SpecError, UsageError
from mokgen.settings import shipped
from mokgen.spec.messages import Path as KeyPath
from mokgen.spec.messages import Positions, diagnostics, did_you_mean, position
from mokgen.spec.moe import MoeSpec


@dataclass
class _Tree:
    """Plain data of a spec with the place every key was last written at."""

    data: dict[str, Any] = field(default_factory=dict)
    positions: dict[KeyPath, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedSpec:
    """A spec with the places of its keys, for errors that later steps raise about a field."""

    spec: MoeSpec
    file: Path
    positions: Positions

    def located(self, error: MokgenError) -> MokgenError:
        """The same error with file:line:column where a diagnostic's `where` is a field of the spec.

        A PlanError about fields alone, such as an unknown knob, is a fault of the spec and becomes a SpecError.
        """
        found, all_known = [], True
        for entry in error.diagnostics:
            path = tuple(entry.where.split("."))
            known = path[0] in type(self.spec).model_fields
            all_known = all_known and known
            where = f"{position(self.positions, path, str(self.file))}: {entry.where}" if known else entry.where
            found.append(Diagnostic(entry.what, where, entry.hint))
        return SpecError(found) if all_known and isinstance(error, PlanError) else type(error)(found)


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> MoeSpec:
    """The spec in a YAML file, or the one mokgen ships under that name; `overrides` are texts as "router.top_k=4"."""
    return load_with_places(path, overrides).spec


def load_with_places(path: str | Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """`load_spec`, keeping where each key stands."""
    file = find_spec(path)
    tree = _read(file, ())
    for override in overrides:
        _merge(tree, _parse_override(override), ())
    try:
        spec = MoeSpec.model_validate(tree.data)
    except ValidationError as error:
        raise SpecError(diagnostics(error, tree.data, MoeSpec, tree.positions, str(file))) from None
    return LoadedSpec(spec, file, tree.positions)


def find_spec(path: str | Path) -> Path:
    """The file meant by a path or by a bare name of a shipped spec ("dsv3")."""
    given = Path(path)
    if given.is_file():
        return given
    names = shipped_names()
    if str(given) in names:
        return shipped("specs") / f"{given}.yaml"
    raise UsageError(
        f"no spec file {given}{did_you_mean(given.stem, names)}",
        "arguments",
        f"a YAML file, or one of {', '.join(names)}",
    )


def shipped_names() -> list[str]:
    """Names of the specs that come with mokgen, those in folders as "ablations/dsv3_top4"."""
    root = shipped("specs")
    return sorted(str(file.relative_to(root).with_suffix("")) for file in root.rglob("*.yaml"))


def _read(file: Path, chain: tuple[Path, ...]) -> _Tree:
    """One file on top of what it extends."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "arguments", "a text file in UTF-8") from None
    node = _parse(text, str(file))
    if not isinstance(node, CommentedMap):
        raise SpecError("a spec is a map of keys", f"{file}:1:1", "start with hidden_size: ...")
    own = _Tree()
    own.data = _plain(node, (), str(file), own.positions)
    base_name = own.data.pop("extends", None)
    if base_name is None:
        return _without_nulls(own)
    place = own.positions[("extends",)]
    if not isinstance(base_name, str):
        raise SpecError("extends: one file name", place, "extends: dsv3.yaml")
    base_file = file.parent / base_name
    if base_file.resolve() in (*chain, file.resolve()):
        raise SpecError(f"extends: {base_name} leads back to itself", place, "a spec may not extend itself")
    if not base_file.is_file():
        raise SpecError(f"extends: no file {base_file}", place, "a path relative to the file that extends")
    tree = _read(base_file, (*chain, file.resolve()))
    _merge(tree, own, ())
    return tree


def _without_nulls(own: _Tree) -> _Tree:
    tree = _Tree()
    _merge(tree, own, ())
    return tree


def _merge(base: _Tree, top: _Tree, at: tuple[str, ...]) -> None:
    """Lay `top` over `base` in place, below the path `at`."""
    target, source = base.data, top.data
    for key in at:
        target, source = target[key], source[key]
    for key, value in source.items():
        path = (*at, key)
        base.positions.update({known: place for known, place in top.positions.items() if known[: len(path)] == path})
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge(base, top, path)
        else:
            target[key] = value


def _parse(text: str, name: str) -> Any:
    yaml = YAML(typ="rt", pure=True)
    yaml.version = (1, 2)
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        raise SpecError(_first_line(error.problem), _mark(error, name), "keep one of the two") from None
    except MarkedYAMLError as error:
        raise SpecError(f"not YAML: {_first_line(error.problem)}", _mark(error, name), "") from None
    except RecursionError:
        raise SpecError("nested too deeply", f"{name}:1:1", "a spec has two levels") from None
    except YAMLError as error:
        raise SpecError(f"not YAML: {_first_line(str(error))}", f"{name}:1:1", "") from None


def _first_line(text: str | None) -> str:
    return (text or "unreadable").splitlines()[0]


def _mark(error: MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else f"{name}:1:1"


def _plain(node: Any, at: KeyPath, name: str, positions: dict[KeyPath, str]) -> Any:
    """Plain Python data of a YAML node; notes the place of every key and item below it."""
    if isinstance(node, TaggedScalar) or isinstance(node, CommentedMap | CommentedSeq) and node.tag.value:
        raise SpecError(f"the YAML tag {node.tag.value} is not known", positions.get(at, name), "plain values only")
    if isinstance(node, CommentedMap):
        result: dict[str, Any] = {}
        for key, value in node.items():
            place = _place(node, key, name) or positions.get(at, f"{name}:1:1")
            if not isinstance(key, str):
                raise SpecError(f"the key {key!r} is not a word", place, "keys are field names")
            positions[(*at, key)] = place
            result[key] = _plain(value, (*at, key), name, positions)
        return result
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            line, column = node.lc.item(index)
            positions[(*at, index)] = f"{name}:{line + 1}:{column + 1}"
        return [_plain(item, (*at, index), name, positions) for index, item in enumerate(node)]
    if isinstance(node, ScalarBoolean):
        return bool(node)
    for plain in (bool, int, float, str):  # ruamel keeps the writing of a number or text in a subclass
        if isinstance(node, plain):
            return plain(node)
    if node is None:
        return None
    raise SpecError(f"{node!r} is no value of a spec", positions.get(at, name), "numbers, words, lists and maps")


def _place(node: CommentedMap, key: Any, name: str) -> str:
    """file:line:column of a key; empty for a key that a YAML merge brought in."""
    try:
        line, column = node.lc.key(key)
    except (KeyError, AttributeError, TypeError):  # TypeError: a map of merged keys only has no places at all
        return ""
    return f"{name}:{line + 1}:{column + 1}"


def _parse_override(text: str) -> _Tree:
    """The tree that "a.b=c" means, c being YAML."""
    place = f"--set {text}"
    keys, equals, value = text.partition("=")
    parts = [part.strip() for part in keys.split(".")]
    if not equals or not all(parts):
        raise SpecError("not of the form field=value", place, "as --set router.top_k=4")
    if parts[0] == "extends":
        raise SpecError("extends: stands in a file only", place, "a file with extends: and the lines that change")
    tree = _Tree()
    path = tuple(parts)
    leaf = _plain(_parse(value, place), path, place, tree.positions)
    for known in list(tree.positions):
        tree.positions[known] = place
    node = tree.data
    for depth, part in enumerate(parts[:-1], start=1):
        tree.positions[path[:depth]] = place
        node = node.setdefault(part, {})
    tree.positions[path] = place
    node[parts[-1]] = leaf
    return tree
