"""The benchmark's contenders and arithmetic; its times need a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from layers import VARIANTS, resolved

from mokgen.bench import (
    DENSE,
    GROUPED,
    MOKGEN,
    PIPELINE_ERROR,
    BenchResult,
    _rows,
    bench,
    dense_bound,
    flops_of,
    grouped_mm_layer,
)
from mokgen.reference.compare import errors
from mokgen.reference.inputs import make_inputs, make_parameters
from mokgen.reference.oracle import oracle

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["base", "top_8", "shared", "gated_shared", "gpt_oss_expert"])
@pytest.mark.parametrize("pattern", ["balanced", "one_expert_empty", "ragged"])
def test_the_torch_pipeline_computes_the_layer(name, pattern):
    layer = resolved(**VARIANTS[name])
    inputs, parameters = make_inputs(layer, 64, pattern), make_parameters(layer)
    found = grouped_mm_layer(layer, inputs, parameters)
    assert 1e-4 < errors(found, oracle(layer, inputs, parameters)).relative_l2 < PIPELINE_ERROR


def test_flops_count_routes_and_shared_experts():
    assert flops_of(resolved(), 64) == 6 * 64 * 256 * 2 * 256
    assert flops_of(resolved(**VARIANTS["gated_shared"]), 64) == 6 * 64 * 256 * (2 * 256 + 2 * 192)


def test_the_dense_bound_spends_the_layers_flops():
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("base", "gated_shared"):
        layer = resolved(**VARIANTS[name])
        work = dense_bound(layer, 64, CPU)
        with FlopCounterMode(display=False) as counter:
            work()
        assert counter.get_total_flops() == flops_of(layer, 64)


def result() -> BenchResult:
    times = {MOKGEN: [(1.0, 1.5), (3.0, 2.5), (2.0, 2.0)], DENSE: [(1.6, 2.0)] * 3, GROUPED: [(4.0, 8.0)] * 3}
    return BenchResult("tiny", "a device", 64, 10**9, "balanced", _rows(times, {MOKGEN: 3e-3}, 10**9))


def test_rows_are_medians_and_ratios():
    own, dense, grouped = (result().row(name) for name in (MOKGEN, DENSE, GROUPED))
    assert (own.queued_ms, own.isolated_ms) == (2.0, 2.0)
    assert own.of_dense == pytest.approx(0.8) and dense.of_dense == 1.0
    assert own.tflops == pytest.approx(0.5)
    assert grouped.relative_l2 is None and own.relative_l2 == 3e-3


def test_a_result_is_json_and_a_table():
    found = result()
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["name"] == MOKGEN
    header, lines = found.table()
    assert all(len(line) == len(header) for line in lines)
    assert lines[2][5] == "2.00x"


@pytest.mark.gpu
def test_bench_of_a_small_layer():
    found = bench(resolved(), 512, rounds=1, calls=3)
    assert {row.name for row in found.rows} == {MOKGEN, DENSE, GROUPED}
    assert all(row.queued_ms > 0 and row.isolated_ms > 0 for row in found.rows)
    own = found.row(MOKGEN).relative_l2
    assert own is not None and own < PIPELINE_ERROR


@pytest.mark.gpu
def test_bench_of_a_layer_with_a_router_has_a_row_from_logits():
    found = bench(resolved(**VARIANTS["router_mixtral"]), 512, rounds=1, calls=3)
    assert len(found.rows) == 4
