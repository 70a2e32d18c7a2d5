"""The reduced twin of a layer: the same structure at a size that a CPU runs in seconds.

Kept: router kind and options, shared expert, bias, layout, activation, and whether sizes are multiples of the tiles.
Lowered: H and I to at most 256, experts to at most 16, tokens to at most 257.
"""

from __future__ import annotations

from dataclasses import dataclass

from mokgen.spec.moe import MoeSpec, RouterLogits

MAX_SIZE = 256
MAX_EXPERTS = 16
MAX_TOKENS = 257  # two full row blocks and one row
TILE = 128


def reduced_size(size: int) -> int:
    """At most 256, with the same remainder modulo 128 (and the same fullness of a 256-wide tile where it is 0)."""
    if size <= MAX_SIZE:
        return size
    remainder = size % TILE
    if remainder:
        return TILE + remainder
    return MAX_SIZE if size % MAX_SIZE == 0 else TILE


@dataclass(frozen=True)
class Routing:
    """The numbers of a router."""

    num_experts: int
    groups: int
    top_groups: int
    top_k: int


def reduced_routing(full: Routing) -> Routing:
    """At most 16 experts, still in groups with a limit where there was one, still with two a group where there were."""
    if full.groups == 1:
        num = min(full.num_experts, MAX_EXPERTS)
        return Routing(num, 1, 1, min(full.top_k, num))
    per_group = full.num_experts // full.groups
    groups = min(full.groups, MAX_EXPERTS // min(per_group, 2))
    per_group = min(per_group, MAX_EXPERTS // groups)
    top_groups = full.top_groups if groups == full.groups else max(1, full.top_groups * groups // full.groups)
    return Routing(groups * per_group, groups, top_groups, min(full.top_k, top_groups * per_group))


def reduced_twin(spec: MoeSpec) -> MoeSpec:
    """The twin of a spec; a spec that is small already is its own twin."""
    data = spec.model_dump()
    data["hidden_size"] = reduced_size(spec.hidden_size)
    data["experts"]["intermediate_size"] = reduced_size(spec.experts.intermediate_size)
    router = spec.router
    if isinstance(router, RouterLogits):
        kept = router.groups if router.top_groups is None else router.top_groups
        small = reduced_routing(Routing(spec.experts.num, router.groups, kept, router.top_k))
        data["router"].update(groups=small.groups)
        if router.top_groups is not None:
            data["router"].update(top_groups=small.top_groups)
    else:
        small = reduced_routing(Routing(spec.experts.num, 1, 1, router.top_k))
    data["router"].update(top_k=small.top_k)
    data["experts"]["num"] = small.num_experts
    if spec.shared.num:
        one = spec.shared.intermediate_size or spec.experts.intermediate_size
        data["shared"].update(num=min(spec.shared.num, 2), intermediate_size=reduced_size(one))
    data["topology"]["max_tokens_per_rank"] = min(spec.topology.max_tokens_per_rank, MAX_TOKENS)
    return MoeSpec.model_validate(data)
