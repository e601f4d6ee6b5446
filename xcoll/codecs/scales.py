"""One scale for each block: powers of two as an exponent byte, or float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll.codecs.limits import LIMIT

NAN_EXPONENT = 255
"""Exponent byte of a block that decodes to NaN: the exponent of float32's own NaN."""

_NAN_BITS = 0x7FC00000


def bits_of(x: jax.Array) -> jax.Array:
    """Returns the bits of float32 values as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """Returns the float32 values of int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(blocks: jax.Array) -> jax.Array:
    """Returns the bits of each block's largest magnitude, as ordered integers.

    NaN is above infinity, and infinity above all numbers: no comparison of floats, which
    backends answer differently for NaN, is made.

    Args:
      blocks: float32 of shape ``(..., block)``.

    Returns:
      int32 of shape ``(..., 1)``.
    """
    return jnp.max(bits_of(blocks) & 0x7FFFFFFF, axis=-1, keepdims=True)


def is_nan_block(magnitude: jax.Array, dtype: str) -> jax.Array:
    """Whether a block of that magnitude (as bits) holds what is not finite in ``dtype``."""
    return magnitude > int(np.float32(LIMIT[dtype]).view(np.int32))


def power_of_two(magnitude: jax.Array, largest: float) -> jax.Array:
    """Returns the exponent byte of the smallest power of two that fits each block.

    The scale ``2 ** (byte - 127)`` is the smallest with ``magnitude <= largest * scale``, and at
    least ``2 ** -126``.

    Args:
      magnitude: bits of each block's largest magnitude, int32.
      largest: the largest code, at least 4, so that the inverse is a normal number.

    Returns:
      int32 of the same shape, 1 to 253.

    >>> int(power_of_two(bits_of(jnp.float32(127.0)), 127)) - 127
    0
    >>> int(power_of_two(bits_of(jnp.float32(127.5)), 127)) - 127
    1
    """
    significand, exponent = math.frexp(largest)
    assert exponent >= 3
    # Up to largest's own significand nothing is carried into the exponent.
    carry = (1 << 24) - 1 - math.floor(significand * (1 << 24))
    return jnp.maximum(((magnitude + carry) >> 23) - (exponent - 1), 1)


def scale_of(exponent: jax.Array) -> jax.Array:
    """Returns the scale of an exponent byte (int32): 0 for 0."""
    return float_of(exponent << 23)


def inverse_scale_of(exponent: jax.Array) -> jax.Array:
    """Returns the inverse of the scale of an exponent byte (int32, 1 to 253)."""
    return float_of((254 - exponent) << 23)
