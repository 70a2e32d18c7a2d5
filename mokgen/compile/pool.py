"""Compile all kernels of a directory in parallel processes and link them into one library."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mokgen import settings
from mokgen.compile.compiler import KernelReport, command, result_file
from mokgen.compile.loader import kernel_files
from mokgen.compile.toolchain import find_linker, toolchain, worker_environment
from mokgen.errors import CompileError, Diagnostic

LIBRARY = "kernels.so"
WORKER_SECONDS = 600  # a compile that takes longer is broken; the largest kernel needs about twenty
STDERR_TAIL = 4000  # characters of a dead worker's output shown in the error


@dataclass(frozen=True)
class Progress:
    """One step of a build, for a progress display."""

    kernel: str  # "" while linking
    state: str  # "started" | "finished" | "failed" | "linking"
    seconds: float
    report: KernelReport | None = None


ProgressCallback = Callable[[Progress], None]


def compile_bundle(
    directory: Path, arch: str, jobs: int | None = None, progress: ProgressCallback | None = None
) -> tuple[KernelReport, ...]:
    """Compile every kernel module of `directory` for `arch` and link `kernels.so` there.

    `progress` is called from worker threads, one call at a time per kernel. All failures are reported together.
    """
    toolchain()
    linker = find_linker()  # before the compiles: a missing linker must not cost a minute
    files = kernel_files(directory)
    if not files:
        raise CompileError("no kernel module (ARGUMENTS and launch) in the directory", where=str(directory))
    tell = progress or (lambda step: None)
    workers = min(jobs or settings.JOBS.get(), len(files))
    largest_first = sorted(files, key=lambda path: (-path.stat().st_size, path.name))
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="mokgen-compile") as executor:
        outcomes = list(executor.map(lambda path: _compile_one(path, arch, directory, tell), largest_first))
    failures = [outcome for outcome in outcomes if isinstance(outcome, Diagnostic)]
    if failures:
        raise CompileError(failures)
    reports = sorted((item for item in outcomes if isinstance(item, KernelReport)), key=lambda item: item.kernel)
    tell(Progress("", "linking", 0.0))
    link(linker, [directory / report.object for report in reports], directory / LIBRARY)
    for report in reports:
        (directory / report.object).unlink()
        result_file(report.kernel, arch, directory).unlink()
    return tuple(reports)


def _compile_one(path: Path, arch: str, out: Path, tell: ProgressCallback) -> KernelReport | Diagnostic:
    """Run one worker process; a crash of the compiler ends that process only."""
    line = command(path, arch, out)
    result = result_file(path.stem, arch, out)
    result.unlink(missing_ok=True)
    tell(Progress(path.stem, "started", 0.0))
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, env=worker_environment(), timeout=WORKER_SECONDS, check=False
        )
        output, code = (done.stdout + done.stderr)[-STDERR_TAIL:], done.returncode
    except subprocess.TimeoutExpired:
        output, code = f"no result after {WORKER_SECONDS} s", -1
    seconds = time.perf_counter() - begin
    outcome = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "report" in outcome and code == 0:
        report = KernelReport.from_dict(outcome["report"])
        tell(Progress(path.stem, "finished", seconds, report))
        return report
    tell(Progress(path.stem, "failed", seconds))
    message = outcome.get("error") or f"the compiler process ended with code {code}\n{output}"
    return Diagnostic(what=message, where=str(path), hint=f"repeat with: {shlex.join(line)}")


def link(linker: Path, objects: list[Path], library: Path) -> None:
    """Link TVM-FFI objects; their undefined symbols are resolved when the library is loaded."""
    line = [str(linker), "-shared", "-Wl,--build-id=none", "-o", str(library), *map(str, objects)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"linking failed: {done.stderr.strip()}", where=str(library), hint=shlex.join(line))
