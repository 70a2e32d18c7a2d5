"""A standalone folder compiles where mokgen cannot be imported, by the README's own lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mokgen import driver, settings

pytestmark = pytest.mark.compile

WITHOUT_MOKGEN = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mokgen":
            raise ImportError("not installed here: " + name)
sys.meta_path.insert(0, Refuse())
import snippet
assert callable(snippet.schedule_kernel) and callable(snippet.forward_kernel)
assert not any(name.partition(".")[0] == "mokgen" for name in sys.modules)
print("COMPILED")
"""


def test_readme_of_a_standalone_folder_compiles_its_kernels(tmp_path: Path) -> None:
    prepared = driver.prepare("tiny")
    driver.write_text(prepared, tmp_path, standalone=True)
    folder = tmp_path / "tiny_standalone"
    assert not list(folder.glob("test_*")), "the generated test needs mokgen"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", readme, re.S)
    assert snippet is not None
    (folder / "snippet.py").write_text(snippet[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MOKGEN],
        cwd=folder,
        env=settings.child_environment(PYTHONPATH=None, CUTE_DSL_ARCH=None),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "COMPILED" in done.stdout, done.stderr
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        subprocess.run([str(ruff), "check", "--select", "F", "--no-cache", str(folder)], check=True)
