"""manifest.json: what an artifact directory holds. It is written last, so a directory without one is unfinished.

Read by machines that have no compiler; this module therefore imports neither torch nor the CuTe DSL.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MANIFEST_NAME = "manifest.json"

Shape = tuple[int | str, ...]


class ManifestError(ValueError):
    """The directory has no readable manifest of this format; the message says which part is wrong."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Region(_Part):
    """One region of the workspace."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = Field(ge=0)


class Kernel(_Part):
    """One function of the library."""

    function: str
    arguments: tuple[tuple[str, str, Shape | None], ...]
    registers: int | None
    stack: int | None
    spill_bytes: int | None
    smem_bytes: int
    threads: int | None
    seconds: float
    local: int | None = None
    sass: dict[str, int] = {}


class RuntimeLibrary(_Part):
    """Packages that hold the CuTe runtime library, and their accepted versions."""

    packages: tuple[str, ...]
    versions: tuple[str, ...]


class Manifest(_Part):
    """The whole file. `layer` is ResolvedLayer.to_dict(); `files` maps relative names to SHA-256."""

    format: Literal[1] = 1
    abi: int
    stem: str
    arch: str
    build_key: str
    layer_key: str
    layer: dict[str, Any]
    workspace_bytes: int = Field(ge=0)
    regions: tuple[Region, ...]
    kernels: dict[str, Kernel]
    library: str
    files: dict[str, str]
    toolchain: dict[str, Any]
    device_hash: str = ""
    runtime_library: RuntimeLibrary


def read_manifest(directory: Path) -> Manifest:
    """Manifest of an artifact directory, or a ManifestError."""
    path = directory / MANIFEST_NAME
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ManifestError(f"{path}: {place + ': ' if place else ''}{first['msg']}") from error
    inside = [manifest.library, *manifest.files]
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in inside):
        raise ManifestError(f"{path}: names a file outside its directory")
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Fill in the hashes of all files present and write manifest.json by rename; returns what was written."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    files = {name: hash_file(directory / name) for name in names if name != MANIFEST_NAME}
    complete = manifest.model_copy(update={"files": files})
    temporary = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    temporary.write_text(complete.model_dump_json(indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, directory / MANIFEST_NAME)
    return complete


def hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def damaged_files(directory: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Names (default: all) whose file is missing or differs from the manifest's hash."""
    bad = []
    for name in manifest.files if names is None else names:
        path = directory / name
        if path.is_symlink() or not path.is_file() or hash_file(path) != manifest.files.get(name):
            bad.append(name)
    return bad
