"""A loaded MoE layer: checks a call's arguments, then runs the kernels (CUDA) or the plan's executor (CPU).

Owns the order of one call and nothing of its arithmetic. There is no host synchronisation on the way (unless the layer
has `checks: checked`) and no state between calls but reusable memory and the error words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mokgen.cache.manifest import MANIFEST_NAME, ManifestError, read_manifest
from mokgen.errors import ArgumentError, ArtifactMismatchError
from mokgen.lower.layer import ResolvedLayer
from mokgen.runtime import host, workspace
from mokgen.runtime.arguments import check, check_optional, check_small, check_tokens, expected_arguments
from mokgen.runtime.errors import ID_FLAG, WAIT_FLAG, ErrorWords, Names, id_error, wait_error
from mokgen.runtime.launch import Kernel, Launcher, num_sms
from mokgen.runtime.module import arch_of, load_kernels
from mokgen.runtime.op import PARAMETERS, moe_forward, moe_route, register
from mokgen.runtime.workspace import Layout, RegionView

if TYPE_CHECKING:
    from mokgen.execute import LayerPlan

Tensor = torch.Tensor

PLAN_NAME = "plan.json"
WAIT_LIMIT_NS = 10_000_000_000  # above any wait of a healthy run, one CTA for a full-size layer included
_loaded_artifacts: set[Path] = set()


@dataclass(frozen=True)
class Program:
    """What a layer runs: one artifact, or a plan alone where there is no GPU."""

    layer: ResolvedLayer
    stem: str
    layer_key: str
    arch: str
    layout: Layout
    functions: Mapping[str, Kernel]  # empty: CPU only
    arguments: Mapping[str, tuple[str, ...]]
    read_plan: Callable[[], LayerPlan]  # for the CPU executor
    read_names: Callable[[], Names]  # for post-mortems
    directory: Path | None


class Layer(torch.nn.Module):
    """One MoE layer without parameters of its own; weights are arguments of every call.

    ctas: CTAs of the forward kernel, None for one per SM. No result depends on it.
    wait_limit_ns: longest wait inside the forward kernel before the call is given up with DeviceWaitError.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layer = program.layer
        self.top_k = program.layer.top_k
        self.ctas: int | None = None
        self.wait_limit_ns = WAIT_LIMIT_NS
        self.launcher = Launcher(program.functions, program.arguments) if program.functions else None
        self.error_words = ErrorWords()
        self._expected = expected_arguments(program.layer)
        self._checked = program.layer.checks == "checked"
        self._plan: LayerPlan | None = None
        self.name = register(self, f"{program.stem}-{program.layer_key[:16]}")

    def forward(
        self,
        x: Tensor,
        logits_or_ids: Tensor,
        weights: Tensor | None = None,
        w_gate_up: Tensor | None = None,
        w_down: Tensor | None = None,
        b_gate_up: Tensor | None = None,
        b_down: Tensor | None = None,
        w_shared_gate_up: Tensor | None = None,
        w_shared_down: Tensor | None = None,
        shared_gate_logits: Tensor | None = None,
        selection_bias: Tensor | None = None,
        logit_bias: Tensor | None = None,
    ) -> Tensor:
        """x (T, H) bf16 to (T, H) bf16.

        A layer with `router.input: ids` takes ids (T, K) int32 or int64 and weights (T, K). One with `logits` takes
        logits (T, E) and routes by itself; given ids and weights (T, K) fp32 it skips its router.
        """
        if w_gate_up is None or w_down is None:
            raise ArgumentError("missing", where="w_gate_up" if w_gate_up is None else "w_down")
        parameters = (w_gate_up, w_down, b_gate_up, b_down, w_shared_gate_up, w_shared_down)
        rest = (shared_gate_logits, selection_bias, logit_bias)
        given = (self.name, x, logits_or_ids, weights, *parameters, *rest)
        if torch.compiler.is_compiling() or _needs_gradient(given):
            return moe_forward(*given)  # type: ignore[no-any-return]
        # No gradient will be asked for: 7 us of Python in the autograd layer of the dispatcher are saved.
        with _below_autograd():
            return moe_forward(*given)  # type: ignore[no-any-return]

    def route(
        self, logits: Tensor, selection_bias: Tensor | None = None, logit_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's router alone: logits (T, E) to ids (T, K) int32 and weights (T, K) fp32."""
        ids, weights = moe_route(self.name, logits, selection_bias, logit_bias)
        return ids, weights

    def check(self) -> None:
        """Wait for the device and raise what an earlier call recorded: RoutingError or DeviceWaitError."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._raise_recorded("an earlier call")

    def regions(self, memory: Tensor) -> dict[str, Tensor]:
        """Typed views of a workspace uint8 (workspace_bytes,), by region name."""
        return self.program.layout.view(memory)

    @property
    def workspace_bytes(self) -> int:
        return self.program.layout.num_bytes

    @property
    def plan(self) -> LayerPlan:
        """The plan the kernels were made from; what the CPU runs."""
        if self._plan is None:
            self._plan = self.program.read_plan()
        return self._plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """A layer of its own name and error words over the same kernels."""
        twin = Layer(self.program)
        twin.ctas, twin.wait_limit_ns = self.ctas, self.wait_limit_ns
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        if self.program.directory is None:
            raise TypeError("a layer without an artifact cannot be pickled; pickle its spec")
        return load_artifact, (self.program.directory,)

    def extra_repr(self) -> str:
        layer = self.layer
        return f"{self.name}, H={layer.hidden_size}, I={layer.intermediate_size}, E={layer.num_experts}, K={self.top_k}"

    # --- what the operators call ------------------------------------------------------------------------------------

    def run(
        self,
        x: Tensor,
        routing: Tensor,
        weights: Tensor | None,
        parameters: tuple[Tensor | None, ...],
        shared_gate_logits: Tensor | None,
        selection_bias: Tensor | None,
        logit_bias: Tensor | None,
    ) -> Tensor:
        """One call: raise what an earlier one recorded, check, route, schedule, forward."""
        device, expected, words = x.device, self._expected, self.error_words.words
        if words[ID_FLAG] or words[WAIT_FLAG]:
            self._raise_recorded("an earlier call")
        tokens = check_tokens(expected.x, x, self.layer.max_tokens)
        check(expected.x, x, tokens, device)
        for (name, want), tensor in zip(expected.parameters, parameters, strict=True):
            check_optional(want, name, tensor, tokens, device)
        if shared_gate_logits is not None and expected.shared_gate_logits is not None:
            shared_gate_logits = check_small(expected.shared_gate_logits, shared_gate_logits, tokens, device)
        check_optional(expected.shared_gate_logits, "shared_gate_logits", shared_gate_logits, tokens, device)
        if expected.logits is not None and weights is None:
            ids, weights = self.run_route(routing, selection_bias, logit_bias, tokens, device)
        else:
            ids = check_small(expected.ids, routing, tokens, device)
            weights = check_small(expected.weights, weights, tokens, device)
            check_optional(None, "selection_bias", selection_bias, tokens, device)
            check_optional(None, "logit_bias", logit_bias, tokens, device)
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=device)
        if tokens == 1:
            x = x.view(-1).unsqueeze(0)  # a single row may carry any stride, which the kernels' stub would refuse
        if tokens:
            if device.type == "cuda":
                with _on(device):
                    memory = workspace.take(self.program.layout.num_bytes, device)
                    self.launch_into(x, ids, weights, parameters, shared_gate_logits, out, memory)
            else:
                self.execute_into(x, ids, weights, parameters, shared_gate_logits, out)
        return out

    def run_route(
        self,
        logits: Tensor,
        selection_bias: Tensor | None,
        logit_bias: Tensor | None,
        tokens: int | None = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ids (T, K) int32 and weights (T, K) fp32 of logits (T, E)."""
        expected = self._expected
        if expected.logits is None:
            raise ArgumentError("this layer takes ids and weights", where="logits", hint="router.input is ids")
        if tokens is None:
            tokens = check_tokens(expected.logits, logits, self.layer.max_tokens)
        device = device or logits.device
        check(expected.logits, logits, tokens, device)
        check_optional(expected.selection_bias, "selection_bias", selection_bias, tokens, device)
        check_optional(expected.logit_bias, "logit_bias", logit_bias, tokens, device)
        ids = torch.empty((tokens, self.top_k), dtype=torch.int32, device=device)
        weights = torch.empty((tokens, self.top_k), dtype=torch.float32, device=device)
        if tokens:
            if device.type == "cuda":
                with _on(device):
                    self._kernels().route(logits, selection_bias, logit_bias, ids, weights)
            else:
                host.route(self.plan, logits, selection_bias, logit_bias, ids, weights)
        return ids, weights

    def launch_into(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        parameters: tuple[Tensor | None, ...],
        shared_gate_logits: Tensor | None,
        out: Tensor,
        memory: Tensor,
        ctas: int | None = None,
    ) -> None:
        """schedule and forward of checked arguments on the current stream, into `out` and workspace `memory`."""
        kernels, address = self._kernels(), self.error_words.address
        kernels.schedule(ids, memory, address)
        if self._checked:
            self._check_ids(x.device)
        ctas = ctas or self.ctas or num_sms(x.device)
        kernels.forward(x, weights, parameters, shared_gate_logits, out, memory, ctas, self.wait_limit_ns, address)

    def _check_ids(self, device: torch.device) -> None:
        """`checks: checked`: wait for the schedule and raise before anything is computed from a wrong id."""
        if torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "a layer with checks: checked waits for the device and cannot be captured",
                where="CUDA graph",
                hint="build with checks: fast and call layer.check() after the replay",
            )
        torch.cuda.current_stream(device).synchronize()
        if self.error_words.words[ID_FLAG]:
            self._raise_recorded("this call")

    def execute_into(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        parameters: tuple[Tensor | None, ...],
        shared_gate_logits: Tensor | None,
        out: Tensor,
        interleaving: int | None = None,
    ) -> dict[str, Tensor]:
        """The same on the CPU executor: in ticket order, or in the seeded interleaving given. Returns the regions."""
        host.record_wrong_ids(ids, self.layer.num_experts, self.error_words)
        if self._checked and self.error_words.words[ID_FLAG]:
            self._raise_recorded("this call")
        tensors = {
            "x": x,
            "ids": ids,
            "topk_weights": weights,
            **dict(zip(PARAMETERS, parameters, strict=True)),
            "shared_gate_logits": shared_gate_logits,
        }
        return host.forward(self.plan, tensors, out, interleaving)

    def _kernels(self) -> Launcher:
        if self.launcher is None:
            raise ArtifactMismatchError(
                "this layer was loaded without kernels, for the CPU only",
                where=self.name,
                hint="load it on the machine with the GPU: load_layer(spec) or load_artifact(directory)",
            )
        return self.launcher

    def _raise_recorded(self, when: str) -> None:
        """Raise what the error words hold, a wait before an id: after an expired wait nothing of a call is valid."""
        words = self.error_words.take()
        if words[WAIT_FLAG]:
            raise wait_error(words, self.program.read_names(), when)
        if words[ID_FLAG]:
            raise id_error(words, self.layer.num_experts, when)


