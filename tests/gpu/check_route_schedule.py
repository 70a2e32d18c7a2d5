"""Check prebuilt route and schedule kernels on a GPU against plain torch, exactly, and time them.

    python tests/gpu/check_route_schedule.py DIR [--quick]

DIR holds what build_route_schedule.py wrote (one folder per configuration). Needs torch, tvm_ffi and the CuTe runtime
library (nvidia-cutlass-dsl-libs), not the compiler. Exit code 1 when a check fails.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import tvm_ffi
from route_schedule_reference import TILE_M, route, schedule_tables

POISON = 0x5A5A5A5A
DEVICE = "cuda"


def load_runtime() -> None:
    """Preload the CuTe runtime library, which the kernels' undefined symbols come from."""
    name = "libcute_dsl_runtime.so"
    candidates = [name]
    for entry in sys.path:
        for flavour in ("cu13", "cu12"):
            candidates += map(str, Path(entry).glob(f"nvidia_cutlass_dsl/{flavour}/lib/{name}"))
            candidates += map(str, Path(entry).glob(f"nvidia_cutlass_dsl/lib/{name}"))
    for path in candidates:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise SystemExit(f"{name} not found in: {sys.path}")


class Kernels:
    """The two functions of one configuration and the buffers they need."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        module = tvm_ffi.load_module(str(folder / "kernels.so"))
        self.schedule_function = getattr(module, f"schedule_{self.config['arch']}")
        self.route_function = getattr(module, f"route_{self.config['arch']}")
        self.experts, self.max_tokens = self.config["num_experts"], self.config["max_tokens"]
        self.router = self.config["router"]
        self.top_k = self.router["top_k"]
        self.workspace = torch.empty(self.config["workspace_bytes"], dtype=torch.uint8, device=DEVICE)
        self.errors = torch.zeros(16, dtype=torch.int32).pin_memory()

    def schedule(self, ids_TK: torch.Tensor) -> None:
        words = 2 if ids_TK.dtype == torch.int64 else 1
        view = ids_TK.view(torch.int32) if words == 2 else ids_TK
        self.schedule_function(view, words, self.workspace, self.errors.data_ptr())

    def table(self, name: str) -> torch.Tensor:
        begin, words = self.config["offsets"][name], self.config["words"][name]
        return self.workspace[begin : begin + 4 * words].view(torch.int32)

    def route(self, logits: torch.Tensor, *biases: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((logits.shape[0], self.top_k), -7, dtype=torch.int32, device=DEVICE)
        weights = torch.full((logits.shape[0], self.top_k), -7.0, device=DEVICE)
        self.route_function(logits, *biases, ids, weights)
        return ids, weights


def id_patterns(kernels: Kernels, tokens: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Named ids (tokens, K) for one schedule call."""
    shape, experts = (tokens, kernels.top_k), kernels.experts

    def uniform(low: int, high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE).to(dtype)

    distinct = torch.rand(tokens, experts, generator=generator, device=DEVICE).argsort(1)[:, : kernels.top_k]
    yield "distinct", distinct.to(torch.int32)
    yield "uniform", uniform(0, experts)
    yield "int64", uniform(-1, experts, torch.int64)
    yield "few experts", uniform(0, max(1, experts // 4)) * 3 % experts
    yield "one expert", torch.full(shape, experts - 1, dtype=torch.int32, device=DEVICE)
    yield "no route", torch.full(shape, -1, dtype=torch.int32, device=DEVICE)
    ids = uniform(0, experts)
    yield "some -1", torch.where(uniform(0, 3) == 0, -1, ids).to(torch.int32)
    skewed = (torch.rand(shape, generator=generator, device=DEVICE) ** 6 * experts).to(torch.int32)
    yield "skewed", skewed.clamp(max=experts - 1)
    ids = uniform(0, experts)
    ids[tokens // 2, 0], ids[tokens - 1, -1] = experts, -2
    yield "invalid", ids
    ids = uniform(0, experts, torch.int64)
    ids[tokens - 1, 0], ids[tokens // 3, -1] = 2**32 + 1, -(2**33) - 1
    ids[tokens // 5, 0] = 2**31
    yield "int64 wrap", ids


def check_schedule_case(kernels: Kernels, ids_TK: torch.Tensor) -> list[str]:
    """Faults of one call: every table exact, nothing else written, the same bits in a second run."""
    faults = []
    kernels.errors.zero_()
    kernels.workspace.view(torch.int32).fill_(POISON)
    kernels.schedule(ids_TK)
    torch.cuda.synchronize()
    first_run = kernels.workspace.clone()
    expected = schedule_tables(ids_TK, kernels.experts)
    first_invalid = int(expected.pop("first_invalid"))
    for name, table in expected.items():
        got = kernels.table(name)
        if not torch.equal(got[: len(table)], table):
            wrong = (got[: len(table)] != table).nonzero().flatten()
            at = int(wrong[0])
            faults.append(f"{name}: {len(wrong)} of {len(table)} wrong, [{at}] = {int(got[at])}, not {int(table[at])}")
        if not bool((got[len(table) :] == POISON).all()):
            faults.append(f"{name}: written past its {len(table)} entries")
    if not bool((kernels.table("counters") == 0).all()):
        faults.append("counters not all zero")
    faults += check_record(kernels, ids_TK, first_invalid)
    for run in range(3):
        kernels.workspace.view(torch.int32).fill_(POISON)
        kernels.schedule(ids_TK)
        if not torch.equal(first_run, kernels.workspace):
            faults.append(f"run {run + 2} differs from run 1")
    return faults


def check_record(kernels: Kernels, ids_TK: torch.Tensor, first_invalid: int) -> list[str]:
    """Faults of the pinned record of an invalid id."""
    expected = [0] * 16
    if first_invalid >= 0:
        value = int(ids_TK.flatten()[first_invalid])
        low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
        words = [word - 2**32 if word >= 2**31 else word for word in (low, high)]
        expected[:5] = [1, first_invalid // kernels.top_k, first_invalid % kernels.top_k, *words]
    got = kernels.errors.tolist()
    return [] if got == expected else [f"error record {got[:5]}, not {expected[:5]}"]


def check_schedule(kernels: Kernels, quick: bool) -> tuple[int, list[str]]:
    """Number of cases and the faults found."""
    generator = torch.Generator(device=DEVICE).manual_seed(11)
    counts = [1, 2, 3, 7, 8, 31, 32, 33, 64, 65, 127, 128, 129, 257, 672, 1000, 2049, 4095, kernels.max_tokens]
    counts = [count for count in counts if count <= kernels.max_tokens]
    cases, faults = 0, []
    for tokens in [1, 129, kernels.max_tokens] if quick else counts:
        for name, ids_TK in id_patterns(kernels, tokens, generator):
            cases += 1
            faults += [f"schedule T={tokens} {name}: {fault}" for fault in check_schedule_case(kernels, ids_TK)]
    return cases, faults


def logit_patterns(kernels: Kernels, tokens: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Named logits (tokens, E); names that start with "nan" may give NaN weights."""
    dtype = torch.bfloat16 if kernels.router["logits_dtype"] == "bf16" else torch.float32
    shape = (tokens, kernels.experts)
    normal = torch.randn(shape, generator=generator, device=DEVICE)
    yield "normal", normal.to(dtype)
    yield "wide", (normal * 12).to(dtype)
    yield "ties", (normal * 2).round().to(dtype)
    yield "equal", torch.zeros(shape, device=DEVICE, dtype=dtype)
    yield "signed zero", torch.where(normal > 0, 0.0, -0.0).to(dtype)
    some = torch.rand(shape, generator=generator, device=DEVICE)
    yield "minus inf", torch.where(some < 0.3, float("-inf"), normal).to(dtype)
    yield "nan some", torch.where(some < 0.2, float("nan"), normal).to(dtype)
    yield "nan inf", torch.where(some < 0.2, float("inf"), normal).to(dtype)
    yield "nan all", torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def check_route_case(
    kernels: Kernels, logits: torch.Tensor, biases: dict[str, torch.Tensor]
) -> tuple[list[str], float]:
    """Faults of one call and the largest difference of a weight."""
    ids, weights = kernels.route(logits, *biases.values())
    again_ids, again_weights = kernels.route(logits, *biases.values())
    selection, bias = biases.get("selection_bias"), biases.get("logit_bias")
    want_ids, want_weights = route(logits, kernels.router, selection, bias)
    faults = []
    if not torch.equal(ids, want_ids):
        rows = (ids != want_ids).any(1).nonzero().flatten()
        got, want = ids[rows[0]].tolist(), want_ids[rows[0]].tolist()
        faults.append(f"ids of {len(rows)} tokens differ; token {int(rows[0])}: {got}, not {want}")
    ordered = ids.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any() | (ids < 0).any() | (ids >= kernels.experts).any()):
        faults.append("ids not distinct or out of range")
    if not torch.equal(weights.isnan(), want_weights.isnan()):
        faults.append("NaN weights at other places")
    difference = float((weights - want_weights).nan_to_num(0.0).abs().max()) if ids.equal(want_ids) else 0.0
    if difference > 1e-6 * max(1.0, kernels.router["scale"]):
        faults.append(f"weights differ by {difference:.2e}")
    if not torch.equal(again_ids, ids) or not torch.equal(again_weights.view(torch.int32), weights.view(torch.int32)):
        faults.append("second run differs")
    return faults, difference


def biases_of(kernels: Kernels, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The bias arguments of the layer in call order."""
    names = [name for name in ("selection_bias", "logit_bias") if kernels.router[name]]
    return {name: torch.randn(kernels.experts, generator=generator, device=DEVICE) * 0.1 for name in names}


def check_route(kernels: Kernels, quick: bool) -> tuple[int, list[str], float]:
    """Number of cases, faults, largest difference of a weight."""
    generator = torch.Generator(device=DEVICE).manual_seed(12)
    biases = biases_of(kernels, generator)
    cases, faults, worst = 0, [], 0.0
    for tokens in [1, kernels.max_tokens] if quick else [1, 2, 7, 8, 9, 257, 600, kernels.max_tokens]:
        for name, logits in logit_patterns(kernels, min(tokens, kernels.max_tokens), generator):
            found, difference = check_route_case(kernels, logits, biases)
            cases, worst = cases + 1, max(worst, difference)
            faults += [f"route T={tokens} {name}: {fault}" for fault in found]
    return cases, faults, worst


def microseconds(call: Callable[[], object], repeats: int = 50) -> float:
    """Time of one call inside a CUDA graph of `repeats` calls, median of nine replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000.0 * begin.elapsed_time(end) / repeats)
    return sorted(times)[len(times) // 2]


def time_kernels(kernels: Kernels) -> dict[str, float]:
    """Microseconds per call at the largest token count, and of the schedule on one token."""
    generator = torch.Generator(device=DEVICE).manual_seed(13)
    tokens, experts = kernels.max_tokens, kernels.experts
    scores = torch.rand(tokens, experts, generator=generator, device=DEVICE)
    ids = scores.topk(kernels.top_k, dim=1).indices.to(torch.int32)
    one = ids[:1].contiguous()
    same = torch.zeros_like(ids)
    dtype = torch.bfloat16 if kernels.router["logits_dtype"] == "bf16" else torch.float32
    logits = (scores * 4).to(dtype)
    biases = list(biases_of(kernels, generator).values())
    out_ids, out_weights = torch.empty_like(ids), torch.empty(ids.shape, device=DEVICE)
    return {
        "schedule": microseconds(lambda: kernels.schedule(ids)),
        "one expert": microseconds(lambda: kernels.schedule(same)),
        "T=1": microseconds(lambda: kernels.schedule(one)),
        "route": microseconds(lambda: kernels.route_function(logits, *biases, out_ids, out_weights)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true", help="few token counts")
    args = parser.parse_args()
    load_runtime()
    folders = sorted(path.parent for path in args.directory.glob("*/config.json"))
    if not folders:
        raise SystemExit(f"no configuration in {args.directory}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds per call in a CUDA graph")
    print(f"{'configuration':20s} {'launch':>14s} {'cases':>6s} {'faults':>6s} {'|dw|':>8s}   times")
    failed = False
    for folder in folders:
        kernels = Kernels(folder)
        assert kernels.config["words"]["row_token"] % TILE_M == 0
        schedule_cases, faults = check_schedule(kernels, args.quick)
        route_cases, route_faults, worst = check_route(kernels, args.quick)
        faults += route_faults
        launch = kernels.config["launch"]
        shape = f"{launch['clusters']}x{launch['cluster_ctas']}x{launch['num_warps']} r{launch['routes_per_lane']}"
        times = "  ".join(f"{name} {value:.1f}" for name, value in time_kernels(kernels).items())
        cases = schedule_cases + route_cases
        print(f"{folder.name:20s} {shape:>14s} {cases:6d} {len(faults):6d} {worst:8.1e}   {times}", flush=True)
        for fault in faults[:12]:
            print(f"    {fault}")
        failed = failed or bool(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
