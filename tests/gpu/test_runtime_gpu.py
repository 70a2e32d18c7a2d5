"""What only a GPU can show of the runtime: no host sync, graphs, streams, torch.compile, faults, host time, loading."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from layers import VARIANTS, arguments, resolved, subject

from mokgen.bench import host_us
from mokgen.errors import ArgumentError, DeviceWaitError, RoutingError, UnsupportedError
from mokgen.runtime import op, workspace
from mokgen.runtime.layer import load_layer

pytestmark = pytest.mark.gpu

HOST_LIMIT_US = 50.0
LOAD_LIMIT_S = 2.0
POKE = -(2**30)  # a counter that starts so low never reaches what a task waits for
WAIT_MS = 50


@pytest.fixture
def who():
    return subject("base", "cuda")


def given_of(who, tokens=64, pattern="balanced"):
    return arguments(who.resolved, tokens, pattern, "cuda")


ORDER = ("x", "logits_or_ids", "weights", *op.PARAMETERS, "shared_gate_logits", "selection_bias", "logit_bias")


def row(given) -> tuple:
    """The operator's tensors in its order."""
    return tuple(given.get(name) for name in ORDER)


def positional(who, given) -> tuple:
    return (who.layer.name, *row(given))


def routed_by_itself(who, given):
    """The same call from logits, where the layer has a router."""
    if who.resolved.router.input != "logits":
        return given
    experts, tokens = who.resolved.num_experts, len(given["x"])
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.zeros(experts, device="cuda")
    return given | {"logits_or_ids": logits, "weights": None, "selection_bias": bias}


# --- torch's own rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck(who, tokens):
    given = positional(who, given_of(who, tokens))
    result = torch.library.opcheck(torch.ops.mokgen.moe_forward.default, given)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_of_route():
    who = subject("router_deepseek_v3", "cuda")
    given = (who.layer.name, torch.randn(5, 256, device="cuda"), torch.randn(256, device="cuda"), None)
    result = torch.library.opcheck(torch.ops.mokgen.moe_route.default, given)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["base", "router_deepseek_v3"])
def test_no_host_synchronisation(name):
    who = subject(name, "cuda")
    given = routed_by_itself(who, given_of(who))
    who.layer(**given)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            who.layer(**given)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("name", ["base", "shared", "gpt_oss_expert", "router_deepseek_v3"])
def test_a_call_is_its_launches_and_nothing_else_on_the_device(name):
    """No copy, fill or conversion; and the profiler sees the operator, though calls nobody looks on skip it."""
    who = subject(name, "cuda")
    given = routed_by_itself(who, given_of(who))
    with torch.no_grad():
        who.layer(**given)
        torch.cuda.synchronize()
        kinds = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as seen:
            who.layer(**given)
            torch.cuda.synchronize()
    events = seen.events()
    on_device = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    print(name, "calls:", [event.name for event in events if event.name.startswith("cu")])
    assert len(on_device) == 2 + (who.resolved.router.input == "logits"), on_device
    assert all(device_name.startswith("kernel_cutlass") for device_name in on_device), on_device
    assert any(event.name == "mokgen::moe_forward" for event in events)


@pytest.mark.parametrize("name", ["base", "shared", "gpt_oss_expert", "router_deepseek_v3"])
@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_the_operator_and_a_call_that_skips_it_agree(name, tokens):
    who = subject(name, "cuda")
    given = routed_by_itself(who, given_of(who, tokens))
    assert op.only_computes(row(given))
    assert torch.equal(who.layer(**given), torch.ops.mokgen.moe_forward(*positional(who, given)))


def test_a_single_row_may_have_any_stride(who):
    given = given_of(who, 1)
    expected = who.layer(**given)
    for name in ("x", "logits_or_ids", "weights"):
        wide = torch.zeros(2, given[name].shape[1] + 8, dtype=given[name].dtype, device="cuda")
        wide[:1, : given[name].shape[1]] = given[name]
        given[name] = wide[:1, : given[name].shape[1]]
    assert torch.equal(who.layer(**given), expected)


def test_torch_compile_fullgraph(who):
    given = given_of(who)

    def block(x, ids, weights, w_gate_up, w_down):
        return torch.relu(who.layer(2 * x, ids, weights, w_gate_up=w_gate_up, w_down=w_down)) + x

    torch._dynamo.reset()
    backend = "inductor" if shutil.which("cc") or shutil.which("gcc") else "aot_eager"  # Triton compiles launchers in C
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 64, 129):
        given = given_of(who, tokens)
        order = [given[name] for name in ("x", "logits_or_ids", "weights", "w_gate_up", "w_down")]
        torch.testing.assert_close(compiled(*order), block(*order), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="Triton needs a C compiler")
def test_torch_compile_with_cuda_graphs(who):
    """Inductor warms up and captures in a memory pool of its own and refuses memory that somebody keeps there."""
    given = given_of(who)
    order = [given[name] for name in ("x", "logits_or_ids", "weights", "w_gate_up", "w_down")]

    def block(x, ids, weights, w_gate_up, w_down):
        return who.layer(x, ids, weights, w_gate_up=w_gate_up, w_down=w_down) + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        expected = block(*order)
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*order).clone(), expected)
    who.layer.check()


