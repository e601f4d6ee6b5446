"""One scale for each block: a power of two as an exponent byte, or 16 bits of significand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from xcoll_kernels import arithmetic

from xcoll.codecs.limits import LIMIT


def block_magnitude(blocks: jax.Array) -> jax.Array:
    """Returns the bits of each block's largest magnitude, as ordered integers.

    NaN is above infinity, and infinity above all numbers: no comparison of floats, which
    backends answer differently for NaN, is made.

    Args:
      blocks: float32 of shape ``(..., block)``.

    Returns:
      int32 of shape ``(..., 1)``.
    """
    return jnp.max(arithmetic.magnitude_bits(blocks), axis=-1, keepdims=True)


def limit_bits(dtype: str) -> int:
    """Returns the bits of the largest magnitude that is finite in ``dtype``.

    >>> hex(limit_bits("bfloat16"))
    '0x7f7f7fff'
    """
    return arithmetic.bits_of(LIMIT[dtype])


def power_of_two(magnitude: jax.Array, largest: float) -> jax.Array:
    """Returns the exponent byte of the smallest power of two that fits each block.

    The scale ``2 ** (byte - 127)`` is the smallest with ``magnitude <= largest * scale``, and at
    least ``2 ** -126``.

    Args:
      magnitude: bits of each block's largest magnitude, int32, of a finite number.
      largest: the largest code, at least 4 so that the inverse is a normal number, with at most
        24 bits of significand.

    Returns:
      int32 of the same shape, 1 to 253.

    >>> bits = lambda x: lax.bitcast_convert_type(jnp.float32(x), jnp.int32)
    >>> [int(power_of_two(bits(x), 448.0)) - 127 for x in (224.0, 225.0, 448.0, 449.0)]
    [-1, 0, 0, 1]
    """
    significand, exponent = math.frexp(largest)
    assert exponent >= 3 and significand * (1 << 24) % 1 == 0
    # Only beyond largest's own significand is something carried into the exponent.
    carry = (1 << 24) - 1 - int(significand * (1 << 24))
    return jnp.maximum(((magnitude + carry) >> 23) - (exponent - 1), 1)


def exact_scale(magnitude: jax.Array, largest: int, *, up: bool) -> jax.Array:
    """Returns the scale ``magnitude / largest``, with 16 bits of significand.

    So short that its product with a code of 8 bits is exact: no sum of decoded values depends on
    whether the compiler fuses the product with an addition.

    Args:
      magnitude: bits of each block's largest magnitude, int32, of a finite number.
      largest: the largest code.
      up: rounds up, so that ``magnitude <= largest * scale``; else to nearest even.

    Returns:
      float32 of the same shape, at least ``2 ** -126``.
    """
    # Not a division: dividing by a constant is rewritten in some programs and not in others.
    ratio = lax.bitcast_convert_type(magnitude, jnp.float32) * jnp.float32(1 / largest)
    bits = lax.bitcast_convert_type(ratio, jnp.int32)
    # The ratio itself may be two units too small.
    bits = bits + (0xFF + 2 if up else 0x7F + ((bits >> 8) & 1))
    return lax.bitcast_convert_type(jnp.maximum(bits & ~0xFF, 0x00800000), jnp.float32)
