"""Random-k: the same random elements on all ranks, so that no index is sent."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xcoll import collectives
from xcoll.gradients.channel import Channel
from xcoll.gradients.compressor import Compressor, Reduced
from xcoll.gradients.fractions import check_fraction, num_chosen
from xcoll.gradients.layout import Layout
from xcoll.gradients.two_shot import check_feedback
from xcoll.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Sends random elements, the same ones on all ranks.

    Attributes:
      fraction: part of a bucket (of its shard, under a hierarchy) that is sent.
    """

    fraction: float

    def reduce(
        self,
        x: jax.Array,
        carried: jax.Array | None,
        factors: tuple[jax.Array, ...],
        layout: Layout,
        channel: Channel,
    ) -> Reduced:
        """Sums the drawn elements over ranks."""
        del carried, factors
        count = num_chosen(self.fraction, layout.width)
        starts, sizes = strata(layout.width, count)
        indices = starts + jax.random.randint(channel.key, (count,), 0, sizes)
        # What is not finite may not be among the drawn; then the whole bucket says so.
        values = jnp.where(jnp.isfinite(x).all(), x[indices], jnp.nan)
        # Native, so that no lossy policy around the step compresses it once more.
        sums = collectives.psum(values, channel.axes, policy=Policy.native())
        is_good = jnp.isfinite(sums).all()
        if not self.feedback:
            sums = sums * sizes.astype(jnp.float32)
        total = jnp.zeros(layout.padded, jnp.float32).at[indices].set(sums, unique_indices=True)
        sent = jnp.zeros(layout.padded, jnp.float32).at[indices].set(values, unique_indices=True)
        return Reduced(jnp.where(is_good, total, jnp.nan), sent)


def strata(elements: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns starts and sizes, int32, of ``count`` contiguous parts whose sizes differ by one.

    One element drawn from each is a sample without repetition in which every element is equally
    likely, without sorting the whole bucket.

    >>> starts, sizes = strata(7, 3)
    >>> print(starts, sizes)
    [0 3 5] [3 2 2]
    """
    size, longer = divmod(elements, count)
    numbers = jnp.arange(count, dtype=jnp.int32)
    return numbers * size + jnp.minimum(numbers, longer), size + (numbers < longer)


def random_k(fraction: float, *, feedback: bool = True) -> Compressor:
    """Sends random elements, the same ones on all ranks.

    A bucket is cut into ``ceil(fraction * elements)`` parts and one element of each is drawn, from
    ``sync``'s seed, the step and the bucket. All ranks draw alike, so no index travels: one
    all-reduce of float32 values. What is not drawn is the residual. A value that is not finite
    makes its whole bucket NaN, and all residuals stay as they were.

    Args:
      fraction: part of the elements that is sent, in (0, 1].
      feedback: False drops what is not drawn, and scales what is by the size of its part, so that
        the result is unbiased.

    Returns:
      A compressor for `xcoll.gradients.sync`.

    Raises:
      ValueError: ``fraction`` is outside (0, 1].
      TypeError: an argument is of a wrong type.

    Example:
      >>> random_k(0.5, feedback=False).feedback
      False

    References:
      Stich et al., "Sparsified SGD with Memory", 2018.
    """
    check_feedback("random_k", feedback)
    return RandomK(fraction=check_fraction("random_k", fraction), feedback=feedback)
