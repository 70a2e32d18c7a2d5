"""Parts of a spec that say how and where a layer runs: precision, topology, target."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mokgen.facts.arch import ARCHS, PLANNED_ARCHS
from mokgen.facts.formats import PLANNED_PRECISIONS, PRECISIONS
from mokgen.spec.base import OneOf, PositiveInt, SpecModel

ArchName = Annotated[str, OneOf((*ARCHS, *PLANNED_ARCHS))]
PrecisionName = Annotated[str, OneOf((*PRECISIONS, *PLANNED_PRECISIONS))]


class PrecisionSpec(SpecModel):
    """Number format of the matrix products."""

    kind: PrecisionName = "bf16"
    """`bf16`: bf16 operands, fp32 sums. `fp8_block` (e4m3, scales per 1x128 and 128x128), `mxfp8`: no kernels yet."""


class TopologySpec(SpecModel):
    """Ranks the experts are spread over, and how many tokens a rank may bring."""

    ep_size: PositiveInt = 1
    """Ranks that share the experts; must divide `experts.num`. Only 1 has kernels yet."""

    transport: Literal["local", "virtual", "symmetric", "gloo"] = "local"
    """How rows travel: `local` (one rank); `virtual` (one process), `symmetric` (NVLink), `gloo`: no kernels yet."""

    placement: Literal["contiguous"] = "contiguous"
    """Which rank owns an expert: rank r owns experts r*E/R up to (r+1)*E/R."""

    max_tokens_per_rank: PositiveInt = 8192
    """Largest T of a call; the compiled kernel takes every T from 0 to this."""

    capacity: Literal["dropless", "error", "drop"] = "dropless"
    """`dropless`: no route is ever lost. `error` and `drop` bound the rows of an expert: no kernels yet."""


class TargetSpec(SpecModel):
    """What to build for."""

    archs: Annotated[tuple[ArchName, ...], Field(strict=False, min_length=1)] = ("sm_90a",)
    """GPU architectures, one artifact each. `sm_100a`, `sm_103a`: no kernels yet."""
