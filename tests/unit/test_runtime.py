"""The runtime without a GPU: error records, workspace, argument order, registry, the operator under torch's checks."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys

import pytest
import torch
from layers import arguments, cpu_layer, resolved
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import mokgen
from mokgen.errors import ArtifactMismatchError, DeviceWaitError, PlanError, RoutingError, UnsupportedError
from mokgen.lower.build import lower
from mokgen.plan.schedule import make_plan
from mokgen.plan.tasks import Problem, instantiate
from mokgen.runtime import errors, op, postmortem, workspace
from mokgen.runtime.launch import FORWARD_ARGUMENTS, Launcher, id_words_of
from mokgen.runtime.layer import Layer, compile_count
from mokgen.runtime.workspace import Layout, RegionView


@pytest.fixture(scope="module")
def layer() -> Layer:
    return cpu_layer(max_tokens=128)


# --- error records ----------------------------------------------------------------------------------------------------


def test_an_id_record_reads_as_token_slot_and_value(layer):
    layer.error_words.record_id(17, 1, 8)
    with pytest.raises(RoutingError, match=r"token 17, slot 1: expert id 8 is outside \[-1, 8\)"):
        layer.check()
    layer.check()  # reading a record clears it


@pytest.mark.parametrize("value", [8, -2, 2**31, 2**32 + 3, -(2**40), 2**63 - 1, -(2**63)])
def test_wide_ids_keep_their_value(layer, value):
    layer.error_words.record_id(0, 0, value)
    with pytest.raises(RoutingError, match=f"expert id {value} is"):
        layer.check()


def test_a_wait_record_names_role_task_and_counter(layer):
    counter, forward = layer.plan.counter("hidden_ready"), layer.plan.kernel("forward")
    kind, role = forward.kind("fc2"), forward.role("load")
    words = layer.error_words.words
    record = [1, 5, role.code, kind.code, counter.word + 3, -7, 2, 0]
    words[errors.WAIT_FLAG : errors.WAIT_FLAG + 8] = record
    with pytest.raises(DeviceWaitError) as caught:
        layer.check()
    text = str(caught.value)
    for part in ("CTA 5", "load warps", "task fc2", "counter hidden_ready[3] = -7", "needed 2", "rank 0", "invalid"):
        assert part in text
    layer.check()


def test_numbers_the_plan_does_not_know_are_printed_as_numbers(layer):
    layer.error_words.words[errors.WAIT_FLAG : errors.WAIT_FLAG + 8] = [1, 0, 99, 98, 10**6, 0, 1, 0]
    with pytest.raises(DeviceWaitError, match=r"role 99 warps, task kind 98, counter counters\[1000000\]"):
        layer.check()


def test_a_wait_comes_before_an_id(layer):
    layer.error_words.record_id(0, 0, 9)
    layer.error_words.words[errors.WAIT_FLAG] = 1
    with pytest.raises(DeviceWaitError):
        layer.check()


def test_every_counter_of_a_plan_has_a_name(layer):
    names = layer.program.read_names()
    for counter in layer.plan.counters:
        for place in (0, counter.length - 1):
            assert names.counter(counter.word + place).startswith(counter.name)
    roles = {role.code for role in layer.plan.kernel("forward").roles}
    assert set(names.roles) == roles


def test_error_words_outlive_their_layer():
    words = errors.ErrorWords()
    address = words.address
    del words
    gc.collect()
    assert any(memory.data_ptr() == address for memory in errors.ErrorWords._kept)


# --- post-mortem ------------------------------------------------------------------------------------------------------


def complete_counters(plan, tokens, expert_blocks) -> list[int]:
    """The counters region after a call in which every task ran: the sum of what the tasks signal, one by one."""
    forward, words = plan.kernel("forward"), [0] * plan.region("counters").shape[0]
    for queue in forward.queues:
        for task in instantiate(forward, Problem(tokens, expert_blocks), queue.name):
            for signal in task.kind.signals:
                words[plan.counter(signal.counter).word + task.index(signal.index)] += signal.amount
    return words


SEVERAL_SLABS = {"hidden_size": 3584, "plan__slab_tiles": 4, "shared__num": 1}


@pytest.mark.parametrize("changes", [{}, {"shared__num": 1}, SEVERAL_SLABS], ids=str)
def test_counters_that_are_short_after_a_call_are_named_in_plan_order(changes):
    plan = make_plan(lower(resolved(512, **changes)), "sm_90a")
    tokens, blocks = 300, (1, 0, 2, 1, 0, 0, 3, 1)
    words = complete_counters(plan, tokens, blocks)
    assert list(postmortem.short_counters(plan, words, sum(blocks), tokens)) == []
    assert "slow, not stuck" in postmortem.verdict(plan, words, sum(blocks), tokens)
    ready = [counter for counter in plan.counters if counter.purpose == "ready"]
    expected = []
    for counter in ready:
        want = words[counter.word]
        words[counter.word] -= 1 if counter.name == "slab_done" else 2**30
        name = f"{counter.name}[0]" if counter.length > 1 else counter.name
        expected.append((name, words[counter.word], want))
    assert list(postmortem.short_counters(plan, words, sum(blocks), tokens)) == expected
    name, have, want = expected[0]
    found = postmortem.verdict(plan, words, sum(blocks), tokens)
    assert found.startswith(f"short in the end: {name} = {have} of {want}")


def test_counters_of_row_blocks_that_a_call_does_not_have_are_not_short(layer):
    words = complete_counters(layer.plan, 5, (0, 0, 0, 0, 0, 0, 0, 0))
    assert list(postmortem.short_counters(layer.plan, words, 0, 5)) == []
    short = dict.fromkeys(name for name, _, _ in postmortem.short_counters(layer.plan, words, 2, 5))
    assert list(short)[:2] == ["hidden_ready[0]", "hidden_ready[1]"]


@pytest.fixture
def device(monkeypatch):
    """A device made of CPU memory with one stream, whose number the test may set; holds no buffers before and after."""
    state = {"stream": 0, "capturing": False}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state["stream"], raising=False)
    monkeypatch.setattr(workspace, "_fresh", lambda num_bytes, device: torch.zeros(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(workspace, "_in_default_pool", lambda memory: True)
    monkeypatch.setattr(workspace, "_pool", {})
    return state


def test_an_error_tells_the_cause_while_the_workspace_is_there(layer, device):
    def failing_call():
        layer.error_words.words[errors.WAIT_FLAG : errors.WAIT_FLAG + 8] = [1, 5, 3, 4, done.word, 0, 8, 0]
        with pytest.raises(DeviceWaitError, match=r"slab_done(\[0\])? = 0, needed 8") as caught:
            layer.check()
        return str(caught.value)

    done, stuck = layer.plan.counter("slab_done"), layer.plan.counter("hidden_ready")
    assert "in the end" not in failing_call()  # nothing was called yet
    views = layer.regions(workspace.take(layer.workspace_bytes, 0, layer.name, 100))
    blocks = (1, 1, 0, 0, 0, 0, 0, 1)
    views["counters"].copy_(torch.tensor(complete_counters(layer.plan, 100, blocks)))
    views["block_start"].copy_(torch.tensor([0, 1, 2, 2, 2, 2, 2, 2, 3]))
    assert "in the end" not in failing_call()  # the last call there did not fail
    views["counters"][layer.plan.counter("error").word] = 1
    assert "every counter was complete in the end" in failing_call()
    views["counters"][stuck.word + 1] -= 1
    assert "; short in the end: hidden_ready[1] = " in failing_call()
    device["capturing"] = True
    assert "in the end" not in failing_call()  # reading would break the capture
    device["capturing"] = False
    workspace.take(layer.workspace_bytes, 0, "another layer", 100)
    assert "in the end" not in failing_call()


def test_a_plan_of_another_mokgen_does_not_hide_the_error(layer, device):
    def read_plan():
        raise PlanError("not a plan")

    workspace.take(layer.workspace_bytes, 0, layer.name, 100)
    assert postmortem.cause(read_plan, layer.program.layout, layer.name) == ""


def test_a_workspace_is_kept_by_stream_and_grows(device):
    first = workspace.take(1024, 0, "a", 1)
    assert workspace.take(1024, 0, "b", 2) is first
    small = workspace.take(512, 0, "b", 3)
    assert small.data_ptr() == first.data_ptr() and small.shape == (512,)
    assert workspace.take(512, 0, "b", 3) is small
    device["stream"] = 7
    other = workspace.take(1024, 0, "a", 4)
    assert other.data_ptr() != first.data_ptr()
    assert [(view.data_ptr(), tokens) for view, tokens in workspace.left_by("a", 1024)] == [(other.data_ptr(), 4)]
    assert dict(workspace.held_bytes()) == {(0, 0): 1024, (0, 7): 1024}
    grown = workspace.take(4096, 0, "b", 5)
    assert dict(workspace.held_bytes()) == {(0, 0): 1024, (0, 7): 4096} and workspace.left_by("a", 1024) == []
    assert workspace.take(1024, 0, "b", 5).data_ptr() == grown.data_ptr()
    workspace.clear()
    assert not list(workspace.held_bytes())


def test_a_capture_gets_memory_of_its_own(device):
    held = workspace.take(1024, 0, "a", 1)
    device["capturing"] = True
    taken = [workspace.take(1024, 0, "a", 1) for _ in range(2)]
    assert len({memory.data_ptr() for memory in (held, *taken)}) == 3
    device["capturing"] = False
    assert workspace.take(1024, 0, "a", 1) is held


def test_memory_of_a_private_pool_is_not_kept(device, monkeypatch):
    monkeypatch.setattr(workspace, "_in_default_pool", lambda memory: False)
    assert workspace.take(1024, 0, "a", 1) is not workspace.take(1024, 0, "a", 1)
    assert not list(workspace.held_bytes())


def test_the_cause_stands_behind_the_record():
    names = errors.Names({}, {}, ())
    assert "needed 0; short in the end: a" in str(errors.wait_error((0,) * 16, names, "x", "short in the end: a"))
    assert str(errors.wait_error((0,) * 16, names, "x")).splitlines()[0].endswith("needed 0")


# --- workspace --------------------------------------------------------------------------------------------------------


def test_region_views_share_the_workspace(layer):
    memory = torch.zeros(layer.workspace_bytes, dtype=torch.uint8)
    views = layer.regions(memory)
    plan = layer.plan
    assert set(views) == {region.name for region in plan.regions}
    for region in plan.regions:
        view = views[region.name]
        assert tuple(view.shape) == region.shape
        assert view.data_ptr() == memory.data_ptr() + region.offset
    views["slot_row"].fill_(-1)
    start = plan.region("slot_row").offset
    assert bool((memory[start : start + plan.region("slot_row").bytes] == 255).all())


def test_tile_m_is_read_from_the_table():
    regions = (RegionView("row_token", "int32", (640,), 0), RegionView("block_expert", "int32", (5,), 4096))
    assert Layout(8192, regions).tile_m == 128


# --- launch -----------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for a compiled kernel and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *given: object) -> None:
        self.calls.append(given)


ALL = {"experts__bias": True, "shared__num": 1, "shared__gate": "sigmoid"}


@pytest.mark.parametrize("changes", [{}, {"experts__bias": True}, {"shared__num": 1}, ALL], ids=str)
def test_launches_pass_what_the_plan_lists_in_its_order(changes):
    layer = resolved(128, **changes)
    plan = make_plan(lower(layer), "sm_90a")
    names = {kernel.name: tuple(argument.name for argument in kernel.arguments) for kernel in plan.kernels}
    schedule, forward = Recorder(), Recorder()
    launcher = Launcher({"schedule": schedule, "forward": forward}, names)
    tagged = dict(zip(FORWARD_ARGUMENTS, FORWARD_ARGUMENTS, strict=True))
    parameters = tuple(tagged[name] for name in op.PARAMETERS)
    rest = FORWARD_ARGUMENTS[2 + len(parameters) :]
    launcher.forward("x", "topk_weights", parameters, *rest)
    assert forward.calls == [names["forward"]]
    ids = torch.zeros(3, 2, dtype=torch.int32)
    launcher.schedule(ids, "workspace", "error_address")
    assert schedule.calls[0][0] is ids and schedule.calls[0][1:] == (1, "workspace", "error_address")


def test_a_route_kernel_gets_its_optional_biases():
    layer = resolved(128, router={"input": "logits", "top_k": 2, "selection_bias": True})
    plan = make_plan(lower(layer), "sm_90a")
    names = {kernel.name: tuple(argument.name for argument in kernel.arguments) for kernel in plan.kernels}
    route = Recorder()
    Launcher({"route": route, "schedule": Recorder(), "forward": Recorder()}, names).route("l", "s", None, "i", "w")
    assert route.calls == [("l", "s", "i", "w")]


def test_int64_ids_are_read_as_words():
    ids = torch.tensor([[1, -1], [2**32 + 5, 7]])
    words, count = id_words_of(ids)
    assert count == 2 and words.shape == (2, 4) and words.data_ptr() == ids.data_ptr()
    assert words.tolist() == [[1, 0, -1, -1], [5, 1, 7, 0]]


def test_an_argument_nobody_knows_is_refused_at_load():
    names = {"schedule": ("ids",), "forward": ("x", "dispatch_table")}
    with pytest.raises(ArtifactMismatchError, match="forward takes dispatch_table"):
        Launcher({"schedule": Recorder(), "forward": Recorder()}, names)


# --- the operator -----------------------------------------------------------------------------------------------------


def positional(layer: Layer, given: dict) -> tuple:
    return (
        layer.name,
        given["x"],
        given["logits_or_ids"],
        given.get("weights"),
        *(given.get(name) for name in op.PARAMETERS),
        given.get("shared_gate_logits"),
        given.get("selection_bias"),
        given.get("logit_bias"),
    )


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_opcheck(layer, tokens, id_dtype):
    given = arguments(layer.layer, tokens)
    given["logits_or_ids"] = given["logits_or_ids"].to(id_dtype)
    result = torch.library.opcheck(torch.ops.mokgen.moe_forward.default, positional(layer, given), test_utils=CHECKS)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_of_route():
    layer = cpu_layer(max_tokens=128, router={"input": "logits", "top_k": 2, "selection_bias": True})
    given = (layer.name, torch.randn(5, 8), torch.randn(8), None)
    result = torch.library.opcheck(torch.ops.mokgen.moe_route.default, given, test_utils=CHECKS)
    assert set(result.values()) == {"SUCCESS"}


def test_torch_compile_fullgraph_takes_every_number_of_tokens(layer):
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = layer

        def forward(self, x, ids, weights, w_gate_up, w_down):
            return 2 * self.moe(x, ids, weights, w_gate_up=w_gate_up, w_down=w_down) + x

    block, graphs = Block(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 7, 64, 128):
        given = arguments(layer.layer, tokens)
        order = [given[name] for name in ("x", "logits_or_ids", "weights", "w_gate_up", "w_down")]
        assert torch.equal(compiled(*order), block(*order))
    assert len(graphs) == 1
    assert "moe_forward" in graphs[0].code


def test_weights_may_be_given_by_position(layer):
    given = arguments(layer.layer, 7)
    order = ("x", "logits_or_ids", "weights", *op.PARAMETERS)
    assert torch.equal(layer(*(given.get(name) for name in order)), layer(**given))


class Subclass(torch.Tensor):
    pass


class Watch(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_ordinary_tensors_with_nobody_looking_on():
    plain, wants = torch.zeros(2), torch.zeros(2, requires_grad=True)
    given = (plain, torch.nn.Parameter(torch.zeros(2), requires_grad=False), None)
    assert op.nobody_looks_on(given)
    assert not op.nobody_looks_on((wants, None))
    with torch.no_grad():
        assert op.nobody_looks_on((wants, None))
    with torch.inference_mode():
        assert op.nobody_looks_on((torch.zeros(2), plain))
    assert not op.only_computes(given)  # on the CPU
    assert not op.only_computes((None, None))


@pytest.mark.filterwarnings("ignore:.*jit.trace.*:DeprecationWarning")
def test_whoever_looks_on_is_noticed():
    given = (torch.zeros(2), None)
    assert not op.nobody_looks_on((torch.zeros(2), torch.zeros(2).as_subclass(Subclass)))
    assert not op.nobody_looks_on((3, None))
    modes = (FakeTensorMode(), Watch(), FlopCounterMode(display=False), torch.profiler.profile())
    for context in modes:
        with context:
            assert not op.nobody_looks_on(given), context
        assert op.nobody_looks_on(given)
    with torch.device("cpu"):
        assert op.nobody_looks_on(given)
        with Watch():
            assert not op.nobody_looks_on(given)
    seen = []

    def note(x):
        seen.append(op.nobody_looks_on(given))
        return x + 1

    make_fx(note)(torch.zeros(2))
    torch.func.vmap(note)(torch.zeros(2, 2))
    torch.func.functionalize(note)(torch.zeros(2))
    torch.jit.trace(note, torch.zeros(2), check_trace=False)
    assert seen == [False] * 4


def test_backward_says_that_there_is_none(layer):
    given = arguments(layer.layer, 5)
    given["x"].requires_grad_()
    out = layer(**given)
    with pytest.raises(UnsupportedError, match="no backward"):
        out.sum().backward()
    with torch.no_grad():
        assert not layer(**given).requires_grad


def test_names_in_the_registry_are_unique_and_given_back():
    first, second = cpu_layer(max_tokens=32), cpu_layer(max_tokens=32)
    assert first.name != second.name
    name = second.name
    del second
    gc.collect()
    with pytest.raises(RuntimeError, match="not loaded in this process"):
        torch.ops.mokgen.moe_forward(name, *positional(first, arguments(first.layer, 1))[1:])


def test_a_deep_copy_is_a_layer_of_its_own(layer):
    layer.wait_limit_ns, before = 5, layer.wait_limit_ns
    try:
        twin = copy.deepcopy(layer)
    finally:
        layer.wait_limit_ns = before
    assert twin.name != layer.name and twin.wait_limit_ns == 5 and twin.program is layer.program
    given = arguments(layer.layer, 3)
    assert torch.equal(twin(**given), layer(**given))


def test_a_layer_without_artifact_does_not_pickle(layer):
    with pytest.raises(TypeError, match="artifact"):
        pickle.dumps(layer)


def test_no_kernels_on_a_cpu_layer(layer):
    with pytest.raises(ArtifactMismatchError, match="CPU only"):
        layer._kernels()


def test_calls_do_not_count_as_compilations(layer):
    before = compile_count()
    for tokens in (0, 1, 2, 64):
        layer(**arguments(layer.layer, tokens))
    assert compile_count() == before == mokgen.compile_count()


def test_loading_imports_no_compiler():
    code = "import sys, mokgen.runtime.layer, mokgen.testing; print('cutlass' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
