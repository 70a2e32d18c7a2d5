"""The two keys of an artifact and the device modules that enter the first.

A key is the SHA-256 of canonical JSON. Never in a key: YAML text, file names, mokgen's version, git state, time.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ABI = 1  # raised when the meaning of a kernel's arguments or of the workspace changes
DEVICE_PACKAGE = "mokgen.device"


def canonical_json(data: Any) -> str:
    """JSON text that depends on the data only: sorted keys, no spaces, no NaN or infinity, ASCII."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def digest(data: Any) -> str:
    """SHA-256 of canonical JSON, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(data).encode("ascii")).hexdigest()


def layer_key(layer: Mapping[str, Any], plan: Mapping[str, Any], arch: str) -> str:
    """What a load looks up: the resolved layer, its plan, architecture and ABI; no compiler needed to know it."""
    return digest({"layer": layer, "plan": plan, "arch": arch, "abi": ABI})


def build_key(
    files: Mapping[str, str],
    device_hash: str,
    toolchain: Mapping[str, Any],
    arch: str,
    layer: str,
) -> str:
    """What a build looks up. `files` is the rendered text by name, `toolchain` includes the compile options.

    `layer` is the layer key: an entry also stores layer and plan, which a hit must not take from another layer.
    """
    return digest(
        {
            "files": {name: hashlib.sha256(text.encode("utf-8")).hexdigest() for name, text in files.items()},
            "device": device_hash,
            "toolchain": toolchain,
            "arch": arch,
            "layer": layer,
            "abi": ABI,
        }
    )


def device_modules(texts: Iterable[str], root: Path | None = None) -> dict[str, Path]:
    """Device modules that the texts import, directly or through each other: dotted name -> file, sorted by name.

    Packages on the way (`__init__.py`) are included, since importing a module runs them. `root` is the folder of
    `mokgen.device`.
    """
    root = root or Path(__file__).resolve().parents[1] / "device"
    found: dict[str, Path] = {}
    todo: list[str] = []
    for text in texts:
        todo += _imported(text, "", root)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        path = _module_file(name, root)
        if path is None:
            raise ValueError(f"{name} is imported and does not exist under {root}")
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        todo += _imported(path.read_text(encoding="utf-8"), package, root)
        if name != DEVICE_PACKAGE:
            todo.append(name.rpartition(".")[0])
    return dict(sorted(found.items()))


def hash_modules(modules: Mapping[str, Path]) -> str:
    """Fingerprint of device modules by name and bytes."""
    return digest({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in modules.items()})


def _imported(text: str, package: str, root: Path) -> list[str]:
    """Names of device modules in the import statements of `text`, which belongs to `package`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parent = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{parent}.{base}" if base else parent
            names.append(base)
            # `from package import name` may mean a module or something defined in the package.
            names += [f"{base}.{alias.name}" for alias in node.names if _module_file(f"{base}.{alias.name}", root)]
    return [name for name in names if name == DEVICE_PACKAGE or name.startswith(DEVICE_PACKAGE + ".")]


def _module_file(name: str, root: Path) -> Path | None:
    if name != DEVICE_PACKAGE and not name.startswith(DEVICE_PACKAGE + "."):
        return None
    place = root.joinpath(*name.split(".")[2:])
    for path in (place.with_suffix(".py") if place != root else place / "__init__.py", place / "__init__.py"):
        if path.is_file():
            return path
    return None
