"""PowerSGD: matrices as products of two thin ones, found by a power iteration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from xcoll import collectives
from xcoll.gradients.buckets import flatten, unflatten
from xcoll.gradients.channel import Channel
from xcoll.gradients.checks import check_feedback
from xcoll.gradients.compressor import Compressor, Reduced
from xcoll.gradients.layout import Layout, matrix_shape
from xcoll.policy import Policy

_dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

_DEPENDENT = 1e-4
"""A column of which less than this remains, once earlier ones are taken out, is rounding noise."""


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Sends two thin factors of each matrix.

    Attributes:
      rank: columns of a factor.
    """

    rank: int
    by_rows = True

    def takes(self, shape: tuple[int, ...], num_shards: int) -> bool:
        """Returns whether a leaf is a matrix that its factors are smaller than."""
        rows, columns = matrix_shape(shape)
        rows = -(-rows // num_shards)
        return len(shape) >= 2 and self.rank * (rows + columns) < rows * columns

    def initial_factors(self, layout: Layout, key: jax.Array) -> tuple[jax.Array, ...]:
        """Returns normal random ``(columns, rank)`` for each matrix."""
        keys = jax.random.split(key, len(layout.parts))
        return tuple(
            jax.random.normal(key, (part[1], self.rank), jnp.float32)
            for key, part in zip(keys, layout.parts, strict=True)
        )

    def reduce(
        self,
        x: jax.Array,
        carried: jax.Array | None,
        factors: tuple[jax.Array, ...],
        layout: Layout,
        channel: Channel,
    ) -> Reduced:
        """Makes one step of the power iteration for all matrices, in two all-reduces."""
        del carried
        matrices = unflatten(x, layout.parts)
        left = [_dot(m, q) for m, q in zip(matrices, factors, strict=True)]
        left = _sums(left, channel, is_good=jnp.isfinite(x).all())
        bases = [orthonormal(p) for p in left]
        right = [_dot(m.T, p) for m, p in zip(matrices, bases, strict=True)]
        sums = _sums(right, channel)
        total = flatten([_dot(p, q.T) for p, q in zip(bases, sums, strict=True)])
        sent = flatten([_dot(p, q.T) for p, q in zip(bases, right, strict=True)])
        is_good = jnp.isfinite(flatten([*left, *sums])).all()
        new = tuple(
            jnp.where(is_good, _warm(q, old), old) for q, old in zip(sums, factors, strict=True)
        )
        return Reduced(jnp.where(is_good, total, jnp.nan), sent, factors=new)


def _sums(
    terms: list[jax.Array], channel: Channel, is_good: jax.Array | bool = True
) -> list[jax.Array]:
    flat = jnp.where(is_good, flatten(terms), jnp.nan)
    # Native, so that no lossy policy around the step compresses it once more.
    total = collectives.psum(flat, channel.axes, policy=Policy.native())
    return unflatten(total, [term.shape for term in terms])


def _warm(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the next step's factor: columns scaled to 1, or the old one where one is zero.

    A zero column would stay zero for ever, and unscaled ones shrink with the gradient's square.
    """
    largest = jnp.abs(new).max(0)
    return jnp.where(largest > 0, new / jnp.where(largest > 0, largest, 1), old)


def orthonormal(matrix: jax.Array) -> jax.Array:
    """Returns orthonormal columns that span those of ``float32[rows, rank]``.

    Gram-Schmidt, each column twice; a column that depends on earlier ones becomes zero. Written out
    rather than a library's QR, so that equal inputs give equal bits on every rank.

    >>> print((10 * orthonormal(jnp.array([[3.0, 3.0, 1.0], [4.0, 4.0, 0.0]]))).round())
    [[ 6.  0.  8.]
     [ 8.  0. -6.]]
    """
    done: list[jax.Array] = []
    for number in range(matrix.shape[1]):
        column = matrix[:, number]
        largest = jnp.abs(column).max()
        column = column / jnp.where(largest > 0, largest, 1)
        before = jnp.sqrt(jnp.sum(column**2))
        for _ in range(2):
            for other in done:
                column = column - jnp.sum(other * column) * other
        after = jnp.sqrt(jnp.sum(column**2))
        is_new = after > _DEPENDENT * before
        done.append(jnp.where(is_new, column / jnp.where(is_new, after, 1), 0))
    return jnp.stack(done, axis=1)


def powersgd(rank: int, *, feedback: bool = True) -> Compressor:
    """Sends matrices as products of two thin ones.

    Each leaf of two dimensions or more is taken as a matrix ``M`` (split where rows plus columns
    are fewest; under a hierarchy a rank has some of its rows). One step of a power iteration,
    warm-started with the last step's ``Q`` (the first is random, from ``sync``'s seed), gives
    ``P = orthonormal(sum of M Q)`` and ``Q = sum of M^T P``; all apply ``P Q^T``, of which a rank
    sent ``P (M^T P)^T``; the rest is its residual. Two all-reduces of float32, in all of
    ``rank * (rows + columns)`` elements; vectors, and matrices that this would not make smaller,
    are reduced exactly. A value that is not finite makes its whole bucket NaN; residuals and
    factors stay as they were.

    Args:
      rank: columns of the factors.
      feedback: False drops what the factors do not hold.

    Returns:
      A compressor for `xcoll.gradients.sync`.

    Raises:
      ValueError: ``rank`` is not positive.
      TypeError: an argument is of a wrong type.

    Example:
      >>> powersgd(4).takes((256, 1024), 1), powersgd(4).takes((256,), 1)
      (True, False)

    References:
      Vogels et al., "PowerSGD", 2019, algorithm 1.
    """
    check_feedback("powersgd", feedback)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"powersgd(rank={rank!r}): must be an integer")
    if rank < 1:
        raise ValueError(f"powersgd(rank={rank}): must be positive; 4 is a usual choice")
    return PowerSGD(rank=rank, feedback=feedback)
