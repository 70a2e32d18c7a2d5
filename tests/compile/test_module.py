"""Loading kernels without the compiler: in a process that could not import it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mokgen.compile.toolchain import worker_environment
from mokgen.errors import ArtifactMismatchError, ToolchainError
from mokgen.runtime import module
from mokgen.runtime.module import RuntimeFile

pytestmark = pytest.mark.compile

PROBE = """
import sys, time, warnings
warnings.simplefilter("ignore")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "jinja2", "networkx"):
            raise ImportError("not installed here: " + name)
sys.meta_path.insert(0, Refuse())
import torch
begin = time.perf_counter()
from mokgen.runtime.module import load_kernels
kernels = load_kernels(sys.argv[1])
seconds = time.perf_counter() - begin
assert load_kernels(sys.argv[1]) is kernels
x = torch.ones(8, 4)
try:
    kernels.functions["twice"](x, x, 8)
except ValueError as error:
    print("SIGNATURE", error)
assert "cutlass" not in sys.modules
print("RUNTIME", kernels.runtime)
print("SECONDS", seconds)
"""


def copy_artifact(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def edit_manifest(directory: Path, **changes: object) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")


def run_probe(artifact: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(artifact)],
        capture_output=True,
        text=True,
        env=worker_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loads_and_checks_signatures_where_no_compiler_can_be_imported(twice_artifact: Path) -> None:
    out = run_probe(twice_artifact)
    assert "SIGNATURE" in out and "device_type=cuda" in out, "a CPU tensor is refused by the compiled stub"
    assert "nvidia-cutlass-dsl-libs-cu1" in out and "4.8.1" in out
    assert float(out.partition("SECONDS")[2]) < 2.0


def test_wrong_architecture_names_both(twice_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    module.check_arch("sm_90a", None, "artifact")
    with pytest.raises(ArtifactMismatchError, match="built for sm_100a, device is sm_90a"):
        module.check_arch("sm_100a", None, "artifact")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    with pytest.raises(ArtifactMismatchError, match="built for sm_100a, device is sm_103a"):
        module.check_arch("sm_100a", None, "artifact")


def test_damaged_library_foreign_abi_and_missing_manifest(twice_artifact: Path, tmp_path: Path) -> None:
    damaged = copy_artifact(twice_artifact, tmp_path / "damaged")
    library = damaged / "kernels.so"
    library.write_bytes(library.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(ArtifactMismatchError, match="kernels.so is not the file the manifest describes"):
        module.load_kernels(damaged)
    foreign = copy_artifact(twice_artifact, tmp_path / "foreign")
    edit_manifest(foreign, abi=999)
    with pytest.raises(ArtifactMismatchError, match="ABI 999, this mokgen reads ABI 1"):
        module.load_kernels(foreign)
    later = copy_artifact(twice_artifact, tmp_path / "later")
    edit_manifest(later, format=2)
    with pytest.raises(ArtifactMismatchError, match="format"):
        module.load_kernels(later)
    with pytest.raises(ArtifactMismatchError, match=r"manifest\.json"):
        module.load_kernels(tmp_path)


def test_function_missing_from_the_library(twice_artifact: Path, tmp_path: Path) -> None:
    artifact = copy_artifact(twice_artifact, tmp_path / "artifact")
    kernels = json.loads((artifact / "manifest.json").read_text())["kernels"]
    kernels["twice"]["function"] = "twice_sm_80"
    edit_manifest(artifact, kernels=kernels)
    with pytest.raises(ArtifactMismatchError, match="twice_sm_80"):
        module.load_kernels(artifact)


def test_runtime_version_mismatch_names_both(tmp_path: Path) -> None:
    old = RuntimeFile(tmp_path / "lib.so", "nvidia-cutlass-dsl-libs-cu12", "4.4.2")
    new = RuntimeFile(tmp_path / "lib.so", "nvidia-cutlass-dsl-libs-cu13", "4.8.1")
    unknown = RuntimeFile(tmp_path / "lib.so", "nvidia-cutlass-dsl-libs-cu13", None)
    packages = ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")
    assert module.choose_runtime([old, new, unknown], packages, ("4.8.1",)) == new
    assert module.choose_runtime([old, unknown], packages, ("4.8.1",)) == unknown
    with pytest.raises(ArtifactMismatchError, match=r"libs-cu12 4\.4\.2.*accepts version 4\.8\.1"):
        module.choose_runtime([old], packages, ("4.8.1",))
    with pytest.raises(ToolchainError, match="libs-cu12 or nvidia-cutlass-dsl-libs-cu13 is installed"):
        module.choose_runtime([], packages, ("4.8.1",))


def test_a_copy_already_in_the_process_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = RuntimeFile(tmp_path / "other.so", "nvidia-cutlass-dsl-libs-base", "4.4.2")
    monkeypatch.setattr(module, "loaded_runtimes", lambda: [other])
    with pytest.raises(ArtifactMismatchError, match=r"already uses .*4\.4\.2.*accepts 4\.8\.1"):
        module.load_runtime.__wrapped__(("p",), ("4.8.1",))


def test_loading_after_the_compiler_was_imported_uses_its_library(twice_artifact: Path) -> None:
    script = (
        "import warnings, sys; warnings.simplefilter('ignore'); import cutlass, torch\n"
        "from mokgen.runtime import module\n"
        "kernels = module.load_kernels(sys.argv[1])\n"
        "assert {item.path.resolve() for item in module.loaded_runtimes()} == {kernels.runtime.path.resolve()}\n"
        "print('one copy')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(twice_artifact)],
        capture_output=True,
        text=True,
        env=worker_environment(),
        check=False,
    )
    assert "one copy" in done.stdout, done.stderr


def test_version_comes_from_files_beside_the_library(tmp_path: Path) -> None:
    library = tmp_path / "nvidia_cutlass_dsl" / "cu13" / "lib" / module.RUNTIME_NAME
    library.parent.mkdir(parents=True)
    library.touch()
    assert module.describe_runtime(library) == RuntimeFile(library, "nvidia-cutlass-dsl-libs-cu13", None)
    (tmp_path / "nvidia_cutlass_dsl_libs_cu13-4.8.1.dist-info").mkdir()  # empty: unpacked by hand
    assert module.describe_runtime(library).version == "4.8.1"
    oldest = tmp_path / "nvidia_cutlass_dsl" / "lib" / module.RUNTIME_NAME
    (tmp_path / "nvidia_cutlass_dsl_libs_base-4.4.2.dist-info").mkdir()
    assert module.describe_runtime(oldest) == RuntimeFile(oldest, "nvidia-cutlass-dsl-libs-base", "4.4.2")


@pytest.mark.parametrize(("cuda", "first"), [("12.8", "cu12"), ("13.0", "cu13"), (None, "cu13")])
def test_flavour_follows_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, first: str) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert module.flavour_order()[0] == first
    assert set(module.flavour_order()) == {"cu12", "cu13"}
