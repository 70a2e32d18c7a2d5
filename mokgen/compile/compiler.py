"""Compile one generated module to an object, without a GPU; one process per compile.

`cute.compile` keeps its options on a singleton: two threads can get each other's architecture. So this module is also
a program, `python -m mokgen.compile.compiler FILE --arch sm_90a --out DIR`, and the pool starts one process per kernel.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mokgen.compile import inspect_kernel
from mokgen.compile.loader import ARGUMENTS_NAME, ENTRY_NAME, load_source
from mokgen.compile.toolchain import COMPILE_OPTIONS
from mokgen.errors import CompileError, MokgenError

TENSOR_ALIGN_BYTES = 16
ASSEMBLY_FOLDER = "assembly"  # PTX and cubin of every kernel, inside the output directory

Arguments = tuple[tuple[str, str, tuple[str | int, ...] | None], ...]


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel: what it costs and where its files are (relative to the output directory)."""

    kernel: str
    function: str  # exported name, `<kernel>_<arch>`
    arch: str
    arguments: Arguments  # (name, dtype, shape or None for a scalar), call order
    seconds: float
    registers: int | None  # per thread at launch; roles change theirs with setmaxnreg
    stack: int | None  # bytes per thread
    spill_bytes: int | None  # stores and loads
    local: int | None  # bytes per thread; None without cuobjdump
    smem_bytes: int  # dynamic shared memory
    threads: int | None
    object: str
    ptx: str
    cubin: str
    sass: dict[str, int] = field(default_factory=dict)  # mnemonic -> instructions; empty without nvdisasm

    def findings(self) -> tuple[str, ...]:
        """What a fast kernel must not have: spills, a stack frame, local memory."""
        faults = []
        if self.registers is None:
            faults.append(f"{self.kernel}: the compiler stated no registers and spills")
        if self.spill_bytes:
            faults.append(f"{self.kernel}: {self.spill_bytes} bytes of register spills")
        if self.stack:
            faults.append(f"{self.kernel}: stack frame of {self.stack} bytes per thread")
        if self.local or self.sass.get("LDL") or self.sass.get("STL"):
            loads, stores = self.sass.get("LDL", 0), self.sass.get("STL", 0)
            faults.append(f"{self.kernel}: local memory ({self.local or 0} bytes, {loads} LDL, {stores} STL)")
        return tuple(faults)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelReport:
        arguments = tuple((n, d, None if shape is None else tuple(shape)) for n, d, shape in data["arguments"])
        return cls(**{**data, "arguments": arguments})


def command(path: Path, arch: str, out: Path) -> list[str]:
    """Command line that repeats one compile."""
    return [sys.executable, "-m", "mokgen.compile.compiler", str(path), "--arch", arch, "--out", str(out)]


def compile_source(path: Path, arch: str, out: Path) -> KernelReport:
    """Compile the kernel module at `path` for `arch` into `out`; holds no lock, so call it once per process."""
    module = load_source(path)
    arguments: Arguments = getattr(module, ARGUMENTS_NAME)
    kernel, function = path.stem, f"{path.stem}_{arch}"
    assembly = out / ASSEMBLY_FOLDER
    assembly.mkdir(parents=True, exist_ok=True)
    # Dump files are named by signature only, so two kernels could overwrite each other: a fresh folder per compile.
    dump = Path(tempfile.mkdtemp(prefix=f".{function}-", dir=out))
    try:
        begin = time.perf_counter()
        compiled, traced = _trace_and_compile(getattr(module, ENTRY_NAME), arguments, arch, dump)
        object_file = out / f"{function}.o"
        compiled.export_to_c(str(object_file), function, export_only_tvm_ffi_symbols=True)
        seconds = time.perf_counter() - begin
        ptx, cubin = assembly / f"{kernel}.{arch}.ptx", assembly / f"{kernel}.{arch}.cubin"
        ptx.write_text(compiled.__ptx__, encoding="utf-8")
        cubin.write_bytes(compiled.__cubin__)
        remarks = dump / "remarks.yaml"
        usage = inspect_kernel.parse_ptxas(remarks.read_text(encoding="utf-8") if remarks.exists() else "")
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    return KernelReport(
        kernel=kernel,
        function=function,
        arch=arch,
        arguments=arguments,
        seconds=round(seconds, 3),
        registers=usage.registers,
        stack=usage.stack,
        spill_bytes=usage.spill_bytes,
        local=inspect_kernel.local_bytes(cubin),
        smem_bytes=inspect_kernel.smem_bytes(traced),
        threads=inspect_kernel.threads(compiled.__ptx__),
        object=object_file.name,
        ptx=str(ptx.relative_to(out)),
        cubin=str(cubin.relative_to(out)),
        sass=inspect_kernel.count_sass(cubin),
    )


