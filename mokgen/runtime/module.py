"""Load `kernels.so` of an artifact on a machine that needs no compiler.

Owns the order of loading: manifest, file hash, architecture, CuTe runtime library, then the kernels through TVM-FFI.
Never imports `cutlass`. The runtime library is NVIDIA's and comes from the user's own installation.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path

from mokgen.cache.key import ABI
from mokgen.cache.manifest import Manifest, ManifestError, damaged_files, read_manifest
from mokgen.errors import ArtifactMismatchError, ToolchainError

logger = logging.getLogger(__name__)

RUNTIME_NAME = "libcute_dsl_runtime.so"
RUNTIME_PACKAGE = "nvidia_cutlass_dsl"  # import name of the folder that the libs packages share
FLAVOURS = ("cu13", "cu12")


@dataclass(frozen=True)
class RuntimeFile:
    """One copy of the CuTe runtime library. `version` is None if nothing beside the file tells it."""

    path: Path
    package: str
    version: str | None

    def __str__(self) -> str:
        return f"{self.package} {self.version or 'of unknown version'} ({self.path})"


@dataclass(frozen=True)
class Kernels:
    """The callable kernels of one artifact: `kernels.functions["forward"](x, ...)`, on torch's current stream."""

    directory: Path
    manifest: Manifest
    functions: Mapping[str, Callable[..., None]]
    runtime: RuntimeFile


def load_kernels(artifact_dir: Path | str, device: int | None = None) -> Kernels:
    """Load an artifact's kernels for `device` (default: the current CUDA device; none is needed to load).

    Equal directories with equal content are loaded once per process.
    """
    directory = Path(artifact_dir).resolve()
    try:
        manifest = read_manifest(directory)
    except ManifestError as error:
        raise ArtifactMismatchError(str(error), where=str(directory), hint="build the layer again") from error
    if manifest.abi != ABI:
        raise ArtifactMismatchError(
            f"artifact has ABI {manifest.abi}, this mokgen reads ABI {ABI}",
            where=str(directory),
            hint="build the layer again with this mokgen, or install the mokgen that built it",
        )
    if manifest.library not in manifest.files or damaged_files(directory, manifest, [manifest.library]):
        raise ArtifactMismatchError(
            f"{manifest.library} is not the file the manifest describes",
            where=str(directory),
            hint="the artifact is damaged: copy or build it again",
        )
    check_arch(manifest.arch, device, str(directory))
    return _load(directory, manifest.files[manifest.library])


@lru_cache(maxsize=None)
def _load(directory: Path, library_hash: str) -> Kernels:
    """Load once per directory and library; `library_hash` is part of the cache key only."""
    manifest = read_manifest(directory)
    runtime = load_runtime(manifest.runtime_library.packages, manifest.runtime_library.versions)
    try:
        import tvm_ffi
    except ImportError as error:
        raise ToolchainError(
            "apache-tvm-ffi is not installed", where=str(directory), hint="pip install apache-tvm-ffi"
        ) from error
    try:
        library = tvm_ffi.load_module(directory / manifest.library)
        functions = {name: library.get_function(kernel.function) for name, kernel in manifest.kernels.items()}
    except (RuntimeError, AttributeError) as error:
        raise ArtifactMismatchError(
            f"{manifest.library} does not load: {error}", where=str(directory), hint=f"runtime library: {runtime}"
        ) from error
    return Kernels(directory, manifest, functions, runtime)


# --- architecture -----------------------------------------------------------------------------------------------------


def check_arch(arch: str, device: int | None, where: str) -> None:
    """Refuse an artifact for another GPU; passes where there is no GPU, since nothing can be launched there."""
    import torch

    if not torch.cuda.is_available():
        return
    have = arch_of(torch.cuda.get_device_capability(device))
    # `sm_90a` code runs on compute capability 9.0 only; the letter is part of our name, not of the device's.
    if have.rstrip("af") != arch.rstrip("af"):
        raise ArtifactMismatchError(
            f"built for {arch}, device is {have}", where=where, hint=f"mokgen build SPEC --arch {have}"
        )


