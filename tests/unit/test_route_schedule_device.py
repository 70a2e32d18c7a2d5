"""Arithmetic of the route and schedule kernels, the same functions compiled for the CPU; and their torch references."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mokgen.lower.layer import ResolvedLayer
from mokgen.lower.resolve import resolve
from mokgen.spec.load import load_spec

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")
import cutlass.cute as cute  # noqa: E402
from cutlass import Constexpr, Int32  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from mokgen.device.stages import route, schedule  # noqa: E402
from mokgen.reference import oracle  # noqa: E402
from mokgen.stages import route as route_stage  # noqa: E402
from mokgen.stages import schedule as schedule_stage  # noqa: E402

NAN, INF = float("nan"), float("inf")
SOME_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4e38, -3.4e38, INF, -INF, NAN, 0.1, -0.1]


@cute.jit
def fill_keys(values: cute.Tensor, keys: cute.Tensor, back: cute.Tensor):
    for i in range(cute.size(values)):
        keys[i] = route.key_of(values[i])
        back[i] = route.value_of(keys[i])


@cute.jit
def fill_experts(low: cute.Tensor, high: cute.Tensor, out: cute.Tensor, num_experts: Constexpr[int]):
    for i in range(cute.size(low)):
        expert, legal = schedule.expert_of(low[i], high[i], num_experts)
        out[i, 0] = expert
        out[i, 1] = Int32(legal)


@cute.jit
def fill_parts(routes: Int32, out: cute.Tensor, parts: Constexpr[int]):
    for i in range(parts):
        begin, end = schedule.part_of(routes, i, parts)
        out[i, 0] = begin
        out[i, 1] = end


def keys_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, back = torch.zeros(len(values), dtype=torch.int32), torch.zeros(len(values))
    fill_keys(from_dlpack(values), from_dlpack(keys), from_dlpack(back))
    return keys, back


def test_keys_order_as_the_numbers_do() -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (400,), generator=generator).to(torch.int32)
    values = torch.cat([torch.tensor(SOME_FLOATS), bits.view(torch.float32)])
    keys, back = keys_of(values)
    ranked = torch.where(values.isnan(), -INF, values)
    assert torch.equal(keys[:, None] < keys[None, :], ranked[:, None] < ranked[None, :])
    assert torch.equal(back, ranked)
    assert int(keys.min()) > route.NEVER


def test_the_kernel_s_keys_rank_as_executor_and_oracle_do() -> None:
    """By falling key, equal keys by rising index: what take_largest does one by one."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.tensor(SOME_FLOATS)[torch.randint(len(SOME_FLOATS), (200, 24), generator=generator)]
    keys = torch.stack([keys_of(row)[0] for row in rows])
    ranked = keys.long().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(route_stage.largest(rows, 24), ranked)
    assert torch.equal(oracle._largest(rows, 24), ranked)
    closed = torch.rand(rows.shape, generator=generator) < 0.4
    keys[closed] = route.NEVER
    ranked, open_experts = keys.long().sort(dim=1, descending=True, stable=True).indices, (~closed).sum(1)
    for order in (route_stage.largest(rows, 24, ~closed), oracle._largest(rows, 24, closed)):
        for row, count in enumerate(open_experts.tolist()):
            assert torch.equal(order[row, :count], ranked[row, :count])
            assert closed[row, order[row, count:]].all()


@given(value=st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9) | st.integers(2**32 - 2, 2**32 + 9))
@settings(max_examples=300, deadline=None)
def test_ids_never_wrap(value: int) -> None:
    words = torch.tensor([value], dtype=torch.int64).view(torch.int32)
    out = torch.zeros(1, 2, dtype=torch.int32)
    fill_experts(from_dlpack(words[0:1].clone()), from_dlpack(words[1:2].clone()), from_dlpack(out), 7)
    assert out[0].tolist() == [value if 0 <= value < 7 else 7, int(-1 <= value < 7)]


@pytest.mark.parametrize("routes", [1, 31, 32, 33, 511, 512, 513, 16384, 16385, 65536, 100003, 1 << 20])
def test_parts_cover_all_routes_in_order(routes: int) -> None:
    out = torch.zeros(512, 2, dtype=torch.int32)
    fill_parts(routes, from_dlpack(out), 512)
    begins, ends = out[:, 0], out[:, 1]
    assert int(begins[0]) == 0 and int(ends[-1]) == routes
    assert torch.equal(begins[1:], ends[:-1])
    lengths = ends - begins
    assert int(lengths.min()) >= 0 and bool((lengths[:-1] >= lengths[1:]).all())
    assert bool((begins[lengths > 0] % 32 == 0).all())


