"""GPU architectures: limits a plan must keep and rates a report compares with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One product of an architecture, for rooflines and defaults of knobs; kernels never depend on it."""

    name: str
    copy_bytes_per_second: float  # measured: read + write of a large copy
    matmul_flops_per_second: float  # measured: 8192^3 bf16 matmul through torch


@dataclass(frozen=True)
class ArchTraits:
    """Limits of one compute capability (CUDA C++ programming guide, technical specifications per capability)."""

    name: str  # as compilers spell it: sm_90a
    capability: tuple[int, int]
    smem_bytes_per_cta: int  # opt-in maximum: 228 KiB per SM less 1 KiB kept by the system
    registers_per_sm: int  # 32-bit
    max_registers_per_thread: int
    register_granule: int  # setmaxnreg takes multiples of this
    max_threads_per_cta: int
    max_cluster: int  # CTAs; above 8, the portable size, a kernel needs an attribute that the DSL always sets
    device: Device


H200 = Device(
    name="H200",
    copy_bytes_per_second=4.3e12,  # H200, 2026-12-01
    matmul_flops_per_second=760e12,  # H200, 2026-12-01: 747-773
)

ARCHS: dict[str, ArchTraits] = {
    "sm_90a": ArchTraits(
        name="sm_90a",
        capability=(9, 0),
        smem_bytes_per_cta=232448,
        registers_per_sm=65536,
        max_registers_per_thread=255,
        register_granule=8,
        max_threads_per_cta=1024,
        max_cluster=16,
        device=H200,
    ),
}

# Legal in a spec, without kernels so far.
PLANNED_ARCHS = ("sm_100a", "sm_103a")
