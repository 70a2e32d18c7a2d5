"""`build`: runs the driver for every spec and architecture, shows progress, ends with what came out."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mokgen.cli.output import Output, error_console, report
from mokgen.cli.specs import Selection, chosen_archs, load
from mokgen.errors import EXIT_FINDING, EXIT_OK, MokgenError

if TYPE_CHECKING:
    from mokgen.compile.pool import Progress
    from mokgen.driver import BuildResult

GENERATED = Path("generated")


@dataclass(frozen=True)
class BuildOptions:
    """The options of `build` beyond the spec itself."""

    out: Path | None
    emit_only: bool
    standalone: bool
    jobs: int | None

    @property
    def text_folder(self) -> Path | None:
        """Where text goes: --out, or generated/ where text is what was asked for."""
        return GENERATED if self.out is None and (self.emit_only or self.standalone) else self.out


def run(specs: Sequence[str], selection: Selection, wanted: BuildOptions, output: Output) -> int:
    """Build every spec; a spec that fails does not keep the others from being built."""
    code, results, failures = EXIT_OK, [], []
    for name in specs:
        try:
            for arch in chosen_archs(selection, load(name, selection).target.archs):
                result = _build_one(name, arch, selection, wanted, output)
                results.append((name, result))
                _print_result(name, result, output)
                code = max(code, EXIT_FINDING if result.findings else EXIT_OK)
        except MokgenError as error:
            code = max(code, error.exit_code)
            failures.append({"spec": name, **error.to_dict()})
            if not output.as_json:
                report(error, False)
    if results and not wanted.emit_only and code == EXIT_OK:
        name = results[0][0]
        output.print(f"\nnext: mokgen test {name}")
    output.document(
        {"ok": code == EXIT_OK, "builds": [_document(name, result) for name, result in results], "failures": failures}
    )
    return code


def _build_one(name: str, arch: str, selection: Selection, wanted: BuildOptions, output: Output) -> BuildResult:
    from mokgen.driver import build

    spec = load(name, selection) if selection.reduced else name
    with _Display(output) as display:
        return build(
            spec,
            arch=arch,
            overrides=() if selection.reduced else selection.overrides,
            out=wanted.text_folder,
            emit_only=wanted.emit_only,
            standalone=wanted.standalone,
            jobs=wanted.jobs,
            progress=display.step,
        )


class _Display:
    """One line per kernel on stderr: live on a terminal, a line at each end elsewhere; nothing with --json."""

    def __init__(self, output: Output) -> None:
        self._quiet = output.as_json
        self._lock = threading.Lock()  # steps come from several threads
        self._live: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Display:
        if not self._quiet and error_console().is_terminal:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._live = Progress(*columns, console=error_console(), transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: Progress) -> None:
        """Called by the compiler's pool for every change of state."""
        if self._quiet:
            return
        name = step.kernel or "kernels.so"
        with self._lock:
            if self._live is not None and step.state in {"started", "linking"}:
                self._tasks[name] = self._live.add_task(f"{step.state:<8} {name}", total=1)
            elif self._live is not None and name in self._tasks:
                self._live.update(self._tasks[name], description=f"{step.state:<8} {name}", completed=1)
            elif self._live is None and step.state in {"finished", "failed"}:
                error_console().print(f"{step.state} {name} after {step.seconds:.1f} s")


def _print_result(name: str, result: BuildResult, output: Output) -> None:
    if result.artifact_dir is not None:
        how = "cache hit" if result.cache_hit else "built, cache miss"
        how += "" if result.cached else " (the cache cannot be written; this artifact is temporary)"
        output.print(f"{name} for {result.arch}: {how}, {result.seconds:.1f} s")
        output.table(
            "",
            ("kernel", "registers", "spill bytes", "stack bytes", "shared memory bytes", "compile s"),
            [
                (
                    each.kernel,
                    _known(each.registers),
                    _known(each.spill_bytes),
                    _known(each.stack),
                    each.smem_bytes,
                    f"{each.seconds:.1f}",
                )
                for each in result.kernels
            ],
        )
        output.print(f"artifact: {result.artifact_dir}")
    for folder in dict.fromkeys(path.parent for path in result.files):
        names = " ".join(path.name for path in result.files if path.parent == folder)
        output.print(f"text: {os.path.relpath(folder)}: {names}")
    for finding in result.findings:
        output.print(f"finding: {finding}")


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _document(name: str, result: BuildResult) -> dict[str, Any]:
    return {
        "spec": name,
        "stem": result.stem,
        "arch": result.arch,
        "artifact": None if result.artifact_dir is None else str(result.artifact_dir),
        "cache_hit": result.cache_hit,
        "cached": result.cached,
        "seconds": round(result.seconds, 3),
        "build_key": result.build_key,
        "layer_key": result.layer_key,
        "kernels": [each.to_dict() for each in result.kernels],
        "findings": list(result.findings),
        "files": [str(path) for path in result.files],
    }
