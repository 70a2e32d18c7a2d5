"""What only a GPU can show of the runtime: no host sync, graphs, streams, torch.compile, faults, host time, loading."""

from __future__ import annotations

import json
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


def positional(who, given) -> tuple:
    parameters = (given.get(name) for name in op.PARAMETERS)
    return (who.layer.name, given["x"], given["logits_or_ids"], given["weights"], *parameters, None, None, None)


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
    given = given_of(who)
    if who.resolved.router.input == "logits":
        given |= {"logits_or_ids": torch.randn(64, 256, device="cuda"), "weights": None}
        given["selection_bias"] = torch.zeros(256, device="cuda")
    who.layer(**given)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            who.layer(**given)
    finally:
        torch.cuda.set_sync_debug_mode(before)


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


def test_an_expired_wait_is_raised_by_the_next_call(who):
    given = given_of(who)
    who.layer.error_words.words[8] = 1
    with pytest.raises(DeviceWaitError, match="an earlier call"):
        who.layer(**given)
    who.layer(**given)


# --- time and loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["base", "shared", "gpt_oss_expert", "router_deepseek_v3"])
def test_host_time_of_a_call(name):
    who = subject(name, "cuda")
    given = given_of(who)
    if who.resolved.router.input == "logits":
        given |= {"logits_or_ids": torch.randn(64, who.resolved.num_experts, device="cuda"), "weights": None}
        given["selection_bias"] = torch.zeros(who.resolved.num_experts, device="cuda")
    with torch.no_grad():
        spent = min(host_us(lambda: who.layer(**given)) for _ in range(3))
    print(f"{name}: {spent:.1f} us")
    assert spent <= HOST_LIMIT_US


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


def test_tensors_of_another_device_are_refused(who):
    given = given_of(who)
    with pytest.raises(ArgumentError, match="w_down: on cpu, but x is on cuda"):
        who.layer(**{**given, "w_down": given["w_down"].cpu()})
