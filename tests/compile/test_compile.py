"""Text to object: reports, errors that say how to repeat, independence from the user's DSL switches."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from mokgen import settings
from mokgen.cache.manifest import hash_file, read_manifest
from mokgen.compile import inspect_kernel, pool, toolchain
from mokgen.compile.compiler import KernelReport, compile_source
from mokgen.compile.pool import Progress, compile_bundle
from mokgen.compile.toolchain import find_tool, worker_environment
from mokgen.errors import CompileError, ToolchainError

pytestmark = pytest.mark.compile


def test_report_of_a_small_kernel(twice_artifact: Path) -> None:
    kernel = read_manifest(twice_artifact).kernels["twice"]
    assert kernel.function == "twice_sm_90a"
    assert kernel.arguments == (("x", "fp32", ("N", 4)), ("y", "fp32", ("N", 4)), ("n", "int32", None))
    assert kernel.smem_bytes == 4000
    assert kernel.threads == 128
    assert kernel.stack == 0 and kernel.spill_bytes == 0
    assert kernel.registers is not None and 8 <= kernel.registers <= 32
    left = {path.name for path in twice_artifact.iterdir()}
    assert left == {"twice.py", "kernels.so", "assembly", "manifest.json"}, "objects and worker results are removed"
    assert ".target sm_90a" in (twice_artifact / "assembly" / "twice.sm_90a.ptx").read_text()


def test_registers_agree_with_cuobjdump(twice_artifact: Path) -> None:
    tool = find_tool("cuobjdump")
    if tool is None:
        pytest.skip("cuobjdump is not installed (extra `sass`)")
    cubin = twice_artifact / "assembly" / "twice.sm_90a.cubin"
    text = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    kernel = read_manifest(twice_artifact).kernels["twice"]
    assert f"REG:{kernel.registers} STACK:{kernel.stack} " in text
    assert kernel.local == 0


def test_same_text_gives_the_same_bytes_whatever_the_environment(
    twice_text: str, twice_artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "twice.py").write_text(twice_text, encoding="utf-8")
    with settings.scope(CUTE_DSL_ARCH="sm_100a", CUTE_DSL_LINEINFO="1", CUTE_DSL_COMPILER_OPT="0"):
        (report,) = compile_bundle(tmp_path, "sm_90a")
    assert report.cubin == "assembly/twice.sm_90a.cubin"
    for name in (report.cubin, report.ptx, "kernels.so"):
        assert hash_file(tmp_path / name) == hash_file(twice_artifact / name), name


def test_two_kernels_in_two_processes_and_progress(twice_text: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(twice_text, encoding="utf-8")
    (tmp_path / "two.py").write_text(twice_text.replace("* 2.0", "* 3.0"), encoding="utf-8")
    (tmp_path / "helper.py").write_text("VALUE = 1\n", encoding="utf-8")
    steps: list[Progress] = []
    reports = compile_bundle(tmp_path, "sm_90a", jobs=2, progress=steps.append)
    assert [report.kernel for report in reports] == ["one", "two"]
    states = sorted((step.kernel, step.state) for step in steps)
    assert states == [
        ("", "linking"), ("one", "finished"), ("one", "started"), ("two", "finished"), ("two", "started")
    ]  # fmt: skip
    assert hash_file(tmp_path / reports[0].cubin) != hash_file(tmp_path / reports[1].cubin)


def test_error_names_file_message_and_command(twice_text: str, tmp_path: Path) -> None:
    bad = twice_text.replace("x[row, 0]", "x[row, no_such_name]")
    (tmp_path / "bad.py").write_text(bad, encoding="utf-8")
    (tmp_path / "worse.py").write_text("import no_such_module\n" + twice_text, encoding="utf-8")
    with pytest.raises(CompileError) as caught:
        compile_bundle(tmp_path, "sm_90a", jobs=2)
    by_file = {Path(item.where).name: item for item in caught.value.diagnostics}
    assert set(by_file) == {"bad.py", "worse.py"}, "all failures are reported together"
    assert "no_such_name" in by_file["bad.py"].what
    assert "no_such_module" in by_file["worse.py"].what
    line = shlex.split(by_file["worse.py"].hint.removeprefix("repeat with: "))
    again = subprocess.run(line, capture_output=True, text=True, env=worker_environment(), check=False)
    assert again.returncode == 3 and "no_such_module" in again.stderr


def test_a_compiler_crash_is_an_error_of_that_kernel_only(twice_text: str, tmp_path: Path) -> None:
    crash = "import os\n" + twice_text.replace("THREADS = 128", "THREADS = 128\nos.kill(os.getpid(), 11)")
    (tmp_path / "crash.py").write_text(crash, encoding="utf-8")
    with pytest.raises(CompileError, match="ended with code -11"):
        compile_bundle(tmp_path, "sm_90a")


def test_missing_linker_is_said_before_compiling(
    twice_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twice.py").write_text(twice_text, encoding="utf-8")
    monkeypatch.setattr(toolchain, "LINKERS", ("no-such-gcc",))
    steps: list[Progress] = []
    with pytest.raises(ToolchainError, match="no-such-gcc"):
        compile_bundle(tmp_path, "sm_90a", progress=steps.append)
    assert not steps


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no kernel module"):
        compile_bundle(tmp_path, "sm_90a")


def test_unknown_dtype_is_refused(twice_text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(twice_text.replace('("x", "fp32"', '("x", "fp17"'), encoding="utf-8")
    with pytest.raises(CompileError, match="fp17"):
        compile_source(tmp_path / "odd.py", "sm_90a", tmp_path)


def test_stack_and_spills_are_findings(twice_text: str, tmp_path: Path) -> None:
    """A register array indexed at run time lives in local memory: the report must say so."""
    text = twice_text.replace("import Float32, Int32", "import Float32, Int32, range_constexpr").replace(
        "        y[row, 0] = stage[thread] * 2.0\n",
        "        local = cute.make_rmem_tensor((64,), Float32)\n"
        "        for i in range_constexpr(64):\n"
        "            local[i] = x[row + i, 0]\n"
        "        for i in range(n):\n"
        "            local[i % 64] = local[(i * row) % 64] + 1.0\n"
        "        y[row, 0] = local[row % 64]\n",
    )
    (tmp_path / "local.py").write_text(text, encoding="utf-8")
    (report,) = compile_bundle(tmp_path, "sm_90a")
    assert report.stack is not None and report.stack >= 256
    assert any("stack frame of" in finding for finding in report.findings())
    assert KernelReport.from_dict(report.to_dict()) == report
    if find_tool("nvdisasm"):
        assert report.sass["STL"] > 0 and any("STL" in finding for finding in report.findings())


def test_parse_ptxas_takes_the_maximum_over_kernels() -> None:
    text = """ptxas info : Compiling entry function 'a' for 'sm_90a'
        . 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill
        loads ptxas info : Used 168 registers, used 9 barriers
        . 16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
        ptxas info : Used 32 registers"""
    assert inspect_kernel.parse_ptxas(text) == inspect_kernel.Usage(168, 16, 32)
    assert inspect_kernel.parse_ptxas("nothing") == inspect_kernel.Usage(None, None, None)


def test_mnemonics_are_counted_under_predicates_and_with_suffixes() -> None:
    sass = """
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/              @!P0 STL.64 [R1+0x8], R2 ;
        /*0030*/             @!UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0040*/                   STLX R0 ;
    """
    assert inspect_kernel.count_mnemonics(sass) == {"HGMMA": 1, "UTMALDG": 1, "STL": 1}


def test_worker_timeout_is_an_error(twice_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(30)\n" + twice_text, encoding="utf-8")
    monkeypatch.setattr(pool, "WORKER_SECONDS", 1)
    with pytest.raises(CompileError, match="no result after 1 s"):
        compile_bundle(tmp_path, "sm_90a")