def arch_of(capability: tuple[int, int]) -> str:
    """Name of the architecture-specific target of a compute capability: (9, 0) -> sm_90a, (8, 0) -> sm_80."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


# --- CuTe runtime library ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=None)
def load_runtime(packages: tuple[str, ...], versions: tuple[str, ...]) -> RuntimeFile:
    """Make the symbols of an accepted CuTe runtime library global in this process, and say which copy it is.

    A copy that the process already holds decides: with two versions loaded, symbols of our library could bind to
    either.
    """
    loaded = loaded_runtimes()
    for runtime in loaded:
        if runtime.version is not None and runtime.version not in versions:
            raise ArtifactMismatchError(
                f"this process already uses {runtime}; the artifact accepts {' or '.join(versions)}",
                where=RUNTIME_NAME,
                hint="load the artifact in a process without the other CuTe DSL library, or build it again",
            )
    chosen = loaded[0] if loaded else choose_runtime(installed_runtimes(), packages, versions)
    try:
        # RTLD_GLOBAL also promotes a copy that was loaded with local symbols.
        ctypes.CDLL(str(chosen.path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(f"cannot load {chosen}: {error}", where=RUNTIME_NAME) from error
    return chosen


def choose_runtime(installed: list[RuntimeFile], packages: tuple[str, ...], versions: tuple[str, ...]) -> RuntimeFile:
    """First accepted copy; `installed` comes in order of preference. A copy of unknown version is the last resort."""
    named = [runtime for runtime in installed if runtime.version in versions]
    unknown = [runtime for runtime in installed if runtime.version is None]
    if named:
        return named[0]
    if unknown:
        logger.warning("%s: version unknown, the artifact accepts %s", unknown[0], " or ".join(versions))
        return unknown[0]
    wanted = " or ".join(packages)
    if installed:
        raise ArtifactMismatchError(
            f"installed is {installed[0]}; the artifact accepts version {' or '.join(versions)}",
            where=RUNTIME_NAME,
            hint=f"pip install {packages[0]}=={versions[-1]}, or build the artifact again",
        )
    raise ToolchainError(
        f"{RUNTIME_NAME} not found: neither {wanted} is installed",
        where=RUNTIME_NAME,
        hint=f"pip install {preferred_package(packages)}=={versions[-1]}",
    )


def preferred_package(packages: tuple[str, ...]) -> str:
    """The package whose flavour fits this torch."""
    flavour = flavour_order()[0]
    return next((package for package in packages if package.endswith(flavour)), packages[0])


def flavour_order() -> tuple[str, ...]:
    """Flavours to try: that of torch's CUDA first. Objects of either flavour run with either runtime library."""
    import torch

    cuda = torch.version.cuda
    first = f"cu{cuda.partition('.')[0]}" if cuda else FLAVOURS[0]
    return tuple(sorted(FLAVOURS, key=lambda flavour: flavour != first))


def installed_runtimes() -> list[RuntimeFile]:
    """Copies on the import path, found by their files: a path given by PYTHONPATH may lack package metadata."""
    spec = util.find_spec(RUNTIME_PACKAGE)  # a namespace package: finding it runs no code
    roots = [Path(root) for root in (spec.submodule_search_locations or () if spec else ())]
    found = []
    for folder in (*flavour_order(), ""):  # releases before 4.6 had one library and no flavour folder
        for root in roots:
            path = root / folder / "lib" / RUNTIME_NAME
            if path.is_file():
                found.append(describe_runtime(path))
    return found


def describe_runtime(path: Path) -> RuntimeFile:
    """Package and version of a runtime library file, from the metadata folder beside its package."""
    flavour = path.parent.parent.name
    package = f"nvidia-cutlass-dsl-libs-{flavour if flavour in FLAVOURS else 'base'}"
    site = path.parents[3 if flavour in FLAVOURS else 2]
    stem = package.replace("-", "_")
    for folder in sorted(site.glob(f"{stem}-*.dist-info"), reverse=True):
        return RuntimeFile(path, package, folder.name.removeprefix(f"{stem}-").removesuffix(".dist-info"))
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return RuntimeFile(path, package, None)
    return RuntimeFile(path, package, distribution.version if _owns(distribution, path) else None)


def _owns(distribution: metadata.Distribution, path: Path) -> bool:
    return any(Path(str(file.locate())).resolve() == path.resolve() for file in distribution.files or ())


def loaded_runtimes() -> list[RuntimeFile]:
    """Copies that this process has mapped, whoever loaded them."""
    return [describe_runtime(path) for path in dict.fromkeys(_mapped_runtimes())]


def _mapped_runtimes() -> Iterator[Path]:
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux: nothing can be known
        return
    for match in re.finditer(rf"(/\S.*/{re.escape(RUNTIME_NAME)})$", text, re.M):
        yield Path(match[1])
