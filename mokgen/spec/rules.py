"""Rules between the fields of a spec, each with the nearest legal values; types and ranges are the models' part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mokgen.facts.formats import FORMATS

if TYPE_CHECKING:
    from mokgen.spec.moe import MoeSpec, RouterLogits

MAX_EXPERTS = 4096
MAX_SIZE = 1 << 20  # hidden and intermediate size, that of the merged shared experts too
MAX_ROWS = (1 << 31) - 1  # routes and pool rows are counted in int32
POOL_SEGMENT_ROWS = 128  # an expert's rows are padded to a multiple of this


@dataclass(frozen=True)
class Fault:
    """A broken rule at `field` (dotted): `what` names value and rule, `hint` what is allowed."""

    field: str
    what: str
    hint: str


def broken_rules(spec: MoeSpec) -> list[Fault]:
    """Every broken rule of a spec whose fields are each well typed."""
    return [*_sizes(spec), *_routing(spec), *_topology(spec), *_passes(spec)]


def _sizes(spec: MoeSpec) -> Iterator[Fault]:
    sizes = {"hidden_size": spec.hidden_size, "experts.intermediate_size": spec.experts.intermediate_size}
    if spec.shared.num and spec.shared.intermediate_size is not None:
        sizes["shared.intermediate_size"] = spec.shared.intermediate_size
    multiple = FORMATS[spec.experts.weight_dtype].row_multiple
    for field, value in sizes.items():
        if value % multiple:
            yield Fault(
                field,
                f"{value} is not a multiple of {multiple} (rows must be multiples of 16 bytes)",
                f"nearest legal values: {nearest_multiples(value, multiple)}",
            )
        if value > MAX_SIZE:
            yield Fault(field, f"{value} is above {MAX_SIZE}", f"at most {MAX_SIZE}")
    width = spec.shared.intermediate_size or spec.experts.intermediate_size
    if spec.shared.num > 1 and width <= MAX_SIZE < spec.shared.num * width:
        what = f"{spec.shared.num} experts of {width} merge into a width of {spec.shared.num * width}, above {MAX_SIZE}"
        yield Fault("shared.num", what, f"0 to {MAX_SIZE // width}")
    if spec.experts.num > MAX_EXPERTS:
        yield Fault("experts.num", f"{spec.experts.num} is above {MAX_EXPERTS}", f"1 to {MAX_EXPERTS}")


def nearest_multiples(value: int, multiple: int) -> str:
    """The multiples around a value, as "96 or 104"; the lower one only where it is positive."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def _routing(spec: MoeSpec) -> Iterator[Fault]:
    router, num = spec.router, spec.experts.num
    if router.top_k > num:
        yield Fault("router.top_k", f"{router.top_k} is above experts.num = {num}", f"1 to {num}")
    if router.input == "logits":
        yield from _logits_router(router, num)


def _logits_router(router: RouterLogits, num: int) -> Iterator[Fault]:
    if router.order == "topk_then_score":
        for field, used in (("selection_bias", router.selection_bias), ("groups", router.groups > 1)):
            if used:
                yield Fault(
                    f"router.{field}",
                    "works on scores before the choice, which order: topk_then_score does not have",
                    f"order: score_then_topk, or leave {field} out",
                )
    if num % router.groups:
        divisors = [count for count in range(1, num + 1) if num % count == 0]
        near = sorted(sorted(divisors, key=lambda count: abs(count - router.groups))[:2])
        yield Fault(
            "router.groups",
            f"{router.groups} does not divide experts.num = {num}",
            f"nearest legal values: {' or '.join(map(str, near))}",
        )
        return
    per_group = num // router.groups
    kept = router.groups if router.top_groups is None else router.top_groups
    if kept > router.groups:
        yield Fault("router.top_groups", f"{kept} is above router.groups = {router.groups}", f"1 to {router.groups}")
    elif kept * per_group < router.top_k <= num:
        least = -(-router.top_k // per_group)
        yield Fault(
            "router.top_groups",
            f"{kept} groups of {per_group} experts hold fewer than router.top_k = {router.top_k} experts",
            f"top_groups {least} to {router.groups}, or top_k 1 to {kept * per_group}",
        )
    if router.group_score == "top2_sum" and router.groups > 1 and per_group < 2:
        yield Fault(
            "router.group_score",
            f"top2_sum needs two experts in a group; {num} experts in {router.groups} groups leave {per_group}",
            f"group_score: max, or groups at most {num // 2}",
        )


def _topology(spec: MoeSpec) -> Iterator[Fault]:
    topology, num = spec.topology, spec.experts.num
    if num % topology.ep_size:
        yield Fault(
            "topology.ep_size", f"{topology.ep_size} does not divide experts.num = {num}", f"a divisor of {num}"
        )
    if topology.transport == "local" and topology.ep_size > 1:
        yield Fault("topology.transport", f"local has one rank, ep_size is {topology.ep_size}", "virtual or symmetric")
    if spec.determinism == "batch_invariant" and topology.capacity == "drop":
        yield Fault(
            "determinism", "batch_invariant cannot hold where capacity: drop loses routes", "capacity: dropless"
        )
    rows = topology.max_tokens_per_rank * spec.router.top_k + (POOL_SEGMENT_ROWS - 1) * num
    if rows > MAX_ROWS:
        most = (MAX_ROWS - (POOL_SEGMENT_ROWS - 1) * num) // spec.router.top_k
        yield Fault(
            "topology.max_tokens_per_rank",
            f"{topology.max_tokens_per_rank} tokens need {rows} pool rows, above {MAX_ROWS}",
            f"1 to {most}",
        )


def _passes(spec: MoeSpec) -> Iterator[Fault]:
    if "forward" not in spec.passes or len(set(spec.passes)) != len(spec.passes):
        yield Fault("passes", f"{list(spec.passes)}: forward is always built, each pass once", "[forward, backward]")
    if len(set(spec.target.archs)) != len(spec.target.archs):
        yield Fault("target.archs", f"{list(spec.target.archs)} names an architecture twice", "each once")
