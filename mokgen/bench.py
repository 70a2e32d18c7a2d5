"""Times of a layer beside what it is compared with, in one process: queued and isolated, contenders taking turns.

Contenders: mokgen's kernels; the dense bound, which spends the same FLOPs in two plain GEMMs; a pipeline of
torch._grouped_mm as a torch user would write it. All start from given ids and weights; a layer with a router of its
own is timed from logits as well. Every output is judged against the fp64 oracle before a time is shown.

Letters: T tokens, E experts, K top-k, H hidden, I intermediate, n routed rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from mokgen.errors import ArgumentError, MokgenError, ToolchainError
from mokgen.facts.activations import ACTIVATIONS
from mokgen.facts.tolerance import BUDGETS
from mokgen.lower.layer import ResolvedLayer
from mokgen.reference import oracle as reference
from mokgen.reference.compare import errors, judge
from mokgen.reference.inputs import Inputs, Parameters, make_inputs, make_logits
from mokgen.testing.guarded import call
from mokgen.testing.subject import Subject, open_subject

Tensor = torch.Tensor

MOKGEN, ROUTED, DENSE, GROUPED = "mokgen", "mokgen from logits", "dense bound", "torch._grouped_mm"
SLEEP_CYCLES = 400_000_000  # about 0.2 s at 1.98 GHz: the host queues every call before the first one starts
PIPELINE_ERROR = 2e-2  # the torch pipeline rounds more often than the baseline; more than this is a wrong result


@dataclass(frozen=True)
class Row:
    """One contender."""

    name: str
    queued_ms: float
    isolated_ms: float
    tflops: float  # queued
    of_dense: float  # share of the dense bound's speed, queued
    relative_l2: float | None  # None: computes something else


@dataclass(frozen=True)
class BenchResult:
    """All rows of one run on one device."""

    stem: str
    device: str
    tokens: int
    flops: int
    pattern: str
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of text, for a Rich table."""
        own = self.row(MOKGEN)
        header: tuple[str, ...] = (
            "",
            "queued ms",
            "isolated ms",
            "TFLOP/s",
            "of dense",
            "mokgen ahead",
            "relative L2",
        )
        return header, [_cells(row, own) for row in self.rows]


def _cells(row: Row, own: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.queued_ms:.3f}",
        f"{row.isolated_ms:.3f}",
        f"{row.tflops:.0f}",
        f"{row.of_dense:.3f}",
        f"{row.queued_ms / own.queued_ms:.2f}x",
        "-" if row.relative_l2 is None else f"{row.relative_l2:.2e}",
    )


