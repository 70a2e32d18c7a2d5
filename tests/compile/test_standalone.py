"""A standalone folder compiles where mokgen cannot be imported, by the README's own lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mokgen import settings
from mokgen.cache.key import device_modules
from mokgen.codegen.bundle import standalone
from mokgen.compile.toolchain import DSL_VERSION

pytestmark = pytest.mark.compile
ROOT = Path(__file__).resolve().parents[2]

WITHOUT_MOKGEN = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mokgen":
            raise ImportError("not installed here: " + name)
sys.meta_path.insert(0, Refuse())
import snippet
for kernel in (snippet.schedule_kernel, snippet.forward_kernel):
    assert callable(kernel)
assert not any(name.partition(".")[0] == "mokgen" for name in sys.modules)
print("COMPILED")
"""


def test_readme_of_a_standalone_folder_compiles_its_kernels(tmp_path: Path) -> None:
    source = ROOT / "generated" / "dsv3_slice"
    kernels = {name: (source / name).read_text(encoding="utf-8") for name in ("schedule.py", "forward.py")}
    modules = {name: path.read_text(encoding="utf-8") for name, path in device_modules(kernels.values()).items()}
    for name, text in standalone(kernels, modules, "dsv3_slice", "sm_90a", DSL_VERSION).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", readme, re.S)
    assert snippet is not None
    (tmp_path / "snippet.py").write_text(snippet[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MOKGEN],
        cwd=tmp_path,
        env=settings.child_environment(PYTHONPATH=None, CUTE_DSL_ARCH=None),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "COMPILED" in done.stdout, done.stderr
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        subprocess.run([str(ruff), "check", "--select", "F", "--no-cache", str(tmp_path)], check=True)
