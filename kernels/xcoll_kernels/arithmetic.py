"""The arithmetic of one block, elementwise: what the reference and every kernel have in common.

A block's scale is a power of two, kept as the biased exponent byte ``b`` of a float32: the scale
is the float32 whose exponent field is ``b``. It is the smallest power of two, 2**-126 at least,
with ``largest magnitude <= qmax * scale``; ``b == 255`` marks a block that holds something not
finite. Products with such a scale are exact, so nothing here depends on whether a compiler fuses
a multiplication with an addition. Where hardware may flush subnormal numbers or not, they are
flushed here. Only comparisons, shifts, multiplications and additions: all of it works inside
Pallas kernels, on refs' values of any shape.
"""

from __future__ import annotations

import struct
from typing import Any

import jax.numpy as jnp
from jax import lax

QMAX = {8: 127, 4: 7}
"""Largest code of each width; codes are symmetric."""

NAN_EXPONENT = 255
"""The exponent byte of a block that decodes to NaN."""

# Largest codes are qmax = 2**(shift + 1) - 1, so qmax * 2**(e - shift - 127) is a float32 with
# exponent field e whose 23 bits of mantissa are all ones but the lowest carry_bits. Adding
# 2**carry_bits - 1 to a magnitude's bits carries into the exponent field exactly where its mantissa
# is larger than that, which is where the next power of two is needed.
_CARRY = {8: 0x1FFFF, 4: 0x1FFFFF}
_SHIFT = {8: 6, 4: 2}
_MAGIC = 12582912.0  # 1.5 * 2**23: float32 has unit spacing around it


def bits_of(value: float) -> int:
    """Returns the bits of a float32 as an integer, for constants."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def magnitude_bits(x: Any) -> Any:
    """Returns the bits of ``|x|`` as int32, ordered as the magnitudes are; NaN above infinity."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def flushed(x: Any) -> Any:
    """Returns float32 ``x`` with subnormal numbers made zero."""
    return jnp.where(magnitude_bits(x) < 0x00800000, 0.0, x)


def finite_exponent(largest: Any, *, bits: int, limit_bits: int) -> Any:
    """Returns a block's exponent byte as int32, as if it were finite: 1 to 253.

    Args:
      largest: int32, the largest `magnitude_bits` of the block.
      bits: 8 or 4.
      limit_bits: bits of the largest magnitude that counts as finite.
    """
    carried = jnp.minimum(largest, limit_bits) + _CARRY[bits]
    return jnp.maximum((carried >> 23) - _SHIFT[bits], 1)


def marked_exponent(exponent: Any, largest: Any, *, limit_bits: int) -> Any:
    """Returns the exponent byte to store, int32: `NAN_EXPONENT` where the block is not finite."""
    return jnp.where(largest > limit_bits, NAN_EXPONENT, exponent)


def inverse_scale(exponent: Any) -> Any:
    """Returns ``1 / scale`` as float32 for a finite int32 exponent byte, exactly."""
    return lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)


def scale(exponent: Any) -> Any:
    """Returns the scale as float32 for an int32 exponent byte; infinite for `NAN_EXPONENT`."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def code(x: Any, inverse: Any, finite: Any) -> Any:
    """Returns int32 codes: ``x * inverse`` rounded to nearest even, 0 where not ``finite``.

    Rounds by adding 1.5 * 2**23, which Triton, without a rounding instruction, can do too; exact
    for magnitudes below 2**22, and codes are at most 127. The code is read off the sum's bits: a
    compiler that subtracts the number again may find that the two cancel, as XLA:CPU of
    jax 0.11.2 does, and truncate instead.
    """
    scaled = jnp.where(finite, flushed(x) * inverse, 0.0)
    return lax.bitcast_convert_type(scaled + _MAGIC, jnp.int32) - bits_of(_MAGIC)


def value(codes: Any, exponent: Any, *, saturate: float) -> Any:
    """Returns the float32 that int32 codes stand for, within ``±saturate``; NaN if so marked."""
    product = codes.astype(jnp.float32) * scale(exponent)
    clipped = jnp.minimum(jnp.maximum(product, -saturate), saturate)
    return jnp.where(exponent == NAN_EXPONENT, jnp.nan, clipped)


def float16_value(half_bits: Any) -> Any:
    """Returns as float32 what the int16 bits of float16 stand for: Mosaic has no float16."""
    wide = half_bits.astype(jnp.int32)
    magnitude = wide & 0x7FFF
    normal = lax.bitcast_convert_type((magnitude << 13) + (112 << 23), jnp.float32)
    special = lax.bitcast_convert_type((magnitude << 13) | 0x7F800000, jnp.float32)
    subnormal = magnitude.astype(jnp.float32) * 2.0**-24
    value = jnp.where(magnitude < 0x0400, subnormal, normal)
    value = jnp.where(magnitude < 0x7C00, value, special)
    return jnp.where(wide < 0, -value, value)


def low_nibble(packed: Any) -> Any:
    """Returns the signed value of the low four bits of an int32."""
    return (packed << 28) >> 28


def high_nibble(packed: Any) -> Any:
    """Returns the signed value of bits 4 to 7 of an int32."""
    return (packed << 24) >> 28


def packed_nibbles(low: Any, high: Any) -> Any:
    """Returns int32 with two codes of four bits each in bits 0 to 7, sign-extended from bit 7."""
    return (low & 15) | (high << 4)
