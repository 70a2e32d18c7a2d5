"""Every environment variable mokgen reads, typed; the only module that touches `os.environ`.

Tuning lives in the spec, never here. `affects_build` says whether a variable may change the files a build writes; those
that do not must never enter a cache key.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from mokgen.errors import UsageError

T = TypeVar("T")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: unset or empty means `default()`."""

    name: str
    parse: Callable[[str], T]
    default: Callable[[], T]
    allowed: str
    affects_build: bool
    meaning: str

    def get(self) -> T:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError:
            raise UsageError(f"{self.name}={text!r}", where="environment", hint=f"allowed: {self.allowed}") from None


def _user_cache() -> Path:
    import platformdirs  # costs milliseconds that `check` does not have to pay

    return Path(platformdirs.user_cache_dir("mokgen"))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _flag(text: str) -> bool:
    if text.lower() not in {"0", "1", "true", "false"}:
        raise ValueError(text)
    return text.lower() in {"1", "true"}


def _level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(text)
    return text.lower()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CACHE_DIR = Variable(
    "MOKGEN_CACHE_DIR",
    lambda text: Path(text).expanduser(),
    _user_cache,
    "a directory",
    False,
    "where artifacts are kept",
)
ARCH: Variable[tuple[str, ...]] = Variable(
    "MOKGEN_ARCH", _names, tuple, "architectures with commas, as sm_90a", True, "replaces target.archs of every spec"
)
JOBS = Variable("MOKGEN_JOBS", _positive, _usable_cores, "a number >= 1", False, "compile processes at a time")
LOG = Variable("MOKGEN_LOG", _level, lambda: "warning", ", ".join(LOG_LEVELS), False, "log level on stderr")
KEEP = Variable("MOKGEN_KEEP", _flag, lambda: False, "0 or 1", False, "keep the work directory of a failed build")
OFFLINE = Variable(
    "MOKGEN_OFFLINE", _flag, lambda: False, "0 or 1", False, "load from the cache only, never compile in load_layer"
)
VARIABLES: tuple[Variable[Any], ...] = (CACHE_DIR, ARCH, JOBS, LOG, KEEP, OFFLINE)


@contextmanager
def scope(**values: str | None) -> Iterator[None]:
    """Set environment variables (None removes one) for the length of a `with` block and restore them."""
    before = {name: os.environ.get(name) for name in values}
    _apply(values)
    try:
        yield
    finally:
        _apply(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def child_environment(**changes: str | None) -> dict[str, str]:
    """Environment for a child process: ours with `changes` applied (None removes a variable)."""
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def python_environment(**changes: str | None) -> dict[str, str]:
    """`child_environment` for a Python process: what is importable here is so there, this mokgen first.

    A checkout that is not installed is on nobody's path but that of the process whose working directory it is.
    """
    package_root = str(Path(__file__).resolve().parents[1])
    search = [package_root, *(entry for entry in sys.path if entry and Path(entry).is_dir())]
    return child_environment(**{"PYTHONPATH": os.pathsep.join(dict.fromkeys(search)), **changes})


def with_prefix(*prefixes: str) -> dict[str, str]:
    """Variables of other tools by prefix (as "CUTE_DSL_"), sorted: what the toolchain stamp has to know."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def shipped(folder: str) -> Path:
    """Directory of "templates" or "specs": inside an installed package, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "share" / folder
    return installed if installed.is_dir() else package.parent / folder
