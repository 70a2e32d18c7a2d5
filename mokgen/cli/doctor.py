"""`mokgen doctor`: what this machine has for compiling, inspecting, loading and running kernels."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

from mokgen.cli.output import Output
from mokgen.errors import EXIT_TOOLCHAIN, MokgenError

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class Check:
    """One line of the report; `missing` fails the command, `warning` names what will not work."""

    name: str
    state: str
    found: str
    hint: str = ""


def run(output: Output) -> int:
    checks = [check() for check in CHECKS]
    output.table("", ("", "state", "found"), [(each.name, each.state, each.found) for each in checks])
    for each in checks:
        if each.hint:
            output.print(f"{each.name}: {each.hint}")
    bad = any(each.state == MISSING for each in checks)
    output.document({"ok": not bad, "checks": [asdict(each) for each in checks]})
    return EXIT_TOOLCHAIN if bad else 0


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 11):
        return Check("python", OK, version)
    return Check("python", MISSING, version, "mokgen needs Python 3.11 or newer")


def _torch() -> Check:
    """Imported, not looked up: an installation that cannot be imported is none."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", MISSING, str(error).splitlines()[0], "pip install torch")
    return Check("torch", OK, f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})")


def _compiler() -> Check:
    from mokgen.compile.toolchain import FLAVOUR_PACKAGES, installed_version, toolchain

    try:
        stamp = toolchain()
    except MokgenError as error:
        return Check("CuTe DSL", MISSING, error.what, error.hint)
    versions = dict(stamp.versions)
    flavours = [name for name, package in FLAVOUR_PACKAGES.items() if installed_version(package)]
    text = f"{versions['nvidia-cutlass-dsl']}, flavours {', '.join(flavours)}; compiles with {stamp.flavour}"
    return Check("CuTe DSL", OK, text)


def _tvm_ffi() -> Check:
    try:
        return Check("apache-tvm-ffi", OK, metadata.version("apache-tvm-ffi"))
    except metadata.PackageNotFoundError:
        return Check("apache-tvm-ffi", MISSING, "not installed", "pip install apache-tvm-ffi")


def _linker() -> Check:
    from mokgen.compile.toolchain import find_linker

    try:
        linker = find_linker()
    except MokgenError as error:
        return Check("linker", MISSING, error.what, error.hint)
    return Check("linker", OK, _first_line([str(linker), "--version"]) or str(linker))


def _sass_tools() -> Check:
    from mokgen.compile.toolchain import find_tool

    found = {name: find_tool(name) for name in ("cuobjdump", "nvdisasm")}
    absent = [name for name, path in found.items() if path is None]
    if absent:
        hint = 'instruction counts in reports need them: pip install "mokgen[sass]"'
        return Check("SASS tools", WARNING, f"no {', '.join(absent)}", hint)
    return Check("SASS tools", OK, ", ".join(str(path) for path in found.values()))


def _gpu() -> Check:
    from mokgen.facts.arch import ARCHS

    try:
        import torch
    except (ImportError, OSError):
        return Check("GPU", WARNING, "unknown without torch")
    if not torch.cuda.is_available():
        return Check("GPU", WARNING, "none", "kernels build here; layers run by the CPU executor")
    names, fits = [], False
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (compute capability {capability[0]}.{capability[1]})")
        fits = fits or any(traits.capability == capability for traits in ARCHS.values())
    hint = "" if fits else f"kernels exist for {', '.join(ARCHS)} only"
    return Check("GPU", OK if fits else WARNING, ", ".join(names), hint)


def _cache() -> Check:
    from mokgen.cache.store import cache_path, list_entries

    path = cache_path()
    try:
        number = len(list_entries())
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check("cache", WARNING, f"{path}: {error.strerror}", "set MOKGEN_CACHE_DIR to a directory of yours")
    return Check("cache", OK, f"{path}, {number} artifacts")


def _specs() -> Check:
    from mokgen.settings import shipped
    from mokgen.spec.load import shipped_names

    names, templates = shipped_names(), shipped("templates")
    if not names or not any(templates.glob("*.jinja")):
        return Check("data files", MISSING, f"{shipped('specs')}, {templates}", "reinstall mokgen")
    return Check("data files", OK, f"{len(names)} specs, templates in {templates}")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return (done.stdout or done.stderr).splitlines()[0] if done.stdout or done.stderr else ""


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _torch,
    _compiler,
    _tvm_ffi,
    _linker,
    _sass_tools,
    _gpu,
    _cache,
    _specs,
)