@pytest.fixture(scope="module")
def gpu_reference(root: Path) -> ModuleType:
    """The reference of tests/gpu, which knows nothing of mokgen."""
    sys.path.insert(0, str(root / "tests" / "gpu"))
    try:
        import route_schedule_reference
    finally:
        sys.path.pop(0)
    return route_schedule_reference


@pytest.fixture(scope="module")
def layer(root: Path) -> ResolvedLayer:
    return resolve(load_spec(root / "specs" / "dsv3.yaml"))


@pytest.mark.parametrize("tokens, experts, top_k", [(1, 7, 1), (129, 7, 3), (600, 32, 8), (300, 5, 5)])
def test_schedule_references_agree(
    gpu_reference: ModuleType, layer: ResolvedLayer, tokens: int, experts: int, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-3, experts + 2, (tokens, top_k), generator=generator)
    small = replace(layer, num_experts=experts, num_local_experts=experts, router=replace(layer.router, top_k=top_k))
    want = gpu_reference.schedule_tables(ids, experts)
    got = schedule_stage.reference(small, {"ids": ids})
    for name, table in got.items():
        assert torch.equal(table, want[name]), name


@given(
    ids=st.lists(st.integers(-2, 4), min_size=1, max_size=60).map(lambda few: few * 5), top_k=st.sampled_from([1, 5])
)
@settings(max_examples=60, deadline=None)
def test_schedule_reference_places_rows_one_by_one(gpu_reference: ModuleType, ids: list[int], top_k: int) -> None:
    tables = {k: v.tolist() for k, v in gpu_reference.schedule_tables(torch.tensor(ids).view(-1, top_k), 4).items()}
    rows: dict[int, int] = {}
    start = [0]
    for expert in range(4):
        routes = [route for route, name in enumerate(ids) if name == expert]
        rows.update({route: 128 * start[-1] + rank for rank, route in enumerate(routes)})
        start.append(start[-1] - (-len(routes) // 128))
    assert tables["block_start"] == start
    assert tables["slot_row"] == [rows.get(route, -1) for route in range(len(ids))]
    tokens = [-1] * (128 * start[-1])
    for route_id, row in rows.items():
        tokens[row] = route_id // top_k
    assert tables["row_token"] == tokens
    blocks = [tokens[i : i + 128] for i in range(0, len(tokens), 128)]
    assert tables["block_rows"] == [sum(token >= 0 for token in block) for block in blocks]
    assert tables["block_expert"] == [ids[next(r for r in rows if rows[r] == 128 * b)] for b in range(len(blocks))]
    assert tables["first_invalid"] == next((i for i, name in enumerate(ids) if not -1 <= name < 4), -1)


ROUTERS: list[dict[str, Any]] = [
    {},
    {"groups": 6, "top_groups": 3, "top_k": 5},
    {"groups": 6, "top_groups": 3, "top_k": 5, "group_score": "max"},
    {"score": "softmax", "selection_bias": False, "groups": 1, "top_groups": 1, "scale": 1.0},
    {"score": "softmax", "order": "topk_then_score", "selection_bias": False, "groups": 1, "top_groups": 1},
    {"score": "sigmoid", "order": "topk_then_score", "logit_bias": True, "groups": 1, "top_groups": 1},
]


@pytest.mark.parametrize("changes", ROUTERS)
def test_route_references_agree(gpu_reference: ModuleType, layer: ResolvedLayer, changes: dict[str, Any]) -> None:
    experts = 48
    router = replace(layer.router, **changes)
    small = replace(layer, num_experts=experts, num_local_experts=experts, router=router)
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(200, experts, generator=generator) * 2).round() / 2  # ties
    logits[::7, ::5] = NAN
    logits[::11, ::3] = INF
    logits[::13, ::2] = -INF
    biases = {"selection_bias": torch.randn(experts, generator=generator), "logit_bias": torch.ones(experts)}
    given_biases = {name: bias for name, bias in biases.items() if getattr(router, name)}
    want = gpu_reference.route(
        logits, asdict(router), given_biases.get("selection_bias"), given_biases.get("logit_bias")
    )
    got = route_stage.reference(small, {"logits": logits, **given_biases})
    assert torch.equal(got["ids"], want[0])
    assert torch.equal(got["topk_weights"].isnan(), want[1].isnan())
    torch.testing.assert_close(got["topk_weights"], want[1], equal_nan=True, rtol=1e-6, atol=0)
