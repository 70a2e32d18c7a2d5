"""The checks of generated text: each fault is found, clean text passes."""

from __future__ import annotations

import pytest

from mokgen.codegen.lint import lint, require_clean
from mokgen.errors import TemplateError

CLEAN = '''"""A kernel."""

import cutlass.cute as cute
from cutlass import Int32

from mokgen.device import sync

TILE = 128
HAS_TAIL = 1
ARGUMENTS = (("x", "bf16", ("T", TILE)),)


class Args:
    x: cute.Tensor


@cute.kernel
def kernel(args: Args, count: Int32):
    if count > TILE:
        sync.arrive(args.x, [index for index in range(HAS_TAIL)])


@cute.jit
def launch(x: cute.Tensor, stream):
    kernel(x, Int32(1)).launch(grid=[1, 1, 1], block=[TILE, 1, 1], stream=stream)
'''


def faults(text: str) -> list[str]:
    return [str(finding) for finding in lint("forward.py", text)]


def test_clean_text_has_no_finding() -> None:
    assert faults(CLEAN) == []
    require_clean({"forward.py": CLEAN, "plan.json": "{ not python"})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import Int32", "import Int32, Int64", "forward.py:4: Int64 is never used"),
        ("TILE = 128\n", "TILE = 128\nDEAD = 7\n", "forward.py:9: DEAD is never used"),
        ("@cute.kernel", "def dead_role(args: Args):\n    pass\n\n\n@cute.kernel", "dead_role is never used"),
        ("count > TILE", "count > MISSING", "undefined name MISSING"),
        ("range(HAS_TAIL)", "range(missing)", "undefined name missing"),
        ("count > TILE", "HAS_TAIL", "branch on a constant: HAS_TAIL"),
        ("count > TILE", "cutlass.const_expr(HAS_TAIL == 0)", "branch on a constant"),
        ("count > TILE", "True", "branch on a constant: True"),
        ("A kernel.", "A k\u00e9rnel.", "forward.py:1: not ASCII"),
        ("A kernel.", "A kernel." + "x" * 120, "columns, at most 120"),
        ("TILE = 128\n", "TILE = 128 \n", "trailing blanks"),
        ("from cutlass import Int32", "from cutlass import *", "star import"),
        ("import cutlass.cute", "from __future__ import annotations\nimport cutlass.cute", "future import"),
        ("def launch(x", "def launch(x x", "syntax error"),
        ('stream=stream)\n', 'stream=stream)\n\n', "exactly one newline"),
        ("TILE = 128\n", "TILE = 128\n" + "#\n" * 430, "a kernel module has at most 450"),
    ],
)  # fmt: skip
def test_each_fault_is_found(old: str, new: str, message: str) -> None:
    text = CLEAN.replace(old, new)
    assert text != CLEAN
    assert any(message in fault for fault in faults(text)), faults(text)


def test_test_functions_count_as_used_and_all_faults_come_together() -> None:
    assert lint("test_kernel.py", "def test_layer():\n    pass\n") == []
    with pytest.raises(TemplateError) as caught:
        require_clean({"a.py": "import os\n", "b.py": "x = missing\n"})
    assert {item.where for item in caught.value.diagnostics} == {"a.py:1", "b.py:1"}
    assert len(caught.value.diagnostics) == 3
