"""What every compressor is: a reduction that sends less, and remembers what it did not send."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xcoll.gradients.channel import Channel
from xcoll.gradients.layout import Layout
from xcoll.gradients.per_rank import PerRank, for_all_ranks, zeros_for_all_ranks


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Feedback:
    """The state of one compressed bucket.

    Attributes:
      contributed: what each rank has not sent of its own contributions: float32, per rank
        ``(layout.padded,)``. None without feedback.
      reduced: what each rank has not sent of the sums it owns: float32, per rank
        ``(layout.share,)``. None where sums are not encoded again.
      factors: further state that is no residual, such as PowerSGD's factors: the same on all ranks
        that are compressed over.
      layout: how the bucket lies on the ranks.
    """

    contributed: PerRank | None
    reduced: PerRank | None
    factors: tuple[PerRank, ...]
    layout: Layout = field(metadata={"static": True})


class Reduced(NamedTuple):
    """What `Compressor.reduce` returns.

    Attributes:
      total: the sum as all ranks know it, float32 ``(padded,)``; not finite where an input was not.
      sent: what this rank's part in it was, float32 ``(padded,)``.
      carried: what is left of this rank's share, float32 ``(share,)``, or None.
      factors: the factors of the next step.
    """

    total: jax.Array
    sent: jax.Array
    carried: jax.Array | None = None
    factors: tuple[jax.Array, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """A stateful compression of gradients, for `xcoll.gradients.sync`.

    With ``x`` what a rank contributes in a step (divided by the number of ranks where the mean is
    taken), ``r`` its residual and ``y`` what all ranks apply, a compressor with feedback keeps

        ``y + sum over ranks of r' = sum over ranks of (x + r)``

    up to roundings in float32, for any number of steps: what is not sent now is sent later. Where
    ``y`` is not finite, all residuals stay as they were. Sums are made in float32. Over a single
    rank nothing is sent, and the result is exact.

    A subclass is a frozen dataclass that defines `reduce`.

    Attributes:
      feedback: whether what was not sent is kept and added in the next step.
      by_rows: whether leaves are kept apart, as matrices cut by rows.
    """

    feedback: bool = True
    by_rows = False

    @property
    def block(self) -> int:
        """Elements that a rank's share is a multiple of; 0 where sums are not encoded again."""
        return 0

    def takes(self, shape: tuple[int, ...], num_shards: int) -> bool:
        """Returns whether a leaf, cut into shards, is compressed; others are reduced exactly."""
        del shape, num_shards
        return True

    def initial_factors(self, layout: Layout, key: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the first step's factors, the same on all ranks."""
        del layout, key
        return ()

    def reduce(
        self,
        x: jax.Array,
        carried: jax.Array | None,
        factors: tuple[jax.Array, ...],
        layout: Layout,
        channel: Channel,
    ) -> Reduced:
        """Sums over ranks, sending less than all.

        Args:
          x: float32 ``(layout.padded,)``: this rank's contribution and its residual.
          carried: float32 ``(layout.share,)`` to add to the sum of this rank's share, or None.
          factors: the factors of the state.
          layout: how the bucket lies on the ranks.
          channel: the ranks.
        """
        raise NotImplementedError

    def init(
        self, layout: Layout, key: jax.Array, *, inside: bool = True, mesh: Any = None
    ) -> Feedback:
        """Returns the state of a bucket of which nothing has been sent.

        Args:
          layout: how the bucket lies on the ranks.
          key: PRNG key of the first factors, the same on all ranks.
          inside: whether this is inside `jax.shard_map`; the state is then one rank's.
          mesh: outside, where to place the arrays.
        """

        def residual(elements: int) -> PerRank:
            return zeros_for_all_ranks((elements,), layout.axes, inside, mesh)

        alike = tuple((a, n) for a, n in layout.axes if a not in layout.compressed)
        return Feedback(
            contributed=residual(layout.padded) if self.feedback else None,
            reduced=residual(layout.share) if self.feedback and layout.block else None,
            factors=tuple(
                for_all_ranks(f, alike, inside, mesh) for f in self.initial_factors(layout, key)
            ),
            layout=layout,
        )

    def apply(self, x: jax.Array, state: Feedback, channel: Channel) -> tuple[jax.Array, Feedback]:
        """Reduces one shard over the ranks of a channel.

        Args:
          x: float32 ``(layout.width,)``, this rank's contribution.
          state: the bucket's state, inside `jax.shard_map`.
          channel: the ranks.

        Returns:
          The sum, float32 ``(layout.width,)``, the same bits on all ranks of the channel and
          representable in its dtype; and the next state.
        """
        layout = state.layout
        before = jnp.pad(x, (0, layout.padded - layout.width))
        residual = None if state.contributed is None else state.contributed.own
        if residual is not None:
            # The very same sum is sent and subtracted from.
            before = lax.optimization_barrier(before + residual)
        carried = None if state.reduced is None else state.reduced.own
        if channel.num_ranks == 1:
            step = _alone(before, carried, tuple(f.own for f in state.factors), channel)
        else:
            step = self.reduce(
                before, carried, tuple(f.own for f in state.factors), layout, channel
            )
        total = channel.rounded(step.total)
        is_good = jnp.isfinite(total)
        if residual is not None:
            assert state.contributed is not None
            # What a code makes of the padding was nobody's contribution.
            left = jnp.where(jnp.arange(layout.padded) < layout.width, before - step.sent, 0)
            if step.carried is None:
                left = left + (step.total - total) / channel.num_ranks
            state = replace(
                state,
                contributed=state.contributed.replaced(jnp.where(is_good, left, residual)),
            )
        if step.carried is not None:
            assert state.reduced is not None and carried is not None
            start = 0 if channel.num_ranks == 1 else channel.rank() * layout.share
            mine = lax.dynamic_slice_in_dim(is_good, start, layout.share)
            state = replace(
                state, reduced=state.reduced.replaced(jnp.where(mine, step.carried, carried))
            )
        factors = tuple(
            old.replaced(new) for old, new in zip(state.factors, step.factors, strict=True)
        )
        return total[: layout.width], replace(state, factors=factors)


def _alone(
    x: jax.Array, carried: jax.Array | None, factors: tuple[jax.Array, ...], channel: Channel
) -> Reduced:
    """Reduces over one rank: all that is there, and nothing is left."""
    total = x if carried is None else x + carried
    # For the type: the sum over ranks does not vary over them.
    total = lax.psum(total, channel.axes)
    rounding = total - channel.rounded(total)
    return Reduced(total, x, None if carried is None else rounding, factors)
