"""Machine code of the forward megakernel: tensor cores fed without a wide fence, nothing in local memory."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

import pytest

from mokgen.compile.pool import compile_bundle
from mokgen.compile.toolchain import find_tool
from mokgen.driver import prepare

pytestmark = pytest.mark.compile
ARCH = "sm_90a"
SPECS = ("dsv3_slice", "dsv3")  # routed experts alone, and with a shared expert
WIDE_FENCE = r"MEMBAR\.\w+\.(GPU|SYS|VC)"


@dataclass(frozen=True)
class Line:
    """One line of nvdisasm: a label, or an instruction without its predicate."""

    label: str
    mnemonic: str  # HGMMA.64x256x16.F32.BF16
    target: str  # label that a branch names


def lines_of(sass: str) -> list[Line]:
    found = []
    for text in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", text):
            found.append(Line(label[1], "", ""))
        elif code := re.search(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", text):
            target = re.search(r"`\((\.L_x_\d+)\)", code[2])
            found.append(Line("", code[1], target[1] if target and code[1].startswith("BRA") else ""))
    return found


def innermost_loop(lines: list[Line], index: int) -> list[Line]:
    """The shortest run of lines around `index` from a label to a branch back to it; empty where there is none."""
    labels = {line.label: place for place, line in enumerate(lines) if line.label}
    loops = [
        (labels[line.target], end)
        for end, line in enumerate(lines)
        if line.target in labels and labels[line.target] <= index <= end
    ]
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return lines[begin : end + 1]


def places(lines: list[Line], mnemonic: str) -> list[int]:
    return [place for place, line in enumerate(lines) if line.mnemonic.split(".")[0] == mnemonic]


@pytest.fixture(scope="module")
def sass(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Line]]:
    """Lines by spec; the kernels are compiled once."""
    tool = find_tool("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is not installed (extra `sass`)")
    folder = tmp_path_factory.mktemp("forward")
    for name in SPECS:
        (folder / f"{name}.py").write_text(prepare(name, ARCH).kernels["forward.py"], encoding="utf-8")
    found = {}
    for report in compile_bundle(folder, ARCH, jobs=2):
        assert report.findings() == ()
        command = [str(tool), "-c", str(folder / report.cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[report.kernel] = lines_of(text)
    return found


@pytest.mark.parametrize("name", SPECS)
def test_no_wide_fence_in_the_main_loop(sass: dict[str, list[Line]], name: str) -> None:
    """A fence for the GPU among the HGMMAs waits for every store in flight, at every K block."""
    lines = sass[name]
    multiplies = places(lines, "HGMMA")
    assert len(multiplies) >= 4, "a K block of 64 is four HGMMAs"
    loop = innermost_loop(lines, multiplies[0])
    assert len(places(loop, "HGMMA")) == len(multiplies), "one main loop holds them all"
    between = lines[multiplies[0] : multiplies[-1]]
    for part in (between, loop):
        assert [line.mnemonic for line in part if re.match(WIDE_FENCE, line.mnemonic)] == []
    assert any(re.match(WIDE_FENCE, line.mnemonic) for line in lines), "signals do need one, elsewhere"


@pytest.mark.parametrize("name", SPECS)
def test_no_wide_fence_where_rows_are_gathered(sass: dict[str, list[Line]], name: str) -> None:
    lines = sass[name]
    copies = places(lines, "LDGSTS")
    assert copies
    for place in copies:
        loop = innermost_loop(lines, place)
        assert loop, "gathers run in the loop over K blocks or over tasks"
        if len(places(loop, "LDGSTS")) < len(copies):  # the loop over K blocks, not the one over tasks
            assert [line.mnemonic for line in loop if re.match(WIDE_FENCE, line.mnemonic)] == []


@pytest.mark.parametrize("name", SPECS)
def test_tensor_cores_and_tma_are_used_and_local_memory_is_not(sass: dict[str, list[Line]], name: str) -> None:
    names = [line.mnemonic.split(".")[0] for line in sass[name]]
    assert {"HGMMA", "UTMALDG", "UTMASTG", "LDGSTS", "USETMAXREG"} <= set(names)
    assert not {"LDL", "STL"} & set(names)
    shapes = {line.mnemonic for line in sass[name] if line.mnemonic.startswith("HGMMA")}
    assert shapes == {"HGMMA.64x256x16.F32.BF16"}


def test_loops_and_fences_are_recognised() -> None:
    """The tests above can fail: a fence planted between two HGMMAs is in the innermost loop."""
    text = """
.L_x_1:
        /*0000*/                   MEMBAR.ALL.SYS ;
.L_x_2:
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24, UP0 ;
        /*0020*/              @!P0 MEMBAR.SC.GPU ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;
        /*0040*/              @P0 BRA `(.L_x_2) ;
        /*0050*/              @P1 BRA `(.L_x_1) ;
"""
    lines = lines_of(text)
    loop = innermost_loop(lines, places(lines, "HGMMA")[0])
    assert [line.mnemonic for line in loop if re.match(WIDE_FENCE, line.mnemonic)] == ["MEMBAR.SC.GPU"]
    assert innermost_loop(lines, len(lines) - 1) == lines
    assert innermost_loop(lines[3:], 0) == []
