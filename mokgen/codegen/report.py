"""report.md of an artifact: what was planned and what came out of the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mokgen.codegen.templates import render


@dataclass(frozen=True)
class Section:
    """One part of the report; `language` fences the text ("text", "mermaid"), "" leaves it as Markdown."""

    title: str
    text: str
    language: str = ""


class CompiledKernel(Protocol):
    """What the report reads of a compiled kernel; compile.compiler.KernelReport has it."""

    @property
    def kernel(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def registers(self) -> int | None: ...
    @property
    def stack(self) -> int | None: ...
    @property
    def spill_bytes(self) -> int | None: ...
    @property
    def local(self) -> int | None: ...
    @property
    def smem_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def sass(self) -> Mapping[str, int]: ...
    def findings(self) -> tuple[str, ...]: ...


def render_report(
    stem: str,
    arch: str,
    summary: str,
    sections: Sequence[Section],
    kernels: Sequence[CompiledKernel],
    toolchain: Mapping[str, Any],
) -> str:
    """Markdown text of the report."""
    return render(
        "report.md.jinja",
        {
            "stem": stem,
            "arch": arch,
            "summary": summary,
            "sections": sections,
            "kernels": [_row(kernel) for kernel in kernels],
            "findings": [finding for kernel in kernels for finding in kernel.findings()],
            "toolchain": _flat(toolchain),
        },
    )


def _row(kernel: CompiledKernel) -> dict[str, str]:
    return {
        "name": kernel.kernel,
        "threads": _number(kernel.threads),
        "registers": _number(kernel.registers),
        "stack": _number(kernel.stack, " B"),
        "spills": _number(kernel.spill_bytes, " B"),
        "local": _number(kernel.local, " B"),
        "smem": _number(kernel.smem_bytes, " B"),
        "seconds": f"{kernel.seconds:.1f} s",
        "sass": ", ".join(f"{count} {name}" for name, count in kernel.sass.items()),
    }


def _number(value: int | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value}{unit}"


def _flat(toolchain: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) rows; nested maps become rows, lists one line."""
    rows: list[tuple[str, str]] = []
    for name, value in toolchain.items():
        if isinstance(value, Mapping):
            rows += [(key, str(item)) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            rows.append((name, " ".join(map(str, value))))
        else:
            rows.append((name, str(value)))
    return rows
