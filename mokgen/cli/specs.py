"""From a command's arguments to layers and plans, with errors placed in the spec's file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mokgen import settings
from mokgen.errors import MokgenError, UsageError
from mokgen.facts.arch import ARCHS

if TYPE_CHECKING:
    from mokgen.lower.layer import ResolvedLayer
    from mokgen.plan.model import LayerPlan
    from mokgen.spec.moe import MoeSpec


@dataclass(frozen=True)
class Selection:
    """What the options common to several commands say about a spec."""

    overrides: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    reduced: bool = False


@dataclass(frozen=True)
class Planned:
    """One spec, planned for one architecture."""

    name: str  # as the user wrote it
    arch: str
    layer: ResolvedLayer
    plan: LayerPlan


def load(name: str, selection: Selection) -> MoeSpec:
    """The spec an argument means, or its reduced twin."""
    from mokgen.spec.load import load_spec

    spec = load_spec(name, selection.overrides)
    if selection.reduced:
        from mokgen.spec.reduce import reduced_twin

        return reduced_twin(spec)
    return spec


def chosen_archs(selection: Selection, spec_archs: Sequence[str]) -> tuple[str, ...]:
    """--arch, else MOKGEN_ARCH, else the spec's own."""
    from mokgen.spec.messages import did_you_mean

    archs = selection.archs or settings.ARCH.get() or tuple(spec_archs)
    for arch in archs:
        if arch not in ARCHS:
            guess = did_you_mean(arch, ARCHS)
            raise UsageError(f"no kernels for {arch}{guess}", "arguments", f"one of {', '.join(ARCHS)}")
    return tuple(dict.fromkeys(archs))


def planned(name: str, selection: Selection) -> Iterator[Planned]:
    """The plans of one spec, one per architecture."""
    from mokgen.lower.build import lower
    from mokgen.lower.resolve import resolve
    from mokgen.plan.schedule import make_plan
    from mokgen.spec.load import load_with_places

    loaded = load_with_places(name, selection.overrides)
    spec = load(name, selection) if selection.reduced else loaded.spec
    try:
        layer = resolve(spec)
        graph = lower(layer)
        for arch in chosen_archs(selection, layer.archs):
            yield Planned(name, arch, layer, make_plan(graph, arch))
    except MokgenError as error:
        raise loaded.located(error) from None
