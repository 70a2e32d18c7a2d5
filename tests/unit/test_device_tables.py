"""Tables that stand twice, in the device library and in facts, stages or plan: same names, same numbers, same formulas.

The activations of the device are run from their source on torch tensors, with the operations of `cute` that they call
given by torch: formula, clamps and NaN are theirs, only the two approximations (ex2, rcp) are not. Those are seen in
PTX by tests/compile/test_activations.py and bounded by the GPU tests of whole layers, which run every activation.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from layers import resolved

from mokgen.facts.activations import ACTIVATIONS
from mokgen.lower.build import lower
from mokgen.plan import tiles
from mokgen.plan.model import KernelPlan
from mokgen.plan.schedule import make_plan
from mokgen.reference import oracle
from mokgen.stages import route as route_stage
from mokgen.stages.base import TILE_ROWS

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from mokgen.device import scheduler, warp  # noqa: E402
from mokgen.device.sm90 import copy, epilogue, mma  # noqa: E402
from mokgen.device.stages import route  # noqa: E402

PARAMETERS = ["gate", "up", "alpha", "clamp"]
LIMITS = [math.inf, 7.0, 0.5]


@pytest.fixture(scope="module")
def forward() -> KernelPlan:
    return make_plan(lower(resolved())).kernel("forward")


def test_operand_stages(forward: KernelPlan) -> None:
    assert copy.STAGE_A_BYTES + copy.STAGE_B_BYTES == tiles.stage_bytes()
    threads = copy.GATHER_WARPS * warp.WARP_LANES
    assert threads * copy.ROWS_PER_THREAD * copy.CHUNK_BYTES == copy.STAGE_A_BYTES
    arrivals = forward.pipeline("stage").full.arrivals
    assert copy.GATHER_WARPS + 1 == arrivals == forward.constant("STAGE_FULL_ARRIVALS")  # the last announces TMA bytes
    assert forward.role("mma").first_warp == copy.GATHER_WARPS


def test_tiles(forward: KernelPlan) -> None:
    assert forward.tiles is not None
    made = (forward.tiles.tile_m, forward.tiles.tile_n, forward.tiles.tile_k)
    assert (mma.TILE_M, mma.TILE_N, mma.TILE_K) == made == (TILE_ROWS, tiles.TILE_N, tiles.TILE_K)
    assert scheduler.ROW_BLOCK == TILE_ROWS
    assert scheduler.RECORD_WORDS == tiles.TASK_WORDS
    assert mma.GROUP_ROWS * forward.role("mma").num_warps // 4 == TILE_ROWS


def test_output_chunks(forward: KernelPlan) -> None:
    (barrier,) = forward.named_barriers
    groups = forward.role("mma").num_warps // 4
    assert epilogue.CHUNK_SHAPE == (tiles.CHUNK_ROWS, tiles.CHUNK_COLUMNS)
    assert epilogue.CHUNKS * groups == tiles.CHUNKS
    assert epilogue.CHUNKS * groups * epilogue.CHUNK_BYTES == tiles.out_chunk_bytes()
    assert (epilogue.FIRST_BARRIER, epilogue.GROUP_THREADS) == (barrier.number, barrier.threads)


def test_guard_of_the_router_s_denominator() -> None:
    assert route.DENOMINATOR_GUARD == route_stage.NORMALIZE_FLOOR == oracle.NORMALIZE_FLOOR


# ---- activations


def minimum(one, other, nan: bool = False):
    assert nan, "without nan=True a NaN would become the limit"
    return torch.minimum(one, torch.as_tensor(other, dtype=one.dtype))


def maximum(one, other, nan: bool = False):
    assert nan, "without nan=True a NaN would become the limit"
    return torch.maximum(one, torch.as_tensor(other, dtype=one.dtype))


@pytest.fixture(scope="module")
def on_torch(root: Path) -> ModuleType:
    """mokgen/device/activations.py, executed with torch in place of the CuTe DSL."""
    stub = SimpleNamespace(
        jit=lambda function: function,
        arch=SimpleNamespace(fmin=minimum, fmax=maximum, rcp_approx=torch.reciprocal),
        math=SimpleNamespace(exp2=lambda value, fastmath: torch.exp2(value)),
    )
    cutlass = ModuleType("cutlass")
    cutlass.Float32 = lambda value: torch.tensor(value, dtype=torch.float32)
    cutlass.Constexpr, cutlass.const_expr, cutlass.cute = {float: None}, bool, stub
    module, path = ModuleType("activations_on_torch"), root / "mokgen" / "device" / "activations.py"
    names = {"cutlass": cutlass, "cutlass.cute": stub}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    finally:
        sys.modules.update({name: old for name, old in before.items() if old is not None})
    return module


def device_functions(module: ModuleType) -> dict[str, Callable]:
    """Those of the module that have an activation's parameters."""
    return {name: value for name, value in own(module).items() if [*inspect.signature(value).parameters] == PARAMETERS}


