"""What a compressor sends through: the ranks that it compresses over."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class Channel:
    """The ranks of one compressed reduction, inside `jax.shard_map`.

    Attributes:
      axes: mesh axes that are compressed over.
      num_ranks: number of ranks over them.
      sync_axes: all axes of the reduction, the exact ones included.
      dtype: dtype that the result is rounded to in the end.
      key: PRNG key, the same on all ranks; another one for every step and bucket.
    """

    axes: tuple[str, ...]
    num_ranks: int
    sync_axes: tuple[str, ...]
    dtype: str
    key: jax.Array

    def rank_key(self, site: int) -> jax.Array:
        """Returns this rank's own key for its ``site``-th use in a step."""
        return jax.random.fold_in(
            jax.random.fold_in(self.key, site), lax.axis_index(self.sync_axes)
        )

    def rank(self) -> jax.Array:
        """Returns this rank's number, a traced int32 scalar."""
        return lax.axis_index(self.axes)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Sends row ``r`` of ``(num_ranks, ...)`` to rank ``r``; returns what all sent here."""
        axes = self.axes if len(self.axes) > 1 else self.axes[0]
        return lax.all_to_all(x, axes, 0, 0, tiled=True)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Returns the arrays of all ranks, ``(num_ranks, ...)``, the same on all of them."""
        return lax.all_gather(x, self.axes, to="invarying")

    def rounded(self, total: jax.Array) -> jax.Array:
        """Returns float32 values as they will be once rounded to the result's dtype."""
        if self.dtype == "float32":
            return total
        # Without the barrier a compiler may drop the conversion there and back.
        return lax.optimization_barrier(total.astype(self.dtype)).astype(jnp.float32)
