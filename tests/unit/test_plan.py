"""The plan: sizes by their formulas, arguments of the contract, task order, knobs, exact JSON."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from layers import resolved

from mokgen.errors import PlanError, UnsupportedError
from mokgen.facts.arch import ARCHS
from mokgen.lower.build import lower
from mokgen.lower.layer import ResolvedLayer
from mokgen.lower.resolve import resolve
from mokgen.plan import explain
from mokgen.plan.model import LayerPlan
from mokgen.plan.regions import extents
from mokgen.plan.roofline import roofline
from mokgen.plan.schedule import make_plan
from mokgen.plan.tasks import Problem, instantiate
from mokgen.plan.tiles import KNOBS, best_slab, slab_times
from mokgen.plan.verify import most_row_blocks
from mokgen.spec.load import load_spec, shipped_names

FULL = {"router": {"input": "logits", "top_k": 2}, "shared__num": 1, "shared__gate": "sigmoid", "experts__bias": True}


def plan_of(layer: ResolvedLayer) -> LayerPlan:
    return make_plan(lower(layer), "sm_90a")


def shipped(name: str) -> LayerPlan:
    return plan_of(resolve(load_spec(name)))


def arguments(plan: LayerPlan, kernel: str) -> list[tuple]:
    return [(entry.name, entry.dtype, entry.shape) for entry in plan.kernel(kernel).arguments]


# ---- arguments


def test_arguments_of_a_plain_layer():
    plan = plan_of(resolved())
    size = (plan.workspace_bytes,)
    assert arguments(plan, "schedule") == [
        ("ids", "int32", ("T", "W")),
        ("id_words", "int32", None),
        ("workspace", "uint8", size),
        ("error_address", "int64", None),
    ]
    assert arguments(plan, "forward") == [
        ("x", "bf16", ("T", 256)),
        ("topk_weights", "fp32", ("T", 2)),
        ("w_gate_up", "bf16", (8, 512, 256)),
        ("w_down", "bf16", (8, 256, 256)),
        ("out", "bf16", ("T", 256)),
        ("workspace", "uint8", size),
        ("ctas", "int32", None),
        ("wait_limit_ns", "int64", None),
        ("error_address", "int64", None),
    ]


def test_optional_arguments_exist_where_the_layer_has_them():
    router = {"input": "logits", "top_k": 2, "selection_bias": True, "logit_bias": True, "logits_dtype": "bf16"}
    plan = plan_of(resolved(**{**FULL, "router": router}))
    assert arguments(plan, "route") == [
        ("logits", "bf16", ("T", 8)),
        ("selection_bias", "fp32", (8,)),
        ("logit_bias", "fp32", (8,)),
        ("ids", "int32", ("T", 2)),
        ("weights", "fp32", ("T", 2)),
    ]
    assert arguments(plan, "forward")[4:9] == [
        ("b_gate_up", "bf16", (8, 512)),
        ("b_down", "bf16", (8, 256)),
        ("w_shared_gate_up", "bf16", (512, 256)),
        ("w_shared_down", "bf16", (256, 256)),
        ("shared_gate_logits", "fp32", ("T",)),
    ]


def test_weights_keep_the_dtype_the_spec_gives_them():
    plan = plan_of(resolved(router={"input": "ids", "top_k": 2, "weight_dtype": "bf16"}))
    assert arguments(plan, "forward")[1] == ("topk_weights", "bf16", ("T", 2))


# ---- sizes


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (64, 8, 2), (257, 3, 3), (100, 64, 1), (5, 64, 4)])
def test_the_pool_holds_the_worst_routing_and_no_more(tokens, experts, top_k):
    """B_MAX against a search over segment lengths: only lengths of 1 modulo 128 can be worse than a full block."""
    routes = tokens * top_k

    def worst(left: int, experts_left: int) -> int:
        if left == 0 or experts_left == 0:
            return 0 if left == 0 else -1
        best = -(-left // 128)
        for length in range(1, left + 1, 128):
            best = max(best, -(-length // 128) + worst(left - length, experts_left - 1) if experts_left > 1 else 0)
        return best

    layer = resolved(tokens, experts__num=experts, router={"input": "ids", "top_k": top_k})
    found = extents(layer)["B_MAX"]
    if routes <= 200 or experts <= 3:
        assert found == worst(routes, min(experts, 4)) if experts <= 4 else found >= worst(routes, 4)
    assert found == most_row_blocks(plan_of(layer))["row_blocks"]


def test_dsv3_slice_numbers():
    """The numbers of the kernel that was measured."""
    plan = shipped("dsv3_slice")
    forward = plan.kernel("forward")
    expected = {
        "NUM_K_BLOCKS_FC1": 112,
        "NUM_K_BLOCKS_FC2": 32,
        "NUM_COL_TILES_FC1": 16,
        "NUM_COL_TILES_FC2": 28,
        "SLAB_TILES": 4,
        "NUM_SLABS": 7,
        "MAX_ROW_BLOCKS": 543,
        "MAX_ROWS": 69504,
        "NUM_STAGES": 4,
        "NUM_THREADS": 384,
        "MMA_REGISTERS": 224,
        "STAGE_EMPTY_ARRIVALS": 8,
        "TASK_EMPTY_ARRIVALS": 12,
        "HIDDEN_READY_ARRIVALS": 32,
        "SLAB_DONE_ARRIVALS_PER_TILE": 2,
        "COUNTERS": 0,
        "BLOCK_START": 3072,
        "BLOCK_EXPERT": 4096,
        "BLOCK_ROWS": 7168,
        "ROW_TOKEN": 10240,
        "SLOT_ROW": 288768,
        "HIDDEN": 550912,
        "Y": 285239296,
        "WORKSPACE_BYTES": 1281648640,
        "COUNTER_WORDS": 646,
        "TICKET": 0,
        "REDUCE_TICKET": 32,
        "ERROR": 64,
        "HIDDEN_READY": 96,
        "SLAB_DONE": 639,
    }
    assert {name: forward.constant(name) for name in expected} == expected
    assert forward.shared_bytes == 229584


def test_the_workspace_has_no_hole_larger_than_the_alignment():
    plan = shipped("dsv3")
    end = 0
    for region in plan.regions:
        assert end <= region.offset < end + 1024
        end = region.offset + region.bytes
    assert end <= plan.workspace_bytes < end + 1024


def test_counters_lie_as_in_the_contract():
    plan = plan_of(resolved(257, shared__num=1))
    blocks = extents(plan.layer)["B_MAX"]
    assert [(entry.name, entry.word, entry.length) for entry in plan.counters] == [
        ("ticket", 0, 1),
        ("reduce_ticket", 32, 1),
        ("error", 64, 1),
        ("hidden_ready", 96, blocks),
        ("shared_hidden_ready", 96 + blocks, 3),
        ("slab_done", 96 + blocks + 3, 1),
    ]


# ---- tasks


def decode(plan: LayerPlan, blocks: tuple[int, ...], tokens: int) -> list[tuple]:
    """(kind, expert, row block, column tile) of every main ticket, by the contract's formulas alone."""
    start = [sum(blocks[:expert]) for expert in range(len(blocks) + 1)]
    block_expert = [expert for expert, count in enumerate(blocks) for _ in range(count)]
    forward, shared = plan.kernel("forward"), -(-tokens // 128)
    slab_tiles, total = forward.constant("SLAB_TILES"), forward.constant("NUM_COL_TILES_FC2")
    size = forward.constant("GROUP_BLOCKS")

    def place(local: int, count: int, tiles: int) -> tuple[int, int]:
        group, inside = divmod(local, size * tiles)
        height = min(size, count - group * size)
        return group * size + inside % height, inside // height

    def shared_tiles(kind: str, first: int, tiles: int) -> list[tuple]:
        places = [place(local, shared, tiles) for local in range(shared * tiles)]
        return [(kind, 0, row, first + column) for row, column in places]

    def routed_tiles(kind: str, first: int, tiles: int) -> list[tuple]:
        found = []
        for item in range(len(block_expert) * tiles):
            expert = block_expert[item // tiles]
            row, column = place(item - start[expert] * tiles, blocks[expert], tiles)
            found.append((kind, expert, start[expert] + row, first + column))
        return found

    found = shared_tiles("shared_fc1", 0, forward.constant("NUM_COL_TILES_SHARED_FC1"))
    found += routed_tiles("fc1", 0, forward.constant("NUM_COL_TILES_FC1"))
    for slab in range(forward.constant("NUM_SLABS")):
        first = slab * slab_tiles
        width = min(slab_tiles, total - first)
        found += shared_tiles("shared_fc2", first, width) + routed_tiles("fc2", first, width)
    return found


@pytest.mark.parametrize("blocks", [(1, 1, 1), (0, 3, 0, 2), (4,), (0, 0), (2, 0, 1)])
@pytest.mark.parametrize("slab_tiles", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_ticket_order_is_the_contract_s(blocks, slab_tiles, group):
    knobs = {"plan__slab_tiles": slab_tiles, "plan__group_blocks": group}
    layer = resolved(300, hidden_size=768, experts__intermediate_size=264, shared__num=1, **knobs)
    plan = plan_of(layer)
    tasks = instantiate(plan.kernel("forward"), Problem(257, blocks), "main")
    assert [task.ticket for task in tasks] == list(range(len(tasks)))
    found = [(task.kind.name, task.expert, task.row_block, task.column_tile) for task in tasks]
    assert found == decode(plan, blocks, 257)


def test_reduce_items_go_slab_by_slab_over_all_tokens():
    plan = plan_of(resolved(300, hidden_size=768, plan__slab_tiles=2))
    items = instantiate(plan.kernel("forward"), Problem(33, (1, 1)), "reduce")
    assert [(item.slab, item.row_block) for item in items] == [(s, b) for s in range(2) for b in range(3)]
    assert [item.columns for item in items[::3]] == [slice(0, 512), slice(512, 768)]


def test_required_counts_of_a_reduce_item_count_tiles_of_its_slab():
    plan = plan_of(resolved(300, hidden_size=768, shared__num=1, plan__slab_tiles=2))
    kernel, problem = plan.kernel("forward"), Problem(130, (2, 0, 1))
    (wait,) = kernel.kind("reduce").waits
    items = {item.slab: item for item in instantiate(kernel, problem, "reduce")}
    assert {slab: wait.want(item.environment) for slab, item in items.items()} == {0: 2 * 2 * (3 + 2), 1: 2 * 1 * 5}


def test_no_task_without_tokens():
    plan = plan_of(resolved(shared__num=1))
    for queue in ("main", "reduce"):
        assert instantiate(plan.kernel("forward"), Problem(0, (0,) * 8), queue) == []


# ---- knobs and defaults


def test_measured_slab_widths_are_the_default():
    """Best of the widths timed on an H200, 2026-12-01."""
    assert shipped("dsv3_slice").kernel("forward").constant("SLAB_TILES") == 4
    assert shipped("sonic_7b").kernel("forward").constant("SLAB_TILES") == 6


@pytest.mark.parametrize("name", shipped_names())
def test_the_default_slab_is_the_cheapest_allowed_one(name):
    layer, arch = resolve(load_spec(name)), ARCHS["sm_90a"]
    best = best_slab(layer, arch)
    every = [slab_times(layer, arch, width) for width in KNOBS["slab_tiles"].legal(layer, arch)]
    assert best.allowed
    assert best.cost == min(times.cost for times in every if times.allowed)


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_every_knob_changes_the_plan_and_is_reported(name):
    layer = resolved(1024, hidden_size=1024, router={"input": "logits", "top_k": 2})
    before = {choice.name: choice for choice in plan_of(layer).choices}[name]
    legal = KNOBS[name].legal(layer, ARCHS["sm_90a"])
    value = next(value for value in legal if value != before.value)
    after = plan_of(replace(layer, knobs=((name, value),)))
    choice = {choice.name: choice for choice in after.choices}[name]
    assert (before.source, choice.source, choice.value) == ("derived", "spec", value)
    assert [kernel.constants for kernel in after.kernels] != [kernel.constants for kernel in plan_of(layer).kernels]


def test_an_unknown_knob_names_those_that_exist():
    with pytest.raises(PlanError, match="plan.slab: no knob has this name") as error:
        plan_of(resolved(plan__slab=2))
    assert "slab_tiles" in error.value.hint
    assert error.value.where == "plan.slab"


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("slab_tiles", 2, "legal values: 1"),
        ("stages", 9, "legal values: 2, 3, 4"),
        ("reduce_tokens", 3, "1, 2, 4, 8"),
        ("task_slots", "many", "2, 3, 4"),
        ("consumer_lag", 2, "0, 1"),
        ("gathers_in_flight", 4, "0, 1, 2, 3"),
    ],
)
def test_an_illegal_knob_names_the_legal_values(name, value, legal):
    with pytest.raises(PlanError) as error:
        plan_of(resolved(**{f"plan__{name}": value}))
    assert legal in error.value.hint


def test_the_lag_stays_below_the_stages():
    assert plan_of(resolved(plan__stages=2)).kernel("forward").constant("CONSUMER_LAG") == 1
    with pytest.raises(PlanError, match="plan.consumer_lag: 2 is not possible"):
        plan_of(resolved(plan__stages=2, plan__consumer_lag=2))


def test_many_experts_take_warps_from_the_schedule_kernel():
    plan = plan_of(resolved(experts__num=4096, router={"input": "ids", "top_k": 2}))
    schedule = plan.kernel("schedule")
    assert schedule.constant("NUM_WARPS") < 32
    assert schedule.shared_bytes <= ARCHS["sm_90a"].smem_bytes_per_cta
    with pytest.raises(PlanError, match="do not fit into shared memory"):
        plan_of(replace(resolved(), num_experts=20000, num_local_experts=20000))


def test_an_unknown_architecture_is_refused():
    with pytest.raises(UnsupportedError, match="sm_80"):
        make_plan(lower(resolved()), "sm_80")


# ---- JSON


@pytest.mark.parametrize("name", shipped_names())
def test_json_round_trip_is_exact(name):
    plan = shipped(name)
    text = plan.to_json()
    assert LayerPlan.from_json(text) == plan
    assert LayerPlan.from_json(text).to_json() == text


def test_json_keeps_an_infinite_and_a_finite_clamp():
    for layer in (resolved(), resolved(experts__activation="swigluoai")):
        assert LayerPlan.from_json(plan_of(layer).to_json()).layer == layer


@pytest.mark.parametrize("change", ["format", "extra", "missing", "type", "text"])
def test_what_is_no_plan_is_refused(change):
    data = json.loads(plan_of(resolved()).to_json())
    if change == "format":
        data["format"] = 0
    elif change == "extra":
        data["regions"][0]["colour"] = "red"
    elif change == "missing":
        del data["counters"]
    elif change == "type":
        data["workspace_bytes"] = "many"
    with pytest.raises(PlanError):
        LayerPlan.from_json("{" if change == "text" else json.dumps(data))


# ---- words


@pytest.mark.parametrize("name", shipped_names())
def test_the_plan_in_words_has_every_fact(name):
    plan = shipped(name)
    text = "\n".join(body for _, body, _ in explain.sections(plan)) + explain.summary(plan)
    forward = plan.kernel("forward")
    facts = [entry.name for entry in (*plan.regions, *plan.counters, *forward.kinds, *forward.roles, *plan.choices)]
    facts += [wait.text() for kind in forward.kinds for wait in kind.waits]
    facts += [str(plan.workspace_bytes), f"{forward.shared_bytes} of 232448", "reduction left exposed", "column tail"]
    assert [fact for fact in facts if fact not in text] == []
    assert text.isascii()


def test_padding_of_gpt_oss_is_shown():
    """H = I = 2880 are 11.25 tiles of 256 and 22.5 of 128."""
    loads = {load.kind: load for load in roofline(shipped("gpt_oss_20b")).loads}
    assert loads["fc1"].column_waste == pytest.approx(23 * 128 / 2880 - 1)
    assert loads["fc2"].column_waste == pytest.approx(12 * 256 / 2880 - 1)
    assert loads["fc1"].k_waste == loads["fc2"].k_waste == 0


def test_useful_flops_are_those_of_the_two_gemms():
    layer = resolve(load_spec("dsv3_slice"))
    loads = roofline(shipped("dsv3_slice")).loads
    rows = layer.max_tokens * layer.top_k
    assert sum(load.useful_flops for load in loads) == 6 * rows * layer.hidden_size * layer.intermediate_size


def test_planning_needs_no_torch():
    code = (
        "import sys; from mokgen.spec.load import load_spec; from mokgen.lower.resolve import resolve;"
        "from mokgen.lower.build import lower; from mokgen.plan.schedule import make_plan;"
        "from mokgen.plan.verify import verify; from mokgen.plan import explain;"
        "plan = make_plan(lower(resolve(load_spec('dsv3')))); assert verify(plan) == []; explain.sections(plan);"
        "assert not {'torch', 'cutlass'} & set(sys.modules), 'heavy import'"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=explain.__file__.rsplit("/mokgen/", 1)[0])


def test_random_layers_plan_and_hold():
    """Sizes off every tile: whatever is legal has a plan that verifies."""
    from mokgen.plan.verify import verify

    draw = random.Random(0)
    for _ in range(25):
        top_k = draw.randint(1, 9)
        layer = resolved(
            draw.choice((1, 5, 127, 128, 129, 4000)),
            hidden_size=8 * draw.randint(1, 600),
            experts__intermediate_size=8 * draw.randint(1, 400),
            experts__num=draw.randint(top_k, 300),
            experts__bias=draw.random() < 0.5,
            router={"input": draw.choice(("ids", "logits")), "top_k": top_k},
            shared__num=draw.randint(0, 2),
        )
        assert verify(plan_of(layer)) == [], layer
