"""Top-k: the largest elements, with their indices on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from xcoll.gradients.channel import Channel
from xcoll.gradients.checks import check_feedback
from xcoll.gradients.compressor import Compressor, Reduced
from xcoll.gradients.fractions import check_fraction
from xcoll.gradients.layout import Layout
from xcoll.gradients.leaves import as_varying, varying_axes
from xcoll.gradients.sparse import Sparse, spread, taken


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """Sends the elements of largest magnitude, each rank its own."""

    def reduce(
        self,
        x: jax.Array,
        carried: jax.Array | None,
        factors: tuple[jax.Array, ...],
        layout: Layout,
        channel: Channel,
    ) -> Reduced:
        """Sums what the ranks send, in rank order."""
        del carried, factors
        _, indices = lax.top_k(jnp.abs(x), self.count(layout))
        values = taken(x, indices)
        bits = lax.bitcast_convert_type(values, jnp.int32)
        # One collective, of integers, which no lossy policy around the step can touch.
        received = channel.all_gather(jnp.stack([bits, indices.astype(jnp.int32)]))
        all_values = lax.bitcast_convert_type(received[:, 0], jnp.float32)

        def add(total: jax.Array, sent: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total.at[sent[1]].add(sent[0], unique_indices=True), None

        nothing = as_varying(jnp.zeros(layout.padded, jnp.float32), varying_axes(received))
        total, _ = lax.scan(add, nothing, (all_values, received[:, 1]))
        total = jnp.where(jnp.isfinite(all_values).all(), total, jnp.nan)
        return Reduced(total, spread(values, indices, layout))


def top_k(fraction: float, *, feedback: bool = True) -> Compressor:
    """Sends the elements of largest magnitude, with their indices.

    Each rank picks ``ceil(fraction * elements)`` of a bucket by magnitude, its residual included,
    and sends float32 values and int32 indices to all (one all-gather, 8 bytes an element); all add
    them up in float32 in rank order. What is not sent is the residual. A value that is not finite
    makes its whole bucket NaN, and all residuals stay as they were.

    Args:
      fraction: part of the elements that is sent, in (0, 1].
      feedback: False drops what is not sent.

    Returns:
      A compressor for `xcoll.gradients.sync`.

    Raises:
      ValueError: ``fraction`` is outside (0, 1].
      TypeError: an argument is of a wrong type.

    Example:
      >>> top_k(0.01).fraction
      0.01

    References:
      Lin et al., "Deep Gradient Compression", 2018; Stich et al., "Sparsified SGD with Memory",
      2018.
    """
    check_feedback("top_k", feedback)
    return TopK(fraction=check_fraction("top_k", fraction), feedback=feedback)
