"""check_layer finds what it promises to find: every planted fault fails, and the sound layer passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from layers import cpu_layer, spec

from mokgen.codegen.templates import render
from mokgen.errors import ArgumentError, ToolchainError
from mokgen.lower.resolve import resolve
from mokgen.reference import oracle as reference
from mokgen.reference.inputs import PATTERNS
from mokgen.runtime import host
from mokgen.runtime.layer import Layer
from mokgen.settings import shipped
from mokgen.spec.load import load_spec
from mokgen.spec.reduce import reduced_twin
from mokgen.testing import CheckFailed, Subject, check_layer, open_subject, reduced_layer
from mokgen.testing.guarded import Guarded

SPECS = sorted(shipped("specs").glob("*.yaml"))
CPU = torch.device("cpu")


def quiet(_: str) -> None:
    pass


@pytest.fixture
def layer() -> Layer:
    return cpu_layer(max_tokens=257, shared__num=1)


@pytest.fixture
def subject(layer: Layer) -> Subject:
    return Subject(layer, CPU, "a layer under test")


def plant(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, dict[str, torch.Tensor], int], None]
) -> None:
    """After every run of the executor, `change(out, buffers, number of the run)`."""
    honest, runs = host.forward, []

    def forward(plan, tensors, out, interleaving):
        buffers = honest(plan, tensors, out, interleaving)
        runs.append(interleaving)
        change(out, buffers, len(runs))
        return buffers

    monkeypatch.setattr(host, "forward", forward)


def failure(subject: Subject, pattern: str = "balanced", tokens: int = 129) -> str:
    with pytest.raises(CheckFailed) as caught:
        check_layer(subject, [pattern], [tokens], show=quiet)
    text = str(caught.value)
    assert "a layer under test" in text and f"pattern {pattern}, T={tokens}" in text
    return text


def test_the_sound_layer_passes(subject):
    report = check_layer(subject, ["balanced", "masked"], [0, 1, 129], show=quiet)
    assert len(report.cases) == 6
    assert "a layer under test" in str(report) and "baseline" in str(report)


@pytest.mark.parametrize(
    ("patterns", "tokens", "message"),
    [
        (["balancd"], [1], "no pattern is called 'balancd'"),
        (["router"], [1], "no pattern is called 'router'"),
        ([], [1], "0 patterns"),
        (["balanced"], [], r"tokens \[\]"),
        (["balanced"], [7, -1], r"tokens \[7, -1\]"),
    ],
)
def test_a_check_of_nothing_is_refused(subject, patterns, tokens, message):
    with pytest.raises(ArgumentError, match=message):
        check_layer(subject, patterns, tokens, show=quiet)


def test_a_check_runs_on_one_thread_and_gives_the_others_back(monkeypatch, subject):
    before, seen = torch.get_num_threads(), []
    plant(monkeypatch, lambda out, buffers, run: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        check_layer(subject, ["balanced"], [1], show=quiet)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1} and after == 2


def test_default_cases_are_every_pattern_with_every_number_of_tokens(monkeypatch, subject):
    seen = []
    monkeypatch.setattr(
        "mokgen.testing.check._check_case", lambda _, pattern, tokens, __: seen.append((pattern, tokens))
    )
    check_layer(subject, show=quiet)
    assert seen == [(pattern, tokens) for pattern in PATTERNS for tokens in (0, 1, 7, 129, 257)]


def scaled(out, buffers, run):
    out.mul_(1.01)


def lost_row(out, buffers, run):
    out[5] = 0


def nan(out, buffers, run):
    out[3, 7] = math.nan


def swapped_rows(out, buffers, run):
    out.copy_(out[[1, 0, *range(2, len(out))]])


def never_written(out, buffers, run):
    out[-1, -64:] = math.nan  # what poison looks like


@pytest.mark.parametrize("change", [scaled, lost_row, nan, swapped_rows, never_written])
def test_wrong_outputs(monkeypatch, subject, change):
    plant(monkeypatch, change)
    assert "first bad buffer: none, so the reduction is wrong" in failure(subject)


@pytest.mark.parametrize("name", ["block_start", "block_expert", "block_rows", "row_token", "slot_row"])
def test_a_wrong_table_is_named_first(monkeypatch, subject, name):
    def change(out, buffers, run):
        buffers[name][-1] += 1
        out.mul_(2)

    plant(monkeypatch, change)
    assert f"first bad buffer: {name}: 1 of" in failure(subject)


@pytest.mark.parametrize("name", ["hidden", "y", "shared_hidden", "shared_y"])
def test_a_wrong_buffer_is_named_even_if_the_output_is_right(monkeypatch, subject, name):
    def change(out, buffers, run):
        buffers[name][0] = 0  # one row

    plant(monkeypatch, change)
    assert f"first bad buffer: {name}: relative L2" in failure(subject)


def test_other_bits_in_another_order(monkeypatch, subject):
    def change(out, buffers, run):
        if run == 2:
            out[0, 0] = out[0, 0] * 1.01 + 0.01

    plant(monkeypatch, change)
    assert "variant 7: 1 values have other bits" in failure(subject)


def test_other_bits_through_the_operator(monkeypatch, subject):
    def change(out, buffers, run):
        if run == 3:
            out[0, 0] = out[0, 0] * 1.01 + 0.01

    plant(monkeypatch, change)
    assert "the operator: 1 values have other bits" in failure(subject)


@pytest.mark.parametrize(("step", "side"), [(-1, "before"), (129 * 256, "after")])
def test_writes_outside_the_output(monkeypatch, subject, step, side):
    """One element before the first, one behind the last."""

    def change(out, buffers, run):
        if out.storage_offset():  # the operator's own output has no bands
            out.as_strided((1,), (1,), out.storage_offset() + step).zero_()

    plant(monkeypatch, change)
    assert f"2 bytes {side} the tensor were overwritten" in failure(subject)


def test_an_output_without_a_route_must_be_exactly_zero(monkeypatch):
    plain = Subject(cpu_layer(max_tokens=257), CPU, "a layer under test")

    def change(out, buffers, run):
        out[0, 0] = 1e-30

    plant(monkeypatch, change)
    assert "worst row inf" in failure(plain, "masked")


def test_no_pass_without_an_oracle(monkeypatch, subject):
    monkeypatch.setattr(reference, "oracle", lambda *_: torch.full((129, 256), math.nan, dtype=torch.float64))
    assert "oracle gave no finite output" in failure(subject)


def test_a_loaded_artifact_during_the_run_is_found(monkeypatch, subject):
    counts = iter([1, 2, 2])
    monkeypatch.setattr("mokgen.testing.check.compile_count", lambda: next(counts))
    with pytest.raises(CheckFailed, match="1 more artifacts loaded"):
        check_layer(subject, ["balanced"], [1], show=quiet)


def test_a_wrong_router_is_found(monkeypatch):
    routed = Subject(cpu_layer(max_tokens=257, router={"input": "logits", "top_k": 2}), CPU, "a layer under test")
    honest = host.route

    def swap(plan, logits, selection_bias, logit_bias, ids, weights):
        honest(plan, logits, selection_bias, logit_bias, ids, weights)
        ids[4] = ids[4].flip(0)

    monkeypatch.setattr(host, "route", swap)
    assert "route: 2 ids differ, first at token 4, slot 0" in failure(routed, "router")

    def drift(plan, logits, selection_bias, logit_bias, ids, weights):
        honest(plan, logits, selection_bias, logit_bias, ids, weights)
        weights[4, 0] += 2e-6

    monkeypatch.setattr(host, "route", drift)
    assert "route: weights differ by up to 2" in failure(routed, "router")


# --- guards, subjects, twins, the generated file ----------------------------------------------------------------------


def test_guarded_memory_starts_as_nan_with_whole_bands():
    guarded = Guarded((3, 5), torch.bfloat16, CPU)
    assert bool(guarded.tensor.isnan().all()) and guarded.touched() is None
    guarded.tensor.zero_()
    assert guarded.touched() is None


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_reduced_layer_is_the_layer_of_the_reduced_spec(path):
    full = load_spec(path)
    assert reduced_layer(resolve(full)) == resolve(reduced_twin(full))


def test_a_full_size_layer_becomes_its_twin_on_a_cpu_and_says_so():
    subject = open_subject(load_spec(shipped("specs") / "dsv3.yaml"), device="cpu")
    assert subject.resolved.hidden_size == 256
    assert "reduced twin on the CPU executor" in subject.note and "H=7168" in subject.note


def test_a_small_layer_stays_what_it_is():
    subject = open_subject(resolve(spec(max_tokens=128)).to_dict(), device="cpu")
    assert subject.resolved == resolve(spec(max_tokens=128))
    assert "twin" not in subject.note


def test_the_generated_file_lists_every_pattern_and_the_layer():
    layer = resolve(load_spec(shipped("specs") / "gpt_oss_20b.yaml"))
    text = render("test_kernel.py.jinja", {"STEM": "gpt_oss_20b", "ARCH": "sm_90a", "LAYER": layer})
    names: dict[str, object] = {}
    exec(compile(text, "test_kernel.py", "exec"), {"__file__": "test_kernel.py", "__name__": "generated"}, names)
    assert names["PATTERNS"] == (*PATTERNS, "router")
    assert names["TOKENS"] == (0, 1, 7, 129, layer.max_tokens)
    assert type(layer).from_dict(names["LAYER"]) == layer


def test_a_benchmark_needs_a_gpu():
    from mokgen.bench import bench

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ToolchainError, match="needs a GPU"):
        bench(spec())
