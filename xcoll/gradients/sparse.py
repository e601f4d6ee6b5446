"""What compressors have in common that send a few elements of a bucket."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xcoll.gradients.compressor import Compressor
from xcoll.gradients.fractions import num_chosen
from xcoll.gradients.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Sparse(Compressor):
    """Sends some of the elements.

    Attributes:
      fraction: part of a bucket (of its shard, under a hierarchy) that is sent.
    """

    fraction: float

    def count(self, layout: Layout) -> int:
        """Returns how many elements of a bucket are sent."""
        return num_chosen(self.fraction, layout.width)


def taken(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the chosen elements, float32.

    What is not finite may not be among them; then they are all NaN, and the whole bucket says so.
    """
    return jnp.where(jnp.isfinite(x).all(), x[indices], jnp.nan)


def spread(values: jax.Array, indices: jax.Array, layout: Layout) -> jax.Array:
    """Returns a bucket, float32 ``(layout.padded,)``, of the chosen elements and zeros."""
    return jnp.zeros(layout.padded, jnp.float32).at[indices].set(values, unique_indices=True)
