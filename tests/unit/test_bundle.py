"""Rewriting of imports for --standalone; the compile of a standalone folder is in tests/compile."""

from __future__ import annotations

import pytest

from mokgen.codegen.bundle import rewrite_imports, standalone
from mokgen.errors import TemplateError


def test_only_import_lines_change() -> None:
    text = (
        '"""Uses mokgen.device."""\n\nimport cutlass\nimport mokgen.device.sync as sync\n'
        "from mokgen.device.sm90 import (\n    copy,\n    mma,\n)\nfrom . import other\n\nNAME = 'mokgen.device'\n"
    )
    expected = text.replace("import mokgen.device.sync", "import mokgen_device.sync")
    expected = expected.replace("from mokgen.device.sm90", "from mokgen_device.sm90")
    assert rewrite_imports(text, "forward.py") == expected


@pytest.mark.parametrize("line", ["import mokgen.device.sync\n", "from mokgen import device\n"])
def test_imports_that_bind_mokgen_itself_are_refused(line: str) -> None:
    with pytest.raises(TemplateError, match=r"forward\.py:1"):
        rewrite_imports(line, "forward.py")


def test_layout_of_the_folder() -> None:
    modules = {"mokgen.device": "", "mokgen.device.sm90": "", "mokgen.device.sm90.mma": "A = 1\n"}
    kernels = {"schedule.py": "from mokgen.device.sm90 import mma\n", "forward.py": ""}
    files = standalone(kernels, modules, "tiny", "sm_90a", "4.8.1")
    assert set(files) == {
        "schedule.py",
        "forward.py",
        "README.md",
        "mokgen_device/__init__.py",
        "mokgen_device/sm90/__init__.py",
        "mokgen_device/sm90/mma.py",
    }
    assert files["schedule.py"] == "from mokgen_device.sm90 import mma\n"
    assert "nvidia-cutlass-dsl==4.8.1" in files["README.md"] and "schedule, forward" in files["README.md"]
