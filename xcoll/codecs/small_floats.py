"""Floats of few bits, put together and taken apart as integers.

A compiler may drop a conversion to a smaller float and back; backends flush different subnormal
numbers. With integers neither happens: the bits are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from xcoll_kernels import arithmetic

from xcoll.codecs.rounding import rounded


@dataclass(frozen=True)
class SmallFloat:
    """A format of floats.

    Attributes:
      significand_bits: stored bits of the significand.
      min_exponent: exponent of the smallest normal number.
      largest: the largest finite value.
      wire_dtype: integers of the same width.
    """

    significand_bits: int
    min_exponent: int
    largest: float
    wire_dtype: str

    @property
    def sign_bit(self) -> int:
        """The sign, in the bits of a value."""
        return 1 << (jnp.iinfo(self.wire_dtype).bits - 1)


FORMATS = {
    "float16": SmallFloat(10, -14, 65504.0, "uint16"),
    "float8_e4m3fn": SmallFloat(3, -6, 448.0, "int8"),
    "float8_e5m2": SmallFloat(2, -14, 57344.0, "int8"),
}
"""Formats whose range is short, so that they need a scale."""


def to_small(x: jax.Array, to: SmallFloat, rounding: str, key: jax.Array | None) -> jax.Array:
    """Returns the bits of float32 values rounded to a smaller format.

    Args:
      x: float32 of any shape, of magnitude ``to.largest`` at most.
      to: the format.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``.
      key: PRNG key of stochastic rounding.

    Returns:
      int32 of the same shape.
    """
    magnitude = arithmetic.magnitude_bits(x)
    # The exponent field of x, counted from the format's smallest: 0 for its subnormal numbers too.
    field = jnp.maximum((magnitude >> 23) - (127 + to.min_exponent), 0)
    # In units of the last place, the significand is an integer with its leading bit. Added to the
    # exponent field, that bit makes it one larger, which is how formats store normal numbers.
    unit = field + (127 + to.min_exponent - to.significand_bits)
    units = rounded(x * arithmetic.inverse_scale(unit), rounding, key)
    bits = (field << to.significand_bits) + jnp.abs(units).astype(jnp.int32)
    return jnp.where(x < 0, bits | to.sign_bit, bits)


def from_small(bits: jax.Array, of: SmallFloat) -> jax.Array:
    """Returns the float32 values of a smaller format's bits (int32), all of them finite."""
    magnitude = bits & (of.sign_bit - 1)
    field = jnp.maximum((magnitude >> of.significand_bits) - 1, 0)
    units = (magnitude - (field << of.significand_bits)).astype(jnp.float32)
    value = units * arithmetic.scale(field + (127 + of.min_exponent - of.significand_bits))
    return jnp.where(bits & of.sign_bit, -value, value)


def to_bfloat16(x: jax.Array, rounding: str, key: jax.Array | None) -> jax.Array:
    """Returns the bits of float32 values rounded to bfloat16.

    Subnormal numbers are zero. What is rounded to 2**128 gets the pattern of infinity.

    Args:
      x: finite float32 of any shape.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``.
      key: PRNG key of stochastic rounding.

    Returns:
      int32 of the same shape.
    """
    magnitude = arithmetic.magnitude_bits(arithmetic.flushed(x))
    if rounding == "nearest":
        carry = 0x7FFF + ((magnitude >> 16) & 1)
    else:
        assert key is not None
        carry = jax.random.bits(key, x.shape, "uint16").astype(jnp.int32)
    bits = (magnitude + carry) >> 16
    return jnp.where(jnp.signbit(x), bits | 0x8000, bits)
