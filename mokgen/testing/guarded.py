"""Runs of a layer whose memory is watched: poisoned outputs and workspace, guard bands, every intermediate kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mokgen.reference.inputs import Inputs
from mokgen.testing.subject import Subject

Tensor = torch.Tensor

GUARD_BYTES = 4096
GUARD = 0xA5
TABLE_POISON = 1  # a legal index: who reads a table entry that nobody wrote gets wrong numbers, not a dead context


class Guarded:
    """A tensor with bands of known bytes on both sides; fresh memory is NaN where it holds numbers."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        count = torch.Size(shape).numel() * dtype.itemsize
        self._storage = torch.full((count + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        self._body = slice(GUARD_BYTES, GUARD_BYTES + count)
        self.tensor = self._storage[self._body].view(dtype).view(shape)
        if dtype.is_floating_point:
            self.tensor.fill_(float("nan"))

    def touched(self) -> str | None:
        """Which band was written, or None."""
        for name, band in (("before", self._storage[: self._body.start]), ("after", self._storage[self._body.stop :])):
            wrong = (band != GUARD).nonzero()
            if len(wrong):
                return (
                    f"{len(wrong)} bytes {name} the tensor were overwritten, first at byte {int(wrong[0])} of the band"
                )
        return None


@dataclass(frozen=True)
class Run:
    """One call: output (T, H) and the workspace regions by name (empty when nothing was launched)."""

    out: Tensor
    regions: dict[str, Tensor]
    fault: str | None


def run(subject: Subject, inputs: Inputs, variant: int | None = None) -> Run:
    """Call the layer from ids and weights. `variant` changes who computes what and must not change a bit.

    On a GPU it is the number of CTAs; on the CPU the seed of an interleaving of virtual CTAs.
    """
    if subject.on_gpu:
        return _run_on_gpu(subject, inputs, variant)
    return _run_on_cpu(subject, inputs, variant)


def call(subject: Subject, inputs: Inputs) -> Tensor:
    """The layer as a user calls it: through the operator, from logits where the layer routes by itself."""
    p = subject.parameters
    own_routing = inputs.logits is not None
    result: Tensor = subject.layer(
        inputs.x,
        inputs.logits if own_routing else inputs.ids,
        None if own_routing else inputs.weights,
        w_gate_up=p.w_gate_up,
        w_down=p.w_down,
        b_gate_up=p.b_gate_up,
        b_down=p.b_down,
        w_shared_gate_up=p.w_shared_gate_up,
        w_shared_down=p.w_shared_down,
        shared_gate_logits=inputs.shared_gate_logits,
        selection_bias=p.selection_bias if own_routing else None,
        logit_bias=p.logit_bias if own_routing else None,
    )
    return result


def poison(regions: dict[str, Tensor]) -> None:
    """Fill a workspace with what no correct kernel reads: NaN rows, wrong but legal table entries."""
    for region in regions.values():
        region.fill_(float("nan") if region.is_floating_point() else TABLE_POISON)


def _run_on_gpu(subject: Subject, inputs: Inputs, ctas: int | None) -> Run:
    layer, device = subject.layer, subject.device
    out = Guarded(tuple(inputs.x.shape), torch.bfloat16, device)
    if inputs.tokens == 0:
        return Run(out.tensor, {}, out.touched())
    memory = Guarded((layer.workspace_bytes,), torch.uint8, device)
    regions = layer.regions(memory.tensor)
    poison(regions)
    layer.launch_into(inputs.x, inputs.ids, inputs.weights, *_weights(subject, inputs), out.tensor, memory.tensor, ctas)
    layer.check()
    fault = out.touched()
    if fault is None and (band := memory.touched()):
        fault = f"workspace: {band}"
    return Run(out.tensor, regions, fault)


def _run_on_cpu(subject: Subject, inputs: Inputs, seed: int | None) -> Run:
    layer = subject.layer
    out = Guarded(tuple(inputs.x.shape), torch.bfloat16, subject.device)
    if inputs.tokens == 0:
        return Run(out.tensor, {}, out.touched())
    regions = layer.execute_into(
        inputs.x, inputs.ids, inputs.weights, *_weights(subject, inputs), out.tensor, interleaving=seed
    )
    return Run(out.tensor, regions, out.touched())


def _weights(subject: Subject, inputs: Inputs) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    p = subject.parameters
    parameters = (p.w_gate_up, p.w_down, p.b_gate_up, p.b_down, p.w_shared_gate_up, p.w_shared_down)
    return parameters, inputs.shared_gate_logits
