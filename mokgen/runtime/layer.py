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
from mokgen.errors import ArgumentError, ArtifactMismatchError, MokgenError, ToolchainError, UsageError
from mokgen.lower.layer import ResolvedLayer
from mokgen.runtime import host, postmortem, workspace
from mokgen.runtime.arguments import Fit, check, check_optional, check_tokens, expected_arguments, prepare
from mokgen.runtime.errors import ID_FLAG, WAIT_FLAG, ErrorWords, Names, id_error, wait_error
from mokgen.runtime.launch import Kernel, Launcher, num_sms
from mokgen.runtime.module import arch_of, load_kernels
from mokgen.runtime.op import PARAMETERS, moe_forward, moe_route, only_computes, register
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
        self._routes = self._expected.logits is not None
        self._fits = {
            own_routing: Fit(self._expected.in_order(own_routing), program.layer.max_tokens)
            for own_routing in ((False, True) if self._routes else (False,))
        }
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
        parameters = (w_gate_up, w_down, b_gate_up, b_down, w_shared_gate_up, w_shared_down)
        rest = (shared_gate_logits, selection_bias, logit_bias)
        given = (x, logits_or_ids, weights, *parameters, *rest)
        if not torch.compiler.is_compiling() and only_computes(given):
            return self.run(*given)
        if w_gate_up is None or w_down is None:
            raise ArgumentError("missing", where="w_gate_up" if w_gate_up is None else "w_down")
        return moe_forward(self.name, *given)  # type: ignore[no-any-return]

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

    def run(self, *given: Tensor | None) -> Tensor:
        """One call with the operator's tensors: raise what an earlier one recorded, check, compute."""
        words = self.error_words.words
        if words[ID_FLAG] or words[WAIT_FLAG]:
            self._raise_recorded("an earlier call")
        own_routing = given[2] is None and self._routes
        fits = self._fits[own_routing]
        if not fits(given):
            given = prepare(self._expected, given, own_routing, self.layer.max_tokens)
        try:
            return self._compute(given, own_routing)
        except (TypeError, ValueError) as refusal:
            if isinstance(refusal, MokgenError):
                raise
        # A tensor was refused by the kernels' stub: one that an earlier call had too and that has changed since.
        fits.forget()
        return self._compute(prepare(self._expected, given, own_routing, self.layer.max_tokens), own_routing)

    def _compute(self, given: tuple[Tensor | None, ...], own_routing: bool) -> Tensor:
        """route, schedule, forward of checked tensors on their device."""
        x, routing, weights = given[:3]
        assert x is not None and routing is not None
        if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(x.device):
                return self._compute(given, own_routing)
        out, tokens = torch.empty_like(x), x.shape[0]
        if not tokens:
            return out
        if own_routing:
            routing, weights = self._routed(routing, *given[10:])
        assert weights is not None
        if x.is_cuda:
            memory = workspace.take(self.program.layout.num_bytes, x.get_device(), self.name, tokens)
            self.launch_into(x, routing, weights, given[3:9], given[9], out, memory)
        else:
            self.execute_into(x, routing, weights, given[3:9], given[9], out)
        return out

    def run_route(
        self, logits: Tensor, selection_bias: Tensor | None, logit_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """ids (T, K) int32 and weights (T, K) fp32 of logits (T, E)."""
        expected, device = self._expected, logits.device
        if expected.logits is None:
            raise ArgumentError("this layer takes ids and weights", where="logits", hint="router.input is ids")
        tokens = check_tokens(expected.logits, logits, self.layer.max_tokens)
        logits = check(expected.logits, logits, tokens, device)
        selection_bias = check_optional(expected.selection_bias, "selection_bias", selection_bias, tokens, device)
        logit_bias = check_optional(expected.logit_bias, "logit_bias", logit_bias, tokens, device)
        if logits.is_cuda:
            with torch.cuda.device(device):
                return self._routed(logits, selection_bias, logit_bias)
        return self._routed(logits, selection_bias, logit_bias)

    def _routed(
        self, logits: Tensor, selection_bias: Tensor | None, logit_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shape = (logits.shape[0], self.top_k)
        ids, weights = logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)
        if logits.is_cuda and shape[0]:
            self._kernels().route(logits, selection_bias, logit_bias, ids, weights)
        elif shape[0]:
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
        ctas = ctas or self.ctas or num_sms(x.get_device())
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
            cause = postmortem.cause(lambda: self.plan, self.program.layout, self.name)
            raise wait_error(words, self.program.read_names(), when, cause)
        if words[ID_FLAG]:
            raise id_error(words, self.layer.num_experts, when)


def load_layer(
    source: Any, *, arch: str | None = None, overrides: tuple[str, ...] = (), device: str | torch.device | None = None
) -> Layer:
    """Load a layer from an artifact directory, a spec (path or object) or a resolved layer.

    With a GPU its kernels come from the cache, or are built first where the compiler is. Without one, or with
    `device="cpu"`, the layer is planned, nothing is compiled, and calls run on the CPU executor.
    """
    kind = None if device is None else torch.device(device).type
    if kind not in (None, "cpu", "cuda"):
        raise UsageError(f"no kernels for {kind} devices", "device", "cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("torch finds no GPU", "device", "leave device out: calls then run on the CPU executor")
    if isinstance(source, str | Path) and (Path(source) / MANIFEST_NAME).is_file():
        if overrides:
            raise UsageError("an artifact is built and cannot be changed", "overrides", "load the spec instead")
        return load_artifact(source)
    from mokgen import driver

    if torch.cuda.is_available() and kind != "cpu":
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
