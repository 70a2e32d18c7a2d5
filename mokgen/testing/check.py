"""check_layer: every promise of a layer that one process can test, case by case.

A case is a routing pattern and a number of tokens. For each: guard bands whole, tables exact, rows and output within
the error budget, output exactly zero without a route, equal bits on repetition, with other numbers of CTAs and through
the operator. There is no pass without the fp64 oracle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mokgen.errors import ArgumentError
from mokgen.facts.tolerance import BUDGETS, ROUTER_WEIGHT_ABS
from mokgen.reference import oracle as reference
from mokgen.reference.compare import BufferCheck, Verdict, first_bad_buffer, judge
from mokgen.reference.inputs import PATTERNS, Inputs, Parameters, make_inputs, make_routed_inputs, present
from mokgen.runtime.layer import compile_count
from mokgen.runtime.op import PARAMETERS
from mokgen.testing.guarded import Run, call, run
from mokgen.testing.subject import Subject, open_subject

Tensor = torch.Tensor

TOKENS = (0, 1, 7, 129)  # besides the maximum: nothing, one row, a ragged tile, one row more than a tile
ROUTER = "router"  # pattern name: ids come from the layer's own router
GPU_VARIANTS = (None, 3, 61)  # CTAs: one per SM again, far fewer, and a number that divides nothing
CPU_VARIANTS = (7,)  # seeds of interleavings; ticket order runs again through the operator


EXECUTOR_TOKENS, EXECUTOR_BYTES = 257, 64 << 20  # up to here a GPU run is also compared with the CPU executor
TABLES = ("block_start", "block_expert", "block_rows", "row_token", "slot_row")


class CheckFailed(AssertionError):
    """A promise that did not hold; the message names the case."""


@dataclass(frozen=True)
class CaseReport:
    """One case that held."""

    pattern: str
    tokens: int
    verdict: Verdict | None  # None: no tokens
    seconds: float

    def __str__(self) -> str:
        what = "empty output" if self.verdict is None else str(self.verdict)
        return f"{self.pattern:>18} T={self.tokens:<6} {what}"


@dataclass
class Report:
    """What ran, and the cases that held."""

    note: str
    cases: list[CaseReport] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self.note, *map(str, self.cases)])


def check_layer(
    source: Any,
    patterns: Sequence[str] | None = None,
    tokens: Iterable[int] | None = None,
    seed: int = 0,
    show: Callable[[str], None] = print,
) -> Report:
    """Check a layer (see `open_subject` for what `source` may be); raises CheckFailed at the first promise broken.

    patterns: names of reference.inputs.PATTERNS, or "router" for a layer that takes logits; default all that apply.
    tokens: numbers above the layer's maximum stand for the maximum; default 0, 1, 7, 129 and the maximum.
    """
    subject = source if isinstance(source, Subject) else open_subject(source)
    layer = subject.resolved
    if patterns is None:
        patterns = [*PATTERNS, *([ROUTER] if layer.router.input == "logits" else [])]
    asked = (*TOKENS, layer.max_tokens) if tokens is None else tuple(tokens)
    _require_cases(layer.router.input, patterns, asked)
    counts = sorted({min(count, layer.max_tokens) for count in asked})
    report = Report(subject.note)
    show(subject.note)
    compiled = compile_count()
    with _one_thread():
        for pattern in patterns:
            for count in counts:
                report.cases.append(_check_case(subject, pattern, count, seed))
                show(str(report.cases[-1]))
    if compile_count() != compiled:
        raise CheckFailed(f"{compile_count() - compiled} more artifacts loaded while numbers of tokens varied")
    return report


def _require_cases(routing: str, patterns: Sequence[str], tokens: Sequence[int]) -> None:
    """At least one case, each of a known pattern and a possible number of tokens: checking nothing is no pass."""
    known = [*PATTERNS, *([ROUTER] if routing == "logits" else [])]
    for pattern in patterns:
        if pattern not in known:
            raise ArgumentError(f"no pattern is called {pattern!r}", "patterns", f"of {', '.join(known)}")
    if not patterns or not tokens or min(tokens) < 0:
        what = f"{len(patterns)} patterns with tokens {list(tokens)}"
        raise ArgumentError(what, "tokens", "one case or more, T >= 0")


@contextmanager
def _one_thread() -> Iterator[None]:
    """The executor's tasks are too small to share: on a busy machine threads wait longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_case(subject: Subject, pattern: str, tokens: int, seed: int) -> CaseReport:
    start = time.perf_counter()
    try:
        verdict = _check(subject, _inputs(subject, pattern, tokens, seed))
    except CheckFailed as error:
        raise CheckFailed(f"{subject.note}\npattern {pattern}, T={tokens}, seed {seed}: {error}") from error
    return CaseReport(pattern, tokens, verdict, time.perf_counter() - start)


def _inputs(subject: Subject, pattern: str, tokens: int, seed: int) -> Inputs:
    if pattern == ROUTER:
        return make_routed_inputs(subject.resolved, subject.parameters, tokens, subject.device, seed)
    return make_inputs(subject.resolved, tokens, pattern, subject.device, seed)


