"""`resolve`: what a spec means. Fills every default in, gives absent features their neutral value, refuses what has no
kernels. Specs that mean the same layer give equal `ResolvedLayer`s."""

from __future__ import annotations

from collections.abc import Iterator

from mokgen.errors import Diagnostic, UnsupportedError
from mokgen.facts.activations import ACTIVATIONS
from mokgen.facts.arch import ARCHS
from mokgen.facts.formats import PRECISIONS
from mokgen.lower.layer import ResolvedLayer, RouterLayer, SharedLayer
from mokgen.spec.moe import MoeSpec, RouterIds, RouterLogits

# The reduction and the router unroll over the slots of a token: compiled without spills up to here, with spills at 512.
MAX_TOP_K = 128


def resolve(spec: MoeSpec) -> ResolvedLayer:
    """The layer of a legal spec; raises `UnsupportedError` listing every choice that has no kernels."""
    missing = list(_unsupported(spec))
    if missing:
        raise UnsupportedError(missing)
    experts, topology = spec.experts, spec.topology
    activation = ACTIVATIONS[experts.activation]
    return ResolvedLayer(
        hidden_size=spec.hidden_size,
        num_experts=experts.num,
        num_local_experts=experts.num // topology.ep_size,
        intermediate_size=experts.intermediate_size,
        activation=experts.activation,
        alpha=float(activation.alpha if experts.alpha is None else experts.alpha),
        clamp=float(activation.clamp if experts.clamp is None else experts.clamp),
        expert_bias=experts.bias,
        gate_up_layout=experts.gate_up_layout,
        weight_dtype=experts.weight_dtype,
        router=_router(spec.router),
        shared=_shared(spec),
        precision=spec.precision.kind,
        ep_size=topology.ep_size,
        transport=topology.transport,
        placement=topology.placement,
        max_tokens=topology.max_tokens_per_rank,
        capacity=topology.capacity,
        passes=tuple(sorted(spec.passes, reverse=True)),  # forward before backward
        save=spec.save if "backward" in spec.passes else "none",
        determinism=spec.determinism,
        checks=spec.checks,
        archs=tuple(sorted(spec.target.archs)),
        knobs=tuple(sorted(spec.plan.items())),
    )


def _router(router: RouterIds | RouterLogits) -> RouterLayer:
    if isinstance(router, RouterIds):
        return RouterLayer(
            input="ids",
            top_k=router.top_k,
            score="softmax",
            order="score_then_topk",
            normalize=False,
            scale=1.0,
            selection_bias=False,
            logit_bias=False,
            groups=1,
            top_groups=1,
            group_score="max",
            weight_dtype=router.weight_dtype,
            logits_dtype="fp32",
        )
    kept = router.groups if router.top_groups is None else router.top_groups
    limited = kept < router.groups  # keeping every group is no limit
    # A softmax over the chosen logits sums to one already.
    sums_to_one = router.order == "topk_then_score" and router.score == "softmax"
    return RouterLayer(
        input="logits",
        top_k=router.top_k,
        score=router.score,
        order=router.order,
        normalize=router.normalize and not sums_to_one,
        scale=float(router.scale),
        selection_bias=router.selection_bias,
        logit_bias=router.logit_bias,
        groups=router.groups if limited else 1,
        top_groups=kept if limited else 1,
        group_score=router.group_score if limited else "max",
        weight_dtype="fp32",
        logits_dtype=router.logits_dtype,
    )


def _shared(spec: MoeSpec) -> SharedLayer:
    shared = spec.shared
    if shared.num == 0:
        return SharedLayer(num=0, intermediate_size=0, gate="none")
    one = spec.experts.intermediate_size if shared.intermediate_size is None else shared.intermediate_size
    return SharedLayer(num=shared.num, intermediate_size=shared.num * one, gate=shared.gate)


def _unsupported(spec: MoeSpec) -> Iterator[Diagnostic]:
    """Legal choices without kernels: the stage that lacks them and the nearest choice that exists."""
    topology = spec.topology
    if spec.router.top_k > MAX_TOP_K:
        yield _no_kernels("route and reduce", "router.top_k", spec.router.top_k, str(MAX_TOP_K))
    if spec.precision.kind not in PRECISIONS:
        yield _no_kernels("quantize, fc1 and fc2", "precision.kind", spec.precision.kind, "bf16")
    if topology.ep_size > 1:
        yield _no_kernels("dispatch and combine", "topology.ep_size", topology.ep_size, "1")
    if topology.transport != "local":
        yield _no_kernels("dispatch and combine", "topology.transport", topology.transport, "local")
    if topology.capacity != "dropless":
        yield _no_kernels("schedule", "topology.capacity", topology.capacity, "dropless")
    if "backward" in spec.passes:
        yield _no_kernels("fc1_dgrad, fc2_dgrad and wgrad", "passes", "backward", "[forward]")
    for arch in spec.target.archs:
        if arch not in ARCHS:
            yield _no_kernels("every stage", "target.archs", arch, ", ".join(ARCHS))


def _no_kernels(stages: str, field: str, choice: object, nearest: str) -> Diagnostic:
    return Diagnostic(f"{choice} has no kernels for {stages}", field, f"nearest supported: {nearest}")