def test_backward_says_that_there_is_none(who):
    given = given_of(who)
    given["w_down"].requires_grad_()
    with pytest.raises(UnsupportedError, match="no backward"):
        who.layer(**given).sum().backward()


# --- graphs and streams -----------------------------------------------------------------------------------------------


def test_cuda_graph_replays_with_new_inputs(who):
    static = given_of(who)
    who.layer(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = who.layer(**static)
    for pattern in ("zipf", "masked", "all_to_one", "all_masked"):
        fresh = given_of(who, 64, pattern)
        for name in ("x", "logits_or_ids", "weights"):
            static[name].copy_(fresh[name])
        graph.replay()
        assert torch.equal(out, who.layer(**fresh)), pattern
    who.layer.check()


def test_two_graphs_replayed_on_two_streams_do_not_share_memory(who):
    calls = [given_of(who, 1024, pattern) for pattern in ("zipf", "ragged")]
    expected = [who.layer(**given) for given in calls]
    graphs, outs = [], []
    for given in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(who.layer(**given))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))
    who.layer.check()


def test_a_wrong_id_in_a_replay_is_reported(who):
    static = given_of(who)
    who.layer(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        who.layer(**static)
    static["logits_or_ids"][3, 1] = 8
    graph.replay()
    with pytest.raises(RoutingError, match="token 3, slot 1: expert id 8"):
        who.layer.check()


def test_a_checked_layer_is_not_captured():
    who = subject("checked", "cuda")
    given = given_of(who)
    who.layer(**given)
    with pytest.raises(ArgumentError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        who.layer(**given)
    torch.cuda.synchronize()
    who.layer(**given)


def test_streams_have_workspaces_of_their_own(who):
    calls = [given_of(who, 1024, pattern) for pattern in ("zipf", "ragged", "balanced", "duplicates")]
    expected = [who.layer(**given) for given in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found = [[] for _ in calls]
    for _ in range(20):
        for stream, given, outs in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(who.layer(**given))
    torch.cuda.synchronize()
    for outs, want in zip(found, expected, strict=True):
        assert all(torch.equal(out, want) for out in outs)
    held = {key for key, _ in workspace.held_bytes()}
    assert {(torch.cuda.current_device(), stream.cuda_stream) for stream in streams} <= held


def test_the_workspace_is_allocated_once_a_stream(who):
    given = given_of(who, 256)
    who.layer(**given)
    before = dict(workspace.held_bytes())
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        out = who.layer(**given)
    assert dict(workspace.held_bytes()) == before
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocated == 10  # the outputs
    del out


# --- faults -----------------------------------------------------------------------------------------------------------

# counter to spoil, variant that has it, task that waits for it
FAULTS = [
    ("hidden_ready", "base", "fc2"),
    ("shared_hidden_ready", "shared", "shared_fc2"),
    ("slab_done", "base", "reduce"),
    ("slab_done", "shared", "reduce"),
]


@pytest.mark.parametrize("ctas", [None, 1, 5])
@pytest.mark.parametrize(("counter", "name", "task"), FAULTS)
def test_a_wait_that_never_ends_is_an_error_and_the_next_call_works(counter, name, task, ctas):
    who = subject(name, "cuda")
    layer, given = who.layer, given_of(who, 300)
    expected = layer(**given)
    spoiled, done = layer.plan.counter(counter), layer.plan.counter("slab_done")
    memory = torch.zeros(layer.workspace_bytes, dtype=torch.uint8, device="cuda")
    words, out = layer.error_words.address, torch.empty_like(given["x"])
    layer.launcher.schedule(given["logits_or_ids"], memory, words)
    counters = layer.regions(memory)["counters"]
    # Reduce warps wait from the start and would expire first, whatever counter is the cause.
    counters[done.word : done.word + done.length] = -POKE
    counters[spoiled.word] = POKE
    parameters = tuple(given.get(parameter) for parameter in op.PARAMETERS)
    count = ctas or torch.cuda.get_device_properties(0).multi_processor_count
    start = time.perf_counter()
    layer.launcher.forward(
        given["x"], given["weights"], parameters, None, out, memory, count, WAIT_MS * 1_000_000, words
    )
    with pytest.raises(DeviceWaitError) as caught:
        layer.check()
    assert time.perf_counter() - start < 20 * WAIT_MS / 1000  # after the first expiry nobody waits
    text = str(caught.value)
    for part in (f"task {task}", counter, "CTA ", " warps", "needed ", "invalid"):
        assert part in text, text
    assert int(counters[layer.plan.counter("error").word]) == 1
    for _ in range(3):
        assert torch.equal(layer(**given), expected)
    layer.check()


@pytest.mark.parametrize(("counter", "name"), [fault[:2] for fault in FAULTS])
def test_a_stuck_counter_is_named_whoever_waited_first(counter, name):
    who = subject(name, "cuda")
    layer, given = who.layer, given_of(who, 300)
    expected = layer(**given)
    spoiled, words = layer.plan.counter(counter), layer.error_words.address
    memory = workspace.take(layer.workspace_bytes, torch.cuda.current_device(), layer.name, 300)
    layer.launcher.schedule(given["logits_or_ids"], memory, words)
    layer.regions(memory)["counters"][spoiled.word] = POKE
    out, sms = torch.empty_like(given["x"]), torch.cuda.get_device_properties(0).multi_processor_count
    parameters, limit = row(given)[3:9], WAIT_MS * 1_000_000
    layer.launcher.forward(given["x"], given["weights"], parameters, None, out, memory, sms, limit, words)
    torch.cuda.synchronize()
    place = f"{counter}[0]" if spoiled.length > 1 else counter
    with pytest.raises(DeviceWaitError, match=re.escape(f"; short in the end: {place} = -")) as caught:
        layer(**given)
    assert " more" not in str(caught.value)  # nothing else is short
    assert torch.equal(layer(**given), expected)
    layer.check()


def test_an_expired_wait_is_raised_by_the_next_call(who):
    given = given_of(who)
    who.layer.error_words.words[8] = 1
    with pytest.raises(DeviceWaitError, match="an earlier call"):
        who.layer(**given)
    who.layer(**given)


# --- time and loading -------------------------------------------------------------------------------------------------


def host_parts(who, given) -> dict[str, float]:
    """Microseconds of what a call does, each alone."""
    layer, device, given = who.layer, torch.cuda.current_device(), row(given)
    own_routing = given[2] is None
    ids, weights = layer._routed(given[1], *given[10:]) if own_routing else given[1:3]
    memory, out = workspace.take(layer.workspace_bytes, device, layer.name, 64), torch.empty_like(given[0])
    words, sms = layer.error_words.address, torch.cuda.get_device_properties(device).multi_processor_count
    numbers = (sms, layer.wait_limit_ns, words)
    parts = {
        "run": lambda: layer.run(*given),
        "fits": lambda: layer._fits[own_routing](given),
        "only_computes": lambda: op.only_computes(given),
        "take": lambda: workspace.take(layer.workspace_bytes, device, layer.name, 64),
        "current_device": torch.cuda.current_device,
        "is_capturing": torch.cuda.is_current_stream_capturing,
        "empty": lambda: torch.empty_like(given[0]),
        "schedule": lambda: layer.launcher.schedule(ids, memory, words),
        "forward": lambda: layer.launcher.forward(given[0], weights, given[3:9], given[9], out, memory, *numbers),
    }
    if own_routing:
        parts["route"] = lambda: layer.launcher.route(given[1], *given[10:], ids, weights)
    return {name: round(host_us(part), 1) for name, part in parts.items()}


@pytest.mark.parametrize("name", ["base", "shared", "gpt_oss_expert", "router_deepseek_v3"])
def test_host_time_of_a_call(name):
    who = subject(name, "cuda")
    given = routed_by_itself(who, given_of(who))
    with torch.no_grad():
        spent = min(host_us(lambda: who.layer(**given)) for _ in range(3))
        parts = host_parts(who, given)
    print(f"{name}: {spent:.1f} us; {parts}; fast exchange {hasattr(torch.Tensor, '__dlpack_c_exchange_api__')}")
    assert spent <= HOST_LIMIT_US, parts


def test_a_warm_load_is_quick_and_imports_no_compiler(who):
    directory = who.layer.program.directory
    code = (
        "import json, sys, time, torch; torch.zeros(1, device='cuda'); start = time.perf_counter()\n"
        f"import mokgen; layer = mokgen.load_artifact({str(directory)!r})\n"
        "print(json.dumps([time.perf_counter() - start, 'cutlass' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    seconds, compiler = json.loads(done.stdout.strip().splitlines()[-1])
    assert seconds <= LOAD_LIMIT_S and not compiler


def test_loading_again_gives_a_second_layer_over_the_same_kernels(who):
    again = load_layer(resolved(**VARIANTS["base"]))
    assert again.name != who.layer.name
    given = given_of(who)
    assert torch.equal(again(**given), who.layer(**given))


def test_a_weight_changed_in_place_is_noticed(who):
    """The quick look knows weights by identity; the kernels' stub still compares every tensor of every launch."""
    given = given_of(who)
    weight = given["w_down"] = given["w_down"].clone()
    expected, kept = who.layer(**given), weight.data
    changes = {
        "shape": kept[..., :128].contiguous(),
        "dtype": kept.to(torch.float16),
        "strides": torch.zeros(8, 256, 264, dtype=kept.dtype, device="cuda")[..., :256],
        "past a multiple of 16": torch.zeros(kept.numel() + 1, dtype=kept.dtype, device="cuda")[1:].view(kept.shape),
    }
    for message, changed in changes.items():
        weight.data = changed
        with pytest.raises(ArgumentError, match=f"w_down: .*{message}"):
            who.layer(**given)
        weight.data = kept
        assert torch.equal(who.layer(**given), expected)


def test_tensors_of_another_device_are_refused(who):
    given = given_of(who)
    with pytest.raises(ArgumentError, match="w_down: on cpu, but x is on cuda"):
        who.layer(**{**given, "w_down": given["w_down"].cpu()})
