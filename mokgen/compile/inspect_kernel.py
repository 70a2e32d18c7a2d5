"""Read what a compile produced: ptxas' remarks, traced MLIR, PTX, and SASS where the tools of the `sass` extra are."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mokgen.compile.toolchain import find_tool

# Mnemonics a report shows: tensor cores, TMA, bulk copies, register hand-over, local memory, GPU-wide fences.
SASS_MNEMONICS = (
    "HGMMA",
    "QGMMA",
    "UTCHMMA",
    "UTCQMMA",
    "UTMALDG",
    "UTMASTG",
    "UBLKCP",
    "LDGSTS",
    "SYNCS",
    "USETMAXREG",
    "MEMBAR",
    "LDL",
    "STL",
)

_ALLOCA = re.compile(r"cute\.memref\.alloca\(\)[^\n]*: (!\w+|!cute\.memref<[^\n]*?>)\s*$", re.M)
_SMEM_TYPE = r'!cute\.memref<i8, smem, align<(\d+)>, "(\d+):1">'
_SMEM_ALIAS = re.compile(rf"^(!\w+) = {_SMEM_TYPE}$", re.M)


@dataclass(frozen=True)
class Usage:
    """Per-thread resources as ptxas states them; the maximum over a module's kernels, None where it said nothing."""

    registers: int | None = None
    stack: int | None = None
    spill_bytes: int | None = None


def parse_ptxas(text: str) -> Usage:
    """Read `ptxas -v` text (as the DSL's remark file holds it)."""
    # The YAML writer folds lines; words are what counts.
    flat = " ".join(text.split())
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", flat)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", flat)
    if not registers or not frames:
        return Usage()
    return Usage(
        registers=max(registers),
        stack=max(int(frame) for frame, _, _ in frames),
        spill_bytes=max(int(stores) + int(loads) for _, stores, loads in frames),
    )


def smem_bytes(mlir: str) -> int:
    """Dynamic shared memory: allocations of a kernel one after the other, each at its alignment; maximum of kernels."""
    aliases = {name: (int(align), int(size)) for name, align, size in _SMEM_ALIAS.findall(mlir)}
    largest = 0
    for body in mlir.split("cuda.kernel @")[1:]:
        total = 0
        for type_text in _ALLOCA.findall(body):
            inline = re.fullmatch(_SMEM_TYPE, type_text)
            entry = (int(inline[1]), int(inline[2])) if inline else aliases.get(type_text)
            if entry is not None:
                align, size = entry
                total = -(-total // align) * align + size
        largest = max(largest, total)
    return largest


def threads(ptx: str) -> int | None:
    """Threads of a CTA from `.reqntid`; the maximum over a module's kernels."""
    blocks = re.findall(r"\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", ptx)
    return max((int(x) * int(y or 1) * int(z or 1) for x, y, z in blocks), default=None)


def local_bytes(cubin: Path) -> int | None:
    """Local memory per thread, or None without cuobjdump."""
    text = _run("cuobjdump", "-res-usage", cubin)
    sizes = [int(size) for size in re.findall(r"\bLOCAL:(\d+)", text or "")]
    return max(sizes, default=None)


def count_sass(cubin: Path) -> dict[str, int]:
    """Instructions per mnemonic of SASS_MNEMONICS that occur; empty without nvdisasm."""
    text = _run("nvdisasm", "-c", cubin)
    return count_mnemonics(text) if text else {}


def count_mnemonics(sass: str) -> dict[str, int]:
    """Count the wanted mnemonics in nvdisasm output; a mnemonic is what follows an optional predicate."""
    found = Counter(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", sass))
    return {name: found[name] for name in SASS_MNEMONICS if found[name]}


def _run(tool: str, option: str, cubin: Path) -> str | None:
    path = find_tool(tool)
    if path is None:
        return None
    done = subprocess.run([str(path), option, str(cubin)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
