"""Gated activations of a pair (gate, up) of fp32 accumulators; same names as `mokgen.facts.activations`.

Every function takes (gate, up, alpha, clamp) with alpha and clamp compile-time floats, clamp = inf meaning none.
"""

import math

import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

LOG2_E = 1.4426950408889634


@cute.jit
def sigmoid(value: Float32):
    """1 / (1 + exp(-value)) by ex2 and rcp approximations: relative error 2^-21 down to -4, 2^-17 down to -80."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(value * Float32(-LOG2_E), fastmath=True))


@cute.jit
def swiglu(gate: Float32, up: Float32, alpha: Constexpr[float], clamp: Constexpr[float]):
    """silu(gate) * up; with clamp: gate at most clamp, up within [-clamp, clamp]."""
    if const_expr(not math.isinf(clamp)):
        gate = cute.arch.fmin(gate, Float32(clamp), nan=True)
        up = cute.arch.fmin(cute.arch.fmax(up, Float32(-clamp), nan=True), Float32(clamp), nan=True)
    return gate * sigmoid(gate * Float32(alpha)) * up


@cute.jit
def swigluoai(gate: Float32, up: Float32, alpha: Constexpr[float], clamp: Constexpr[float]):
    """gate * sigmoid(alpha * gate) * (up + 1), clamped as in `swiglu` (gpt-oss)."""
    if const_expr(not math.isinf(clamp)):
        gate = cute.arch.fmin(gate, Float32(clamp), nan=True)
        up = cute.arch.fmin(cute.arch.fmax(up, Float32(-clamp), nan=True), Float32(clamp), nan=True)
    return gate * sigmoid(gate * Float32(alpha)) * (up + Float32(1.0))