_below_autograd = torch._C._AutoDispatchBelowAutograd


def _needs_gradient(given: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*given)


class _on:  # noqa: N801
    """`torch.cuda.device(device)` at no cost where the device is current already."""

    __slots__ = ("_device", "_guard")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard: torch.cuda.device | None = None

    def __enter__(self) -> None:
        if self._device.index != torch.cuda.current_device():
            self._guard = torch.cuda.device(self._device)
            self._guard.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(None, None, None)


def load_layer(
    source: Any, *, arch: str | None = None, overrides: tuple[str, ...] = (), device: str | None = None
) -> Layer:
    """Load a layer from an artifact directory, a spec (path or object) or a resolved layer.

    With a GPU its kernels come from the cache, or are built first where the compiler is. Without one, or with
    `device="cpu"`, the layer is planned, nothing is compiled, and calls run on the CPU executor.
    """
    if isinstance(source, str | Path) and (Path(source) / MANIFEST_NAME).is_file():
        return load_artifact(source)
    from mokgen import driver

    if torch.cuda.is_available() and device != "cpu":
        arch = arch or arch_of(torch.cuda.get_device_capability())
        return load_artifact(driver.obtain(source, arch=arch, overrides=overrides))
    planned = driver.plan_of(source, arch, overrides)
    return layer_of_plan(planned.plan, planned.stem, planned.layer_key)


