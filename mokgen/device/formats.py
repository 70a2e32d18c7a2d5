"""Packing and unpacking of number formats in registers."""

import cutlass.cute as cute
from cutlass import Float32, Int32

UPPER_HALF = -65536  # 0xffff0000 as int32


@cute.jit
def pack_bf16(low: Float32, high: Float32):
    """Two fp32 to bf16x2, round to nearest even; `low` in the lower half."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[high, low]
    )


@cute.jit
def bits_to_float(bits: Int32):
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cute.jit
def unpack_bf16(word: Int32):
    """The two bf16 of a word as fp32, lower half first; exact."""
    return bits_to_float(word << 16), bits_to_float(word & Int32(UPPER_HALF))
