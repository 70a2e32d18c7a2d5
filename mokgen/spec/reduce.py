"""The reduced twin of a layer: the same structure at a size that a CPU runs in seconds.

Kept: router kind and options, shared expert, bias, layout, activation, and whether sizes are multiples of the tiles.
Lowered: H and I to at most 256, experts to at most 16, tokens to at most 257.
"""

from __future__ import annotations

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


def reduced_twin(spec: MoeSpec) -> MoeSpec:
    """The twin of a spec; a spec that is small already is its own twin."""
    data = spec.model_dump()
    data["hidden_size"] = reduced_size(spec.hidden_size)
    data["experts"]["intermediate_size"] = reduced_size(spec.experts.intermediate_size)
    num, router = _reduced_routing(spec)
    data["experts"]["num"] = num
    data["router"].update(router)
    if spec.shared.num:
        one = spec.shared.intermediate_size or spec.experts.intermediate_size
        data["shared"].update(num=min(spec.shared.num, 2), intermediate_size=reduced_size(one))
    data["topology"]["max_tokens_per_rank"] = min(spec.topology.max_tokens_per_rank, MAX_TOKENS)
    return MoeSpec.model_validate(data)


def _reduced_routing(spec: MoeSpec) -> tuple[int, dict[str, int]]:
    """Number of experts, and the router fields that follow from it."""
    router, num = spec.router, spec.experts.num
    if not isinstance(router, RouterLogits) or router.groups == 1:
        num = min(num, MAX_EXPERTS)
        return num, {"top_k": min(router.top_k, num)}
    kept = router.groups if router.top_groups is None else router.top_groups
    # Two experts a group at least, so that a group score over two experts keeps its meaning.
    per_group = num // router.groups
    groups = min(router.groups, MAX_EXPERTS // min(per_group, 2))
    per_group = min(per_group, MAX_EXPERTS // groups)
    top_groups = kept if groups == router.groups else min(groups, max(1, kept * groups // router.groups))
    return groups * per_group, {
        "groups": groups,
        "top_groups": top_groups,
        "top_k": min(router.top_k, top_groups * per_group),
    }