def own(module: ModuleType) -> dict[str, Callable]:
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}


def test_facts_and_device_have_the_same_activations(on_torch: ModuleType) -> None:
    device = device_functions(on_torch)
    assert device.keys() == ACTIVATIONS.keys()
    assert own(on_torch).keys() - device.keys() == {"sigmoid"}, "a helper, or an activation with another signature"
    for name, row in ACTIVATIONS.items():
        assert row.name == row.reference.__name__ == name
        assert list(inspect.signature(row.reference).parameters) == PARAMETERS


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up (N,) fp32: every pair of a grid around the limits, random ones, and what fp32 has at its ends."""
    grid = torch.tensor([0.0, -0.0, 0.49, 0.5, 0.51, 6.99, 7.0, 7.01, 30.0, 80.0, 1e4, 1e-30])
    grid = torch.cat([grid, -grid])
    noise = 4 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    return (
        torch.cat([grid.repeat_interleave(len(grid)), noise]),
        torch.cat([grid.repeat(len(grid)), noise.flip(0)]),
    )


def require_close(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Relative error; and what fp64 loses where a reference subtracts, in proportion to the arguments."""
    gate, up = (values.double().abs() for values in pairs())
    wrong = (found - expected).abs() > relative * expected.abs() + 1e-14 * gate * (1 + up)
    assert not bool(wrong.any()), (gate[wrong], up[wrong], found[wrong], expected[wrong])


@pytest.mark.parametrize("clamp", LIMITS)
@pytest.mark.parametrize("alpha", [1.0, 1.702, -0.5])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_device_and_reference_compute_the_same(on_torch: ModuleType, name: str, alpha: float, clamp: float) -> None:
    gate, up = pairs()
    found = getattr(on_torch, name)(gate, up, alpha, clamp)
    expected = ACTIVATIONS[name].reference(gate.double(), up.double(), alpha, clamp)
    assert found.dtype == torch.float32
    require_close(found.double(), expected, 2e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_formula_in_the_table_is_what_reference_computes(name: str) -> None:
    gate, up = (values.double() for values in pairs())
    row = ACTIVATIONS[name]
    names = {"sigmoid": torch.sigmoid, "gelu": partial(torch.nn.functional.gelu, approximate="tanh")}
    written = eval(row.formula, names | {"gate": gate, "up": up, "alpha": row.alpha})
    require_close(row.reference(gate, up, row.alpha, math.inf), written, 1e-12)


@pytest.mark.parametrize("clamp", LIMITS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_nan_survives_the_clamp_in_both(on_torch: ModuleType, name: str, clamp: float) -> None:
    gate, up = torch.tensor([math.nan, 1.0, math.nan]), torch.tensor([1.0, math.nan, math.nan])
    for function in (getattr(on_torch, name), ACTIVATIONS[name].reference):
        assert function(gate, up, 1.0, clamp).isnan().all()


def test_the_sigmoid_keeps_its_relative_error_for_negative_values(on_torch: ModuleType) -> None:
    """What its docstring promises, the two approximations aside: 1 - sigmoid(x) would lose every bit."""
    for least, bound in ((-4.0, 2**-21), (-80.0, 2**-17)):
        values = torch.linspace(least, 20, 5001)
        exact = values.double().sigmoid()
        assert ((on_torch.sigmoid(values).double() - exact).abs() / exact).max() < bound
