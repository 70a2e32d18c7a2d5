"""Activations of the device library as compiled: two approximations a pair, clamps that keep a NaN, no division."""

from __future__ import annotations

import re

import pytest

from mokgen.compile.pool import compile_bundle
from mokgen.facts.activations import ACTIVATIONS

pytestmark = pytest.mark.compile
PROBE = '''"""out = activation(gate, up) for n pairs; here to look at what an activation compiles to."""

import cutlass.cute as cute
from cutlass import Int32

from mokgen.device import activations

ARGUMENTS = (
    ("gate", "fp32", ("N",)),
    ("up", "fp32", ("N",)),
    ("out", "fp32", ("N",)),
    ("n", "int32", None),
)


@cute.kernel
def kernel(gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    if thread < n:
        out[thread] = activations.{name}(gate[thread], up[thread], {alpha}, {clamp})


@cute.jit
def launch(gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor, n: Int32, stream):
    kernel(gate, up, out, n).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)
'''


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    """PTX by name and whether it clamps."""
    folder = tmp_path_factory.mktemp("activations")
    for name in ACTIVATIONS:
        for suffix, clamp in (("clamped", "7.0"), ("free", 'float("inf")')):
            text = PROBE.replace("{name}", name).replace("{alpha}", "1.702").replace("{clamp}", clamp)
            (folder / f"{name}_{suffix}.py").write_text(text, encoding="utf-8")
    reports = {report.kernel: (folder / report.ptx).read_text() for report in compile_bundle(folder, "sm_90a", jobs=2)}
    return {(name, clamps): reports[f"{name}_{'clamped' if clamps else 'free'}"]
            for name in ACTIVATIONS for clamps in (True, False)}  # fmt: skip


@pytest.mark.parametrize("clamps", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_instructions_of_a_pair(ptx: dict[tuple[str, bool], str], name: str, clamps: bool) -> None:
    text = ptx[name, clamps]
    assert len(re.findall(r"\bex2\.approx(\.ftz)?\.f32", text)) == 1
    assert len(re.findall(r"\brcp\.approx(\.ftz)?\.f32", text)) == 1
    assert not re.search(r"\bdiv\.|\bcall\b", text)
    limits = re.findall(r"\b(?:min|max)((?:\.\w+)*)\.f32", text)
    assert len(limits) == (3 if clamps else 0), "gate from above, up from both sides"
    assert all(".NaN" in modifiers for modifiers in limits), limits