def _trace_and_compile(entry: Any, arguments: Arguments, arch: str, dump: Path) -> tuple[Any, str]:
    """Run cute.compile on fake arguments; returns the compiled function and the traced MLIR text."""
    import cutlass.cute as cute

    options = [f"--gpu-arch {arch}", *COMPILE_OPTIONS, "--keep-ptx", "--keep-cubin", f"--dump-dir {dump}"]
    options += ["remarks{ptx}", f"--remark-output={dump / 'remarks.yaml'}"]
    traced: list[str] = []
    compiled = cute.compile(
        entry,
        *fake_arguments(arguments),
        options=" ".join(options),
        trace_finalize_hooks=lambda dsl, module, name: traced.append(module.operation.get_asm(enable_debug_info=False)),
    )
    return compiled, traced[-1]


def fake_arguments(arguments: Arguments) -> list[Any]:
    """Stand-ins for a call: compact row-major tensors, scalars, and the stream TVM-FFI finds by itself.

    Equal symbolic names become the same symbol, so the compiled stub checks that their extents are equal.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    types = {
        "bf16": cutlass.BFloat16,
        "fp32": cutlass.Float32,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
        "uint8": cutlass.Uint8,
    }
    symbols: dict[str, Any] = {}

    def extent(entry: str | int) -> Any:
        if isinstance(entry, int):
            return entry
        if entry not in symbols:
            symbols[entry] = cute.sym_int(symbol=entry)
        return symbols[entry]

    fakes: list[Any] = []
    for name, dtype, shape in arguments:
        if dtype not in types:
            raise CompileError(f"unknown dtype {dtype!r}", where=f"argument {name}", hint=f"known: {', '.join(types)}")
        if shape is None:
            fakes.append(types[dtype](0))
        else:
            order = tuple(reversed(range(len(shape))))
            fakes.append(
                make_fake_compact_tensor(
                    types[dtype], tuple(map(extent, shape)), stride_order=order, assumed_align=TENSOR_ALIGN_BYTES
                )
            )
    return [*fakes, make_fake_stream(use_tvm_ffi_env_stream=True)]


def result_file(kernel: str, arch: str, out: Path) -> Path:
    """Where the worker process leaves its result for the pool."""
    return out / f"{kernel}_{arch}.result.json"


def main(argv: list[str] | None = None) -> int:
    """Entry of a worker: writes {"report": ...} or {"error": ...}; exit code 0 or 3."""
    parser = argparse.ArgumentParser(prog="python -m mokgen.compile.compiler", description="compile one kernel module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        report = compile_source(args.file, args.arch, args.out)
    except Exception as error:  # the DSL raises its own, unrelated classes: all of them mean "does not compile"
        message = str(error) if isinstance(error, MokgenError) else f"{type(error).__name__}: {error}"
        outcome: dict[str, Any] = {"error": message}
        print(message, file=sys.stderr)
    else:
        outcome = {"report": report.to_dict()}
        print(f"{report.function}: {report.seconds:.1f} s, {report.registers} registers, {report.smem_bytes} B smem")
        for finding in report.findings():
            print(f"finding: {finding}")
    result_file(args.file.stem, args.arch, args.out).write_text(json.dumps(outcome), encoding="utf-8")
    return 3 if "error" in outcome else 0


if __name__ == "__main__":
    sys.exit(main())