def bench(
    source: Any,
    tokens: int | None = None,
    *,
    pattern: str = "balanced",
    rounds: int = 3,
    calls: int = 20,
    seed: int = 0,
    show: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Time a layer (see testing.open_subject for `source`) on `tokens` tokens, default its maximum. Needs a GPU.

    pattern: a routing pattern of reference.inputs in which every slot has a route.
    """
    if not torch.cuda.is_available():
        raise ToolchainError("a benchmark needs a GPU", where="bench", hint="mokgen test runs on the CPU")
    subject = open_subject(source)
    layer = subject.resolved
    count = layer.max_tokens if tokens is None else min(tokens, layer.max_tokens)
    show(subject.note)
    with torch.no_grad():
        contenders, accuracy = _contenders(subject, count, pattern, seed)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for turn in range(rounds):
            for name, work in contenders.items():
                times[name].append((queued_ms(work, calls), isolated_ms(work, calls)))
                show(f"round {turn + 1}: {name} {times[name][-1][0]:.3f} ms queued, {times[name][-1][1]:.3f} isolated")
        subject.layer.check()
    flops = flops_of(layer, count)
    return BenchResult(
        subject.layer.program.stem,
        torch.cuda.get_device_name(subject.device),
        count,
        flops,
        pattern,
        _rows(times, accuracy, flops),
    )


def flops_of(layer: ResolvedLayer, tokens: int) -> int:
    """Useful FLOPs of one forward: three projections per route and per token of the shared experts; no padding."""
    width = layer.top_k * layer.intermediate_size + layer.shared.intermediate_size
    return 6 * tokens * layer.hidden_size * width


def _rows(times: dict[str, list[tuple[float, float]]], accuracy: dict[str, float], flops: int) -> tuple[Row, ...]:
    queued = {name: median(pair[0] for pair in pairs) for name, pairs in times.items()}
    return tuple(
        Row(
            name,
            queued[name],
            median(pair[1] for pair in pairs),
            flops / queued[name] / 1e9,
            queued[DENSE] / queued[name],
            accuracy.get(name),
        )
        for name, pairs in times.items()
    )


def _contenders(
    subject: Subject, tokens: int, pattern: str, seed: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Callables by name, and the relative L2 of those that compute the layer, each judged."""
    layer, parameters = subject.resolved, subject.parameters
    inputs = make_inputs(layer, tokens, pattern, subject.device, seed)
    if bool((inputs.ids < 0).any()):
        raise ArgumentError(
            f"{pattern} has slots without a route, which torch._grouped_mm cannot skip", where="pattern"
        )
    work: dict[str, Callable[[], Any]] = {
        MOKGEN: lambda: call(subject, inputs),
        DENSE: dense_bound(layer, tokens, subject.device),
        GROUPED: lambda: grouped_mm_layer(layer, inputs, parameters),
    }
    truth = reference.oracle(layer, inputs, parameters)
    base = reference.baseline(layer, inputs, parameters).out
    verdict = judge(call(subject, inputs), base, truth, BUDGETS[layer.precision])
    if not verdict.ok:
        raise MokgenError(f"mokgen's output is wrong, so its time means nothing: {verdict}", where="bench")
    pipeline = errors(grouped_mm_layer(layer, inputs, parameters), truth).relative_l2
    if pipeline > PIPELINE_ERROR:
        raise MokgenError(f"the torch pipeline's output is wrong: relative L2 {pipeline:.2e}", where="bench")
    if layer.router.input == "logits":
        logits = make_logits(layer, tokens, subject.device, seed)
        routed = replace(inputs, logits=logits)
        work[ROUTED] = lambda: call(subject, routed)
    return work, {MOKGEN: verdict.kernel.relative_l2, GROUPED: pipeline}


# --- contenders -------------------------------------------------------------------------------------------------------


def dense_bound(layer: ResolvedLayer, tokens: int, device: torch.device) -> Callable[[], None]:
    """The layer's FLOPs as two plain GEMMs without gather, activation or sum (two more for shared experts)."""

    def operands(rows: int, inter: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shapes = ((rows, layer.hidden_size), (2 * inter, layer.hidden_size), (rows, inter), (layer.hidden_size, inter))
        a, b, c, d = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        return a, b, c, d

    parts = [operands(tokens * layer.top_k, layer.intermediate_size)]
    if layer.shared.num:
        parts.append(operands(tokens, layer.shared.intermediate_size))

    def work() -> None:
        for a, b, c, d in parts:
            F.linear(a, b)
            F.linear(c, d)

    return work


def grouped_mm_layer(layer: ResolvedLayer, inputs: Inputs, p: Parameters) -> Tensor:
    """Sort by expert, two grouped GEMMs, weighted index_add: what torch offers without mokgen. (T, H) bf16."""
    flat = inputs.ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts = flat[order].long()
    # Not bincount, which waits for the device to learn how large its result is.
    ends = torch.searchsorted(experts, torch.arange(layer.num_experts, device=flat.device), right=True)
    offsets = ends.to(torch.int32)
    token = order // layer.top_k
    gate_up = torch._grouped_mm(inputs.x[token], p.w_gate_up.transpose(1, 2), offs=offsets)
    if p.b_gate_up is not None:
        gate_up = gate_up + p.b_gate_up[experts]
    hidden = _activate(layer, gate_up, layer.gate_up_layout)
    y = torch._grouped_mm(hidden, p.w_down.transpose(1, 2), offs=offsets)
    if p.b_down is not None:
        y = y + p.b_down[experts]
    y = y * inputs.weights.reshape(-1)[order].unsqueeze(1).to(y.dtype)
    out = torch.zeros_like(inputs.x) if not layer.shared.num else _shared(layer, inputs, p)
    return out.index_add_(0, token, y)


def _shared(layer: ResolvedLayer, inputs: Inputs, p: Parameters) -> Tensor:
    assert p.w_shared_gate_up is not None and p.w_shared_down is not None
    out = F.linear(_activate(layer, F.linear(inputs.x, p.w_shared_gate_up), "concatenated"), p.w_shared_down)
    if inputs.shared_gate_logits is not None:
        out = out * inputs.shared_gate_logits.sigmoid().unsqueeze(1).to(out.dtype)
    return out


def _activate(layer: ResolvedLayer, gate_up: Tensor, layout: str) -> Tensor:
    gate, up = (gate_up[:, 0::2], gate_up[:, 1::2]) if layout == "interleaved" else gate_up.chunk(2, dim=1)
    if layer.activation == "swiglu" and layer.alpha == 1.0 and layer.clamp == float("inf"):
        return F.silu(gate) * up
    return ACTIVATIONS[layer.activation].reference(gate, up, layer.alpha, layer.clamp)


# --- timing -----------------------------------------------------------------------------------------------------------


def queued_ms(work: Callable[[], Any], calls: int = 20) -> float:
    """Milliseconds per call of `calls` calls that all wait behind a sleeping kernel: what a busy stream sees."""
    work()
    torch.cuda.synchronize()
    begin, end = _event(), _event()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / calls


def isolated_ms(work: Callable[[], Any], calls: int = 20) -> float:
    """Median milliseconds of a call that finds the device idle and is waited for: the host's gaps count."""
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(calls):
        begin, end = _event(), _event()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_us(work: Callable[[], Any], calls: int = 100) -> float:
    """Microseconds of host time per call while a sleeping kernel keeps the device from running any.

    `calls` stays below what a stream queues (about a thousand launches), where the host would have to wait.
    """
    work()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    for _ in range(calls):
        work()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6
