"""Random-k: the same random elements on all ranks, so that no index is sent."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xcoll import collectives
from xcoll.gradients.channel import Channel
from xcoll.gradients.checks import check_feedback
from xcoll.gradients.compressor import Compressor, Reduced
from xcoll.gradients.fractions import check_fraction
from xcoll.gradients.layout import Layout
from xcoll.gradients.sparse import Sparse, spread, taken
from xcoll.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RandomK(Sparse):
    """Sends random elements, the same ones on all ranks."""

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
        count = self.count(layout)
        starts, sizes = strata(layout.width, count)
        indices = starts + jax.random.randint(channel.key, (count,), 0, sizes)
        values = taken(x, indices)
        # Native, so that no lossy policy around the step compresses it once more.
        sums = collectives.psum(values, channel.axes, policy=Policy.native())
        is_good = jnp.isfinite(sums).all()
        if not self.feedback:
            sums = sums * sizes.astype(jnp.float32)
        total = jnp.where(is_good, spread(sums, indices, layout), jnp.nan)
        return Reduced(total, spread(values, indices, layout))


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
