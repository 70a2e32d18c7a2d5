"""What a test runs: the full layer with its kernels on a GPU, or its reduced twin on the CPU executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mokgen.cache.manifest import MANIFEST_NAME
from mokgen.lower.layer import ResolvedLayer
from mokgen.reference.inputs import Parameters, make_parameters
from mokgen.runtime.layer import Layer, load_artifact, load_layer
from mokgen.spec.reduce import MAX_TOKENS, Routing, reduced_routing, reduced_size

SEED = 1


@dataclass
class Subject:
    """A loaded layer, the device it runs on, and its weights, made once."""

    layer: Layer
    device: torch.device
    note: str  # what runs, for people: printed at the head of every report
    _parameters: Parameters | None = field(default=None, repr=False)

    @property
    def resolved(self) -> ResolvedLayer:
        return self.layer.layer

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def parameters(self) -> Parameters:
        if self._parameters is None:
            self._parameters = make_parameters(self.resolved, self.device, SEED)
        return self._parameters


def reduced_layer(layer: ResolvedLayer) -> ResolvedLayer:
    """The reduced twin of a resolved layer: what `spec.reduce.reduced_twin` is to a spec."""
    router, shared = layer.router, layer.shared
    small = reduced_routing(Routing(layer.num_experts, router.groups, router.top_groups, router.top_k))
    if shared.num:
        one = reduced_size(shared.intermediate_size // shared.num)
        num = min(shared.num, 2)
        shared = replace(shared, num=num, intermediate_size=num * one)
    return replace(
        layer,
        hidden_size=reduced_size(layer.hidden_size),
        intermediate_size=reduced_size(layer.intermediate_size),
        num_experts=small.num_experts,
        num_local_experts=small.num_experts // layer.ep_size,
        router=replace(router, groups=small.groups, top_groups=small.top_groups, top_k=small.top_k),
        shared=shared,
        max_tokens=min(layer.max_tokens, MAX_TOKENS),
    )


def open_subject(source: Any, device: str | None = None) -> Subject:
    """Subject for a Layer, an artifact directory, a spec (path or object), a ResolvedLayer or its dict.

    On a GPU the layer is loaded with its kernels, built first if need be. Without one its reduced twin runs on the CPU
    executor, and the note says so.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    layer = _open(source, place)
    if place.type == "cpu":
        twin = reduced_layer(layer.layer)
        if twin != layer.layer:
            full, layer = layer, load_layer(twin, device="cpu")
            return Subject(layer, place, f"reduced twin on the CPU executor: {_sizes(twin)} for {_sizes(full.layer)}")
        return Subject(layer, place, f"CPU executor: {_sizes(twin)}")
    name = torch.cuda.get_device_name(place)
    return Subject(layer, place, f"{layer.program.arch} kernels on {name}: {_sizes(layer.layer)}")


def _open(source: Any, place: torch.device) -> Layer:
    if isinstance(source, Layer):
        return source
    if isinstance(source, Mapping):
        source = ResolvedLayer.from_dict(dict(source))
    if isinstance(source, str | Path) and (Path(source) / MANIFEST_NAME).is_file():
        return load_artifact(source)
    return load_layer(source, device=place.type)


def _sizes(layer: ResolvedLayer) -> str:
    text = f"H={layer.hidden_size} I={layer.intermediate_size} E={layer.num_experts} K={layer.top_k}"
    if layer.shared.num:
        text += f" Is={layer.shared.intermediate_size}"
    return f"{text} T<={layer.max_tokens}"
