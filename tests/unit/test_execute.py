"""The CPU executor: values, orders, the routing contract, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layers import resolved

from mokgen.errors import ArgumentError, RoutingError, UnsupportedError
from mokgen.execute import DeadlockError, LayerPlan, UnwrittenReadError, route, run
from mokgen.execute.state import POISON_INT, Buffer, poisoned
from mokgen.ir.graph import OUTPUT
from mokgen.lower.build import lower
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.schedule import make_plan
from mokgen.reference import oracle
from mokgen.reference.inputs import (
    PATTERNS,
    Inputs,
    Parameters,
    make_inputs,
    make_parameters,
    make_routed_inputs,
    present,
)
from mokgen.stages.registry import STAGES

TOKENS = 257
LAYERS = {
    "plain": resolved(TOKENS),
    "shared": resolved(TOKENS, hidden_size=768, shared__num=1, plan__slab_tiles=2),
    "gated": resolved(TOKENS, shared__num=2, shared__gate="sigmoid"),
    "ragged": resolved(
        TOKENS,
        hidden_size=392,
        experts__intermediate_size=136,
        experts__bias=True,
        experts__activation="swigluoai",
        experts__gate_up_layout="interleaved",
    ),
}


def plan_of(layer: ResolvedLayer) -> LayerPlan:
    return make_plan(lower(layer))


def tensors(inputs: Inputs, parameters: Parameters) -> dict[str, torch.Tensor]:
    given = present(inputs) | present(parameters)
    given["topk_weights"] = given.pop("weights")
    return given


def call(layer: ResolvedLayer, tokens: int = TOKENS, pattern: str = "balanced") -> dict[str, torch.Tensor]:
    return tensors(make_inputs(layer, tokens, pattern), make_parameters(layer))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same bits, NaN included."""
    whole = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.shape == other.shape and torch.equal(one.view(whole), other.view(whole))


