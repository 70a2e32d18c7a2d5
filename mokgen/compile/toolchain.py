"""What compiles kernels here: package versions, the active CUDA flavour, external tools.

Never imports the CuTe DSL: a cache hit has to know the versions without paying for the compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from mokgen import settings
from mokgen.errors import ToolchainError

DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_VERSION = "4.8.1"  # the only version the device library is written for: 4.6-4.7 elect bulk copies differently
COMPILER_PACKAGES = (
    DSL_PACKAGE,
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "apache-tvm-ffi",
)
FLAVOUR_PACKAGES = {"cu12": "nvidia-cutlass-dsl-libs-cu12", "cu13": "nvidia-cutlass-dsl-libs-cu13"}
DSL_ENVIRONMENT = ("CUTE_DSL_", "CUTLASS_DSL_")  # removed for every worker, so they need no place in a key
COMPILE_OPTIONS = ("--opt-level 3", "--enable-tvm-ffi")
LINKERS = ("gcc", "cc")


@dataclass(frozen=True)
class Toolchain:
    """Stamp of everything besides text and options that decides the bytes of an object."""

    flavour: str  # "cu12" | "cu13": which CUDA toolkit is inside the compiler
    versions: tuple[tuple[str, str], ...]  # (package, version), sorted
    options: tuple[str, ...] = COMPILE_OPTIONS

    def to_dict(self) -> dict[str, Any]:
        return {"flavour": self.flavour, "versions": dict(self.versions), "options": list(self.options)}


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """Stamp of the installed compiler, or a ToolchainError that names what to install."""
    versions = {name: version for name in COMPILER_PACKAGES if (version := installed_version(name)) is not None}
    missing = [name for name in COMPILER_PACKAGES if name not in versions]
    if missing:
        raise ToolchainError(
            f"cannot compile: {', '.join(missing)} not installed for {sys.executable}",
            where="toolchain",
            hint=f"pip install {DSL_PACKAGE}=={DSL_VERSION} apache-tvm-ffi, or load an artifact built elsewhere",
        )
    if versions[DSL_PACKAGE] != DSL_VERSION:
        raise ToolchainError(
            f"{DSL_PACKAGE} {versions[DSL_PACKAGE]} is installed, kernels are written for {DSL_VERSION}",
            where="toolchain",
            hint=f"pip install {DSL_PACKAGE}=={DSL_VERSION}",
        )
    flavour = active_flavour()
    versions[FLAVOUR_PACKAGES[flavour]] = str(installed_version(FLAVOUR_PACKAGES[flavour]))
    return Toolchain(flavour, tuple(sorted(versions.items())))


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def active_flavour() -> str:
    """Flavour the CuTe DSL will choose: the newest installed one that the driver can run, any without a driver."""
    installed = [name for name, package in FLAVOUR_PACKAGES.items() if installed_version(package)]
    if not installed:
        raise ToolchainError(
            f"no compiler flavour installed: neither {' nor '.join(FLAVOUR_PACKAGES.values())}",
            where="toolchain",
            hint=f"pip install {DSL_PACKAGE}=={DSL_VERSION}",
        )
    driver = _driver_cuda_major()
    usable = [name for name in installed if driver is None or int(name.removeprefix("cu")) <= driver]
    if not usable:
        raise ToolchainError(
            f"the driver supports CUDA {driver}, installed compiler flavours are {', '.join(installed)}",
            where="toolchain",
            hint="install an older flavour or a newer driver",
        )
    return max(usable)


def _driver_cuda_major() -> int | None:
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None


def find_tool(name: str) -> Path | None:
    """Path of cuobjdump or nvdisasm: the pip packages of the `sass` extra first, then PATH."""
    spec = util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}"), reverse=True):
            return path
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def find_linker() -> Path:
    """Path of the C compiler driver that links objects into one library."""
    for name in LINKERS:
        path = shutil.which(name)
        if path:
            return Path(path)
    raise ToolchainError(
        f"no linker: neither {' nor '.join(LINKERS)} is on PATH",
        where="toolchain",
        hint="install gcc (Debian, Ubuntu: apt-get install gcc), or load an artifact built elsewhere",
    )


def worker_environment() -> dict[str, str]:
    """Environment of a compile process: ours without the DSL's own switches, with this mokgen importable."""
    changes: dict[str, str | None] = {name: None for name in settings.with_prefix(*DSL_ENVIRONMENT)}
    return settings.python_environment(**changes, PYTHONSAFEPATH="1")
