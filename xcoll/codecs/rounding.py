"""Rounding to integers, to nearest or by chance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ROUNDINGS = ("nearest", "stochastic")


def rounded(v: jax.Array, rounding: str, key: jax.Array | None) -> jax.Array:
    """Returns float32 values rounded to integers.

    Stochastic rounding goes up with a chance of ``v - floor(v)``: it never leaves the two integers
    around ``v``, and its mean is ``v`` but for ``2 ** -23``, the grid of the random numbers.

    Args:
      v: float32 of any shape, of magnitude under ``2 ** 31``.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``.
      key: PRNG key of stochastic rounding.

    Returns:
      float32 of the same shape.
    """
    if rounding == "nearest":
        return lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN)
    assert key is not None
    below = jnp.floor(v)
    goes_up = jax.random.uniform(key, v.shape, jnp.float32) < v - below
    return below + goes_up.astype(jnp.float32)