# ---- values


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", LAYERS)
def test_output_is_that_of_the_torch_pipeline_that_rounds_alike(name, pattern):
    layer = LAYERS[name]
    inputs, parameters = make_inputs(layer, TOKENS, pattern), make_parameters(layer)
    out = run(plan_of(layer), tensors(inputs, parameters))["out"]
    expected = oracle.baseline(layer, inputs, parameters).out
    assert not out.isnan().any()
    # One fp32 sum in another order may turn a bf16 rounding: half a step of bf16, seldom.
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    assert (out != expected).float().mean() < 0.01


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257])
def test_any_number_of_tokens(tokens):
    layer = LAYERS["shared"]
    inputs, parameters = make_inputs(layer, tokens), make_parameters(layer)
    out = run(plan_of(layer), tensors(inputs, parameters))["out"]
    torch.testing.assert_close(out, oracle.baseline(layer, inputs, parameters).out, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("pattern", ["balanced", "masked", "ragged"])
def test_tasks_and_whole_stages_give_the_same_buffers(name, pattern):
    """The graph's stage references in order, against the tasks: every buffer, not the output alone."""
    layer = LAYERS[name]
    given = call(layer, TOKENS, pattern)
    found = run(plan_of(layer), given)
    graph, made = lower(layer), dict(given)
    for stage in graph.stages():
        made |= STAGES[stage].reference(layer, made)
    compared = {ref.name for producer, _, ref in graph.edges() if producer != "input" and producer != "route"}
    assert compared >= {"hidden", "y", "out", "slot_row", "row_token", "block_start", "block_expert", "block_rows"}
    for tensor in sorted(compared):
        torch.testing.assert_close(
            found[tensor], made[tensor], rtol=2**-7, atol=2**-7, msg=lambda m, t=tensor: f"{t}: {m}"
        )
    assert any(consumer == OUTPUT for _, consumer, _ in graph.edges())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_the_table_is_the_contract_s(pattern, id_dtype):
    layer = LAYERS["plain"]
    ids = make_inputs(layer, TOKENS, pattern, id_dtype=id_dtype).ids
    table, expected = STAGES["schedule"].reference(layer, {"ids": ids}), oracle.pool_table(layer, ids, 128)
    for name, value in table.items():
        assert value.dtype == torch.int32
        assert torch.equal(value, getattr(expected, name)), name


def test_weights_in_bf16_are_taken_as_they_are():
    layer = resolved(TOKENS, router={"input": "ids", "top_k": 2, "weight_dtype": "bf16"})
    inputs, parameters = make_inputs(layer, 64), make_parameters(layer)
    assert inputs.weights.dtype == torch.bfloat16
    out = run(plan_of(layer), tensors(inputs, parameters))["out"]
    torch.testing.assert_close(out, oracle.baseline(layer, inputs, parameters).out, rtol=2**-7, atol=2**-7)


# ---- order


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("pattern", ["balanced", "masked", "all_to_one", "all_masked"])
def test_every_interleaving_gives_the_same_bits(name, pattern):
    plan, given = plan_of(LAYERS[name]), call(LAYERS[name], 200, pattern)
    expected = run(plan, given)
    for seed, ctas in [(0, 1), (1, 2), (2, 4), (3, 4), (4, 7), (5, 3), (7, 16)]:
        found = run(plan, given, order=seed, virtual_ctas=ctas)
        for buffer, value in expected.items():
            assert equal(found[buffer], value), (seed, buffer)


def test_a_seed_names_one_order():
    """Orders differ between seeds and repeat for a seed: the first failure of a broken plan shows which was run."""
    layer = LAYERS["shared"]
    plan, given = plan_of(layer), call(layer, 200)
    kernel = plan.kernel("forward")
    kinds = tuple(replace(kind, waits=()) if kind.name == "reduce" else kind for kind in kernel.kinds)
    broken = replace(plan, kernels=(*plan.kernels[:-1], replace(kernel, kinds=kinds)))

    def failure(seed: int) -> str:
        with pytest.raises(UnwrittenReadError) as error:
            run(broken, given, order=seed)
        return str(error.value)

    assert len({failure(seed) for seed in range(6)}) > 1
    assert all(failure(seed) == failure(seed) for seed in range(6))


def test_a_plan_read_back_from_json_runs_the_same():
    layer = LAYERS["shared"]
    plan, given = plan_of(layer), call(layer)
    assert equal(run(plan, given)["out"], run(LayerPlan.from_json(plan.to_json()), given)["out"])


def test_a_wait_that_nobody_satisfies_is_a_deadlock_with_its_numbers():
    layer = LAYERS["plain"]
    plan, given = plan_of(layer), call(layer, 64)
    kernel = plan.kernel("forward")
    kinds = tuple(replace(kind, signals=()) if kind.name == "fc1" else kind for kind in kernel.kinds)
    broken = replace(plan, kernels=(*plan.kernels[:-1], replace(kernel, kinds=kinds)))
    for order in ("ticket", 0, 1):
        with pytest.raises(DeadlockError, match=r"fc2\(row block 0, .*hidden_ready\[0\]: have 0, want 4"):
            run(broken, given, order=order)


def test_an_order_that_is_none_is_refused():
    layer = LAYERS["plain"]
    with pytest.raises(ArgumentError, match="order"):
        run(plan_of(layer), call(layer, 4), order="random")


# ---- memory


def test_unwritten_cells_are_poison_and_their_read_is_refused():
    buffer = Buffer("y", poisoned((4, 256), "bf16"), 128, written=False)
    assert buffer.value.isnan().all()
    buffer.write(slice(0, 2), slice(128, 256), torch.ones(2, 128, dtype=torch.bfloat16), "fc2")
    assert buffer.read(slice(0, 2), slice(128, 256), "reduce").eq(1).all()
    with pytest.raises(UnwrittenReadError, match=r"reduce reads columns 0..255 of y, rows \[0, 1\]"):
        buffer.read(slice(0, 2), slice(0, 256), "reduce")
    with pytest.raises(UnwrittenReadError, match=r"rows \[3\]"):
        buffer.read(torch.tensor([0, 3]), slice(128, 256), "reduce")
    with pytest.raises(UnwrittenReadError, match="written already"):
        buffer.write(slice(1, 2), slice(128, 256), torch.ones(1, 128, dtype=torch.bfloat16), "fc2")
    assert poisoned((3,), "int32").eq(POISON_INT).all()


def test_a_read_beyond_the_declared_cells_is_refused():
    layer = LAYERS["plain"]
    plan, given = plan_of(layer), call(layer, 64)
    kernel = plan.kernel("forward")
    narrow = tuple(
        replace(kind, reads=tuple(replace(access, columns="tile") for access in kind.reads))
        if kind.name == "fc2"
        else kind
        for kind in kernel.kinds
    )
    space = replace(kernel.kind("fc2").space, tile_columns=128, column_tiles=2)
    narrow = tuple(replace(kind, space=space) if kind.name == "fc2" else kind for kind in narrow)
    with pytest.raises(UnwrittenReadError, match="fc2.* reads hidden beyond what its kind declares"):
        run(replace(plan, kernels=(*plan.kernels[:-1], replace(kernel, kinds=narrow))), given)


# ---- routing contract


def test_slots_without_a_route_add_nothing_even_with_nan_weights():
    layer = LAYERS["plain"]
    given = call(layer, 64)
    ids, weights = given["ids"].clone(), given["topk_weights"].clone()
    ids[::2, 0], weights[::2, 0] = -1, torch.nan
    ids[[0, 31, 63]], weights[[0, 31, 63]] = -1, torch.nan
    out = run(plan_of(layer), {**given, "ids": ids, "topk_weights": weights})["out"]
    assert not out.isnan().any()
    assert out[[0, 31, 63]].eq(0).all()
    alone = weights.clone()
    alone[ids < 0] = 0
    other = ids.clone()
    other[ids < 0] = 0
    assert torch.equal(out, run(plan_of(layer), {**given, "ids": other, "topk_weights": alone})["out"])


def test_each_slot_of_a_repeated_expert_counts():
    layer = resolved(64, router={"input": "ids", "top_k": 8})
    given = call(layer, 3)
    ids, weights = torch.full((3, 8), 5, dtype=torch.int32), torch.full((3, 8), 0.125)
    eight = run(plan_of(layer), {**given, "ids": ids, "topk_weights": weights})
    one = ids.clone()
    one[:, 1:] = -1
    single = run(plan_of(layer), {**given, "ids": one, "topk_weights": torch.ones(3, 8)})
    torch.testing.assert_close(eight["out"], single["out"])
    assert eight["block_rows"].tolist() == [24]


def test_nan_in_unread_rows_reaches_no_result():
    layer = LAYERS["plain"]
    given = call(layer, 64)
    given["ids"][10:20] = -1
    given["x"][10:20] = torch.nan
    unused = [expert for expert in range(8) if not (given["ids"] == expert).any()]
    given["ids"][given["ids"] == 3] = 4
    given["w_gate_up"][3] = torch.nan
    given["w_down"][3] = torch.inf
    out = run(plan_of(layer), given)["out"]
    assert unused == []
    assert not out.isnan().any()
    assert out[10:20].eq(0).all()


@pytest.mark.parametrize("value", [8, -2, 2**31 - 1, 2**32 + 3, -(2**40)])
def test_an_id_outside_is_recorded_and_left_out(value):
    """int64 ids never wrap: 2**32 + 3 is not expert 3."""
    layer = LAYERS["plain"]
    given = call(layer, 64)
    given["ids"] = given["ids"].long()
    given["ids"][7, 1] = value
    found = run(plan_of(layer), given)
    assert found["wrong_id"].tolist() == [7, 1, value]
    given["ids"][7, 1] = -1
    good = run(plan_of(layer), given)
    assert "wrong_id" not in good
    assert torch.equal(found["out"], good["out"])


def test_an_id_outside_raises_where_the_layer_checks():
    layer = resolved(TOKENS, checks="checked")
    given = call(layer, 64)
    given["ids"][7, 1] = 8
    with pytest.raises(RoutingError, match="id 8 of token 7, slot 1"):
        run(plan_of(layer), given)


@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens(name):
    layer = LAYERS[name]
    for order in ("ticket", 3):
        out = run(plan_of(layer), call(layer, 0), order=order)["out"]
        assert (out.shape, out.dtype) == ((0, layer.hidden_size), torch.bfloat16)


# ---- route

ROUTERS = {
    "mixtral": {"input": "logits", "top_k": 2},
    "deepseek_v3": {
        "input": "logits",
        "top_k": 4,
        "score": "sigmoid",
        "scale": 2.5,
        "selection_bias": True,
        "groups": 4,
        "top_groups": 2,
        "group_score": "top2_sum",
    },
    "gpt_oss": {"input": "logits", "top_k": 4, "order": "topk_then_score", "logit_bias": True, "logits_dtype": "bf16"},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_route_is_the_oracle_s(name):
    layer = resolved(TOKENS, router=ROUTERS[name])
    parameters = make_parameters(layer)
    inputs = make_routed_inputs(layer, parameters, TOKENS)
    given = tensors(inputs, parameters)
    found = route(plan_of(layer), given)
    assert torch.equal(found["ids"], inputs.ids)
    torch.testing.assert_close(found["topk_weights"], inputs.weights, atol=1e-6, rtol=0)
    del given["ids"], given["topk_weights"]
    out = run(plan_of(layer), given)["out"]
    torch.testing.assert_close(out, oracle.baseline(layer, inputs, parameters).out, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("fill", [0.0, torch.nan, torch.inf, -torch.inf])
def test_ids_are_distinct_and_in_range_for_any_logits(name, fill):
    layer = resolved(TOKENS, router=ROUTERS[name])
    given = tensors(make_routed_inputs(layer, make_parameters(layer), 5), make_parameters(layer))
    given["logits"] = given["logits"].clone()
    given["logits"][0] = fill
    given["logits"][1, ::2] = fill
    ids = route(plan_of(layer), given)["ids"]
    assert ids.ge(0).all() and ids.lt(8).all()
    assert all(len(set(row)) == layer.top_k for row in ids.tolist())


ODD = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1.0, -2.0, 3e38, -3e38, 1e-45]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("limit", ["none", "max", "top2_sum"])
@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
def test_odd_logits_and_biases_route_as_the_oracle_says(score, limit, order):
    """NaN, infinities, signed zeros, ties and sums that overflow: the same ids in the same order, NaN weights alike."""
    groups = {} if limit == "none" else {"groups": 8, "top_groups": 3, "group_score": limit}
    base = resolved(2000, experts__num=32, router={"input": "logits", "top_k": 8})
    layer = replace(
        base, router=replace(base.router, score=score, order=order, selection_bias=True, logit_bias=True, **groups)
    )
    generator = torch.Generator().manual_seed(5)
    draw = torch.randint(len(ODD), (2000, 32), generator=generator)
    logits = torch.tensor(ODD)[draw]
    logits[::3] = torch.tensor(ODD)[3 + draw[::3] % 8]  # rows of finite numbers
    biases = [torch.tensor(ODD)[torch.randint(3, len(ODD), (32,), generator=generator)] for _ in range(2)]
    biases[0][3], biases[0][9], biases[1][5] = torch.nan, torch.inf, -torch.inf
    found = route(plan_of(layer), {"logits": logits, "selection_bias": biases[0], "logit_bias": biases[1]})
    ids, weights = oracle.route(layer, logits, *biases)
    assert torch.equal(found["ids"], ids)
    assert torch.equal(found["topk_weights"].isnan(), weights.isnan()) and not weights.isnan().all()
    torch.testing.assert_close(found["topk_weights"], weights.float(), atol=1e-6, rtol=1e-6, equal_nan=True)
    if groups:
        assert all(len(set(row)) <= 3 for row in (ids // 4).tolist()), "an expert of a closed group"


def test_ties_go_to_the_lowest_id():
    layer = resolved(TOKENS, router={"input": "logits", "top_k": 3})
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0.0] * 8])
    found = route(plan_of(layer), {"logits": logits})
    assert found["ids"].tolist() == [[1, 2, 4], [0, 1, 2]]


def test_a_layer_that_takes_ids_has_no_router():
    with pytest.raises(ArgumentError, match="not logits"):
        route(plan_of(LAYERS["plain"]), {"logits": torch.zeros(4, 8)})


# ---- refusals


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("w_down", None, "w_down: missing"),
        ("x", torch.zeros(64, 128, dtype=torch.bfloat16), r"x: shape \(64, 128\), expected \(64, 256\)"),
        ("ids", torch.zeros(63, 2, dtype=torch.int32), r"ids: shape \(63, 2\), expected \(64, 2\)"),
        ("ids", torch.zeros(64, 2, dtype=torch.int16), "ids: dtype torch.int16"),
        ("topk_weights", torch.zeros(64, dtype=torch.float32), r"topk_weights: shape \(64,\)"),
        ("topk_weights", torch.zeros(64, 2, dtype=torch.float16), "topk_weights: dtype torch.float16"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value, what):
    layer = LAYERS["plain"]
    with pytest.raises(ArgumentError, match=what):
        run(plan_of(layer), {**call(layer, 64), name: value})


def test_more_tokens_than_planned_are_refused():
    layer = LAYERS["plain"]
    with pytest.raises(ArgumentError, match="258 tokens, built for at most 257"):
        run(plan_of(layer), call(layer, 258))


def test_full_size_calls_are_refused_with_the_reason():
    layer = resolved(8192, hidden_size=1024, experts__intermediate_size=512, router={"input": "ids", "top_k": 8})
    with pytest.raises(UnsupportedError, match=r"FLOP on the CPU executor, which stops at 2e\+10") as error:
        run(plan_of(layer), call(layer, 2048))
    assert "reduced twin" in error.value.hint


def test_calls_that_do_not_fit_memory_are_refused_with_the_reason():
    layer = resolved(8192, experts__num=8, hidden_size=8192, experts__intermediate_size=4096)
    plan = plan_of(layer)
    given = call(resolved(8192), 1)
    given["x"] = torch.zeros(1, 8192, dtype=torch.bfloat16)
    # Expanded zeros: the size of the weights without their memory.
    given["w_gate_up"] = torch.zeros(1, dtype=torch.bfloat16).expand(8, 8192, 8192)
    given["w_down"] = torch.zeros(1, dtype=torch.bfloat16).expand(8, 8192, 4096)
    given["ids"][:] = -1  # no route, so no FLOP
    with pytest.raises(UnsupportedError, match=r"bytes on the CPU executor, which stops at 1e\+09"):
        run(plan, given)
