"""A kernel small enough to compile in two seconds, and an artifact made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mokgen.cache.key import ABI
from mokgen.cache.manifest import Kernel, Manifest, RuntimeLibrary, write_manifest
from mokgen.compile.compiler import KernelReport
from mokgen.compile.pool import LIBRARY, compile_bundle

TWICE = '''"""y = 2 x for n elements; here to exercise compile, link and load."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

THREADS = 128
ARGUMENTS = (
    ("x", "fp32", ("N", 4)),
    ("y", "fp32", ("N", 4)),
    ("n", "int32", None),
)


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    stage = SmemAllocator().allocate_tensor(Float32, cute.make_layout(1000), byte_alignment=16)
    row = block * THREADS + thread
    if row < n:
        stage[thread] = x[row, 0]
        y[row, 0] = stage[thread] * 2.0


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, n: Int32, stream):
    kernel(x, y, n).launch(grid=[(n + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)
'''


@pytest.fixture
def twice_text() -> str:
    return TWICE


@pytest.fixture(scope="session")
def twice_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifact directory of the kernel above for sm_90a."""
    directory = tmp_path_factory.mktemp("artifact")
    (directory / "twice.py").write_text(TWICE, encoding="utf-8")
    (report,) = compile_bundle(directory, "sm_90a", jobs=1)
    write_manifest(directory, manifest_of(report))
    return directory


def manifest_of(report: KernelReport) -> Manifest:
    """Manifest of a one-kernel artifact; hashes are filled in by write_manifest."""
    return Manifest(
        abi=ABI,
        stem="twice",
        arch=report.arch,
        build_key="b" * 64,
        layer_key="c" * 64,
        layer={},
        workspace_bytes=0,
        regions=(),
        kernels={report.kernel: Kernel(**{name: getattr(report, name) for name in Kernel.model_fields})},
        library=LIBRARY,
        files={},
        toolchain={},
        runtime_library=RuntimeLibrary(
            packages=("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"), versions=("4.8.1",)
        ),
    )