def load_artifact(directory: Path | str) -> Layer:
    """Load one artifact directory. Needs torch, apache-tvm-ffi and the CuTe runtime library; never the compiler."""
    place = Path(directory).resolve()
    try:
        manifest = read_manifest(place)
    except ManifestError as error:
        raise ArtifactMismatchError(str(error), where=str(place), hint="build the layer again") from error
    functions: Mapping[str, Kernel] = {}
    if torch.cuda.is_available():
        functions = load_kernels(place).functions
    _loaded_artifacts.add(place)
    regions = tuple(RegionView(row.name, row.dtype, row.shape, row.offset) for row in manifest.regions)
    return Layer(
        Program(
            layer=ResolvedLayer.from_dict(manifest.layer),
            stem=manifest.stem,
            layer_key=manifest.layer_key,
            arch=manifest.arch,
            layout=Layout(manifest.workspace_bytes, regions),
            functions=functions,
            arguments={name: tuple(row[0] for row in kernel.arguments) for name, kernel in manifest.kernels.items()},
            read_plan=lambda: host.read_plan(place / PLAN_NAME),
            read_names=lambda: Names.of_plan(json.loads((place / PLAN_NAME).read_text(encoding="utf-8"))),
            directory=place,
        )
    )


def layer_of_plan(plan: LayerPlan, stem: str, layer_key: str) -> Layer:
    """A layer that runs on the CPU alone, from a plan that was never compiled."""
    regions = tuple(RegionView(row.name, row.dtype, row.shape, row.offset) for row in plan.regions)
    return Layer(
        Program(
            layer=plan.layer,
            stem=stem,
            layer_key=layer_key,
            arch=plan.arch,
            layout=Layout(plan.workspace_bytes, regions),
            functions={},
            arguments={},
            read_plan=lambda: plan,
            read_names=lambda: Names.of_plan(plan.to_dict()),
            directory=None,
        )
    )


def compile_count() -> int:
    """Compiled artifacts this process has loaded. A layer adds one, whatever numbers of tokens it is called with."""
    return len(_loaded_artifacts)