def _check(subject: Subject, inputs: Inputs) -> Verdict | None:
    layer = subject.resolved
    truth = reference.oracle(layer, inputs, subject.parameters)
    if truth.shape != inputs.x.shape or not bool(truth.isfinite().all()):
        raise CheckFailed("the oracle gave no finite output, so nothing can be judged")
    if inputs.logits is not None:
        _check_router(subject, inputs)
        inputs = _with_own_routes(subject, inputs)
    first = run(subject, inputs)
    if first.fault:
        raise CheckFailed(first.fault)
    _check_repetition(subject, inputs, first)
    if inputs.tokens == 0:
        return None
    base = reference.baseline(layer, inputs, subject.parameters)
    verdict = judge(first.out, base.out, truth, BUDGETS[layer.precision])
    bad = first_bad_buffer(_buffers(subject, inputs, base, first))
    if not verdict.ok or bad:
        raise CheckFailed(f"{verdict}; first bad buffer: {bad or 'none, so the reduction is wrong'}")
    return verdict


def _check_router(subject: Subject, inputs: Inputs) -> None:
    """ids equal the oracle's, weights within 1e-6."""
    assert inputs.logits is not None
    p = subject.parameters
    ids, weights = subject.layer.route(inputs.logits, p.selection_bias, p.logit_bias)
    wrong = (ids != inputs.ids).nonzero()
    if len(wrong):
        token, slot = wrong[0].tolist()
        raise CheckFailed(
            f"route: {len(wrong)} ids differ, first at token {token}, slot {slot}: {int(ids[token, slot])}, "
            f"expected {int(inputs.ids[token, slot])}"
        )
    if inputs.tokens:
        error = float((weights.double() - inputs.weights.double()).abs().nan_to_num(nan=torch.inf).max())
        if error > ROUTER_WEIGHT_ABS:
            raise CheckFailed(f"route: weights differ by up to {error:.2e}, allowed {ROUTER_WEIGHT_ABS:g}")


def _with_own_routes(subject: Subject, inputs: Inputs) -> Inputs:
    """The inputs with the layer's own ids and weights, so that all runs share every bit of them."""
    p = subject.parameters
    assert inputs.logits is not None
    ids, weights = subject.layer.route(inputs.logits, p.selection_bias, p.logit_bias)
    return Inputs(inputs.x, ids, weights, inputs.logits, inputs.shared_gate_logits)


def _check_repetition(subject: Subject, inputs: Inputs, first: Run) -> None:
    """Equal bits again, with other CTA counts (or interleavings), and through the operator."""
    variants = GPU_VARIANTS if subject.on_gpu else CPU_VARIANTS
    for variant in variants:
        again = run(subject, inputs, variant)
        if again.fault:
            raise CheckFailed(f"variant {variant}: {again.fault}")
        _same_bits(first.out, again.out, "a second run" if variant is None else f"variant {variant}")
    _same_bits(first.out, call(subject, inputs), "the operator")
    subject.layer.check()


def _same_bits(first: Tensor, again: Tensor, what: str) -> None:
    if first.shape != again.shape:
        raise CheckFailed(f"{what}: shape {tuple(again.shape)}, expected {tuple(first.shape)}")
    wrong = (first.view(torch.int16) != again.view(torch.int16)).nonzero()
    if len(wrong):
        raise CheckFailed(f"{what}: {len(wrong)} values have other bits, first at {tuple(wrong[0].tolist())}")


def _buffers(subject: Subject, inputs: Inputs, base: reference.Baseline, found: Run) -> Iterator[BufferCheck]:
    """Intermediate buffers as the stages write them, against the oracle's tables and the baseline's rows."""
    layer, regions = subject.resolved, found.regions
    table = reference.pool_table(layer, inputs.ids, subject.layer.program.layout.tile_m)
    for name in TABLES:
        want = getattr(table, name)
        yield BufferCheck(name, regions[name].flatten()[: want.numel()], want)
    if base.shared is not None:
        assert base.shared.hidden is not None
        yield BufferCheck("shared_hidden", regions["shared_hidden"][: inputs.tokens], base.shared.hidden)
        yield BufferCheck("shared_y", regions["shared_y"][: inputs.tokens], base.shared.y)
    live = table.slot_row.to(subject.device) >= 0
    rows = table.slot_row.to(subject.device)[live].long()
    assert base.routed.hidden is not None
    yield BufferCheck("hidden", regions["hidden"][rows], base.routed.hidden[live])
    yield BufferCheck("y", regions["y"][rows], base.routed.y[live])
    if subject.on_gpu and inputs.tokens <= EXECUTOR_TOKENS and _bytes(subject.parameters) <= EXECUTOR_BYTES:
        yield from _against_executor(subject, inputs, regions, rows)


def _against_executor(
    subject: Subject, inputs: Inputs, regions: dict[str, Tensor], rows: Tensor
) -> Iterator[BufferCheck]:
    """The same call by the same plan on the CPU: all that the kernels and the plan's tasks must agree on."""
    cpu = {name: tensor.cpu() for name, tensor in (present(inputs) | present(subject.parameters)).items()}
    parameters = tuple(cpu.get(name) for name in PARAMETERS)
    out = torch.empty_like(cpu["x"])
    gate = cpu.get("shared_gate_logits")
    wanted = subject.layer.execute_into(cpu["x"], cpu["ids"], cpu["weights"], parameters, gate, out)
    for name in TABLES:
        yield BufferCheck(f"{name} of the executor", regions[name].flatten()[: wanted[name].numel()], wanted[name])
    for name in ("hidden", "y"):
        yield BufferCheck(f"{name} of the executor", regions[name][rows], wanted[name][rows.cpu()])
    for name in ("shared_hidden", "shared_y"):
        if name in regions:
            tokens = slice(0, inputs.tokens)
            yield BufferCheck(f"{name} of the executor", regions[name][tokens], wanted[name][tokens])


def _bytes(parameters: Parameters) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in present(parameters).values())
