"""From a spec to a cached artifact: what is a hit, what is written where, what a load finds without a compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mokgen import driver, settings
from mokgen.cache.manifest import damaged_files, read_manifest
from mokgen.cache.store import Store
from mokgen.compile.pool import Progress
from mokgen.compile.toolchain import find_tool
from mokgen.errors import CompileError, ToolchainError, UnsupportedError

pytestmark = pytest.mark.compile
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("driver") / "cache"
    with settings.scope(MOKGEN_CACHE_DIR=str(root), MOKGEN_ARCH=None, MOKGEN_KEEP=None, MOKGEN_OFFLINE=None):
        yield root


@pytest.fixture(scope="module")
def tiny(cache: Path) -> driver.BuildResult:
    """A cold build of specs/tiny.yaml."""
    return driver.build("tiny")


def must_not_compile(step: Progress) -> None:
    raise AssertionError(f"compiles {step.kernel}")


def test_artifact_holds_what_the_manifest_promises(tiny: driver.BuildResult, cache: Path) -> None:
    assert not tiny.cache_hit and tiny.cached and tiny.artifact_dir is not None
    assert cache in tiny.artifact_dir.parents
    manifest = read_manifest(tiny.artifact_dir)
    assert damaged_files(tiny.artifact_dir, manifest) == []
    names = {"schedule.py", "forward.py", "test_kernel.py", "report.md", "plan.json", "kernels.so"}
    assert names <= set(manifest.files)
    assert list(manifest.kernels) == [kernel.kernel for kernel in tiny.kernels] == ["schedule", "forward"]
    assert manifest.workspace_bytes > 0 and manifest.regions[0].name == "counters"
    assert (
        manifest.layer["hidden_size"]
        == json.loads((tiny.artifact_dir / "plan.json").read_text())["layer"]["hidden_size"]
    )
    report = (tiny.artifact_dir / "report.md").read_text()
    assert "| forward |" in report and "Stage graph" in report


def test_hot_kernels_have_no_findings_and_use_tensor_cores(tiny: driver.BuildResult) -> None:
    assert tiny.findings == ()
    forward = tiny.kernels[-1]
    assert forward.stack == 0 and forward.spill_bytes == 0 and forward.smem_bytes <= 232448
    if find_tool("nvdisasm"):
        assert forward.sass["HGMMA"] > 0 and forward.sass["UTMALDG"] > 0


def test_compiled_kernels_are_what_the_plan_says(tiny: driver.BuildResult) -> None:
    plan = driver.plan_of("tiny").plan
    for report in tiny.kernels:
        planned = plan.kernel(report.kernel)
        assert report.threads == planned.threads, report.kernel
        assert report.smem_bytes == planned.shared_bytes, report.kernel
        assert report.arguments == tuple((item.name, item.dtype, item.shape) for item in planned.arguments)


def test_kernels_of_the_artifact_load_and_check_their_arguments(tiny: driver.BuildResult) -> None:
    import torch

    from mokgen.runtime.module import load_kernels

    assert tiny.artifact_dir is not None
    kernels = load_kernels(tiny.artifact_dir)
    assert list(kernels.functions) == ["schedule", "forward"]
    with pytest.raises(TypeError, match="Expects 9 parameters"):
        kernels.functions["forward"](torch.zeros(1))
    ids, workspace = (
        torch.zeros(4, 2, dtype=torch.int32),
        torch.zeros(kernels.manifest.workspace_bytes, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match="device_type=cuda"):
        kernels.functions["schedule"](ids, 1, workspace, 0)


def test_names_comments_and_key_order_enter_no_key(tiny: driver.BuildResult, tmp_path: Path) -> None:
    lines = (ROOT / "specs" / "tiny.yaml").read_text(encoding="utf-8")
    other = tmp_path / "renamed.yaml"
    other.write_text("# another comment\n" + lines, encoding="utf-8")
    again = driver.build(other, out=tmp_path / "text", progress=must_not_compile)
    assert again.cache_hit and again.build_key == tiny.build_key and again.stem == "renamed"
    assert again.kernels == tiny.kernels
    assert "renamed" in (tmp_path / "text" / "renamed" / "forward.py").read_text(), "text names the spec at hand"
    assert again.seconds < 2


def test_another_layer_is_another_key(tiny: driver.BuildResult) -> None:
    other = driver.prepare("tiny", overrides=("router.top_k=1",))
    assert other.layer_key != tiny.layer_key
    assert driver.build_key_of(other) != tiny.build_key


def test_a_changed_device_library_is_another_key(tiny: driver.BuildResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.key, "hash_modules", lambda modules: "another")
    prepared = driver.prepare("tiny")
    assert prepared.layer_key == tiny.layer_key
    assert driver.build_key_of(prepared) != tiny.build_key


def test_text_is_written_stale_modules_are_removed_others_kept(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "route.py").write_text('"""Generated by mokgen; edit the spec."""\n', encoding="utf-8")
    (folder / "notes.py").write_text("# mine\n", encoding="utf-8")
    result = driver.build("tiny", out=tmp_path, emit_only=True, standalone=True)
    assert result.artifact_dir is None and result.kernels == ()
    assert {path.name for path in folder.iterdir()} == {"schedule.py", "forward.py", "test_kernel.py", "notes.py"}
    assert (tmp_path / "tiny_standalone" / "mokgen_device" / "sync.py").is_file()
    assert set(result.files) >= {folder / "forward.py", tmp_path / "tiny_standalone" / "README.md"}


def test_a_load_needs_no_compiler_once_the_artifact_is_there(tiny: driver.BuildResult) -> None:
    with settings.scope(MOKGEN_OFFLINE="1"):
        assert driver.obtain("tiny") == tiny.artifact_dir
        with pytest.raises(ToolchainError, match=r"no artifact of tiny for sm_90a in .*MOKGEN_OFFLINE"):
            driver.obtain("tiny", overrides=("router.top_k=1",))
    assert driver.obtain("tiny") == tiny.artifact_dir


def test_a_hit_imports_neither_torch_nor_the_compiler(tiny: driver.BuildResult) -> None:
    script = (
        "import sys; from mokgen import driver; result = driver.build('tiny')\n"
        "assert result.cache_hit; print([name for name in ('torch', 'cutlass', 'tvm_ffi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_failed_compile_leaves_no_entry_and_says_how_to_keep_the_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = driver.prepare("tiny", overrides=("router.top_k=1",))
    broken = {**prepared.bundle.files, "schedule.py": prepared.bundle.files["schedule.py"] + "\nraise SystemError\n"}
    monkeypatch.setattr(driver, "emit", lambda plan, stem: driver.SourceBundle(stem, broken))
    monkeypatch.setattr(driver, "require_clean", lambda files: None)
    before = {path.name for path in (cache / "entries").iterdir()}
    with pytest.raises(CompileError, match="SystemError") as caught:
        driver.build("tiny", overrides=("router.top_k=1",))
    assert "MOKGEN_KEEP=1" in caught.value.hint and "mokgen.compile.compiler" in caught.value.hint
    assert {path.name for path in (cache / "entries").iterdir()} == before
    assert list((cache / "tmp").iterdir()) == []


def test_errors_after_loading_carry_the_place_in_the_spec(tmp_path: Path) -> None:
    """What only resolve can refuse is still reported with the spec's own line."""
    spec = tmp_path / "trained.yaml"
    text = (ROOT / "specs" / "tiny.yaml").read_text(encoding="utf-8")
    spec.write_text(text + "passes: [forward, backward]\n", encoding="utf-8")
    line = len(text.splitlines()) + 1
    with pytest.raises(UnsupportedError, match=rf"trained\.yaml:{line}"):
        driver.prepare(spec)


def test_a_damaged_entry_is_built_again(tiny: driver.BuildResult) -> None:
    assert tiny.artifact_dir is not None and tiny.build_key is not None
    library = tiny.artifact_dir / "kernels.so"
    before = library.read_bytes()
    library.unlink()  # another test may have it mapped: writing into that file would crash the process
    library.write_bytes(b"damaged")
    assert Store().lookup_build(tiny.build_key) is None
    again = driver.build("tiny")
    assert not again.cache_hit and again.artifact_dir == tiny.artifact_dir
    assert library.read_bytes() == before, "the same text gives the same library"
