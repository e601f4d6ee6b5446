"""Sums in rank order, which no compiler reorders."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

_UNROLLED_RANKS = 16
"""Sums of more terms are a scan, so that programs stay small."""


def rank_sum(
    terms: jax.Array, value_of: Callable[[jax.Array], jax.Array] = lambda term: term
) -> jax.Array:
    """Returns ``((x0 + x1) + x2) + ...`` over the leading dimension.

    The order is written out, since the compiler's own is not always the same.

    Args:
      terms: one a rank.
      value_of: what is added of each, made when its turn comes; the sum has its dtype.

    >>> import jax.numpy as jnp
    >>> print(rank_sum(jnp.array([[1e8], [1.0], [-1e8]])))
    [0.]
    """
    total = value_of(terms[0])
    if terms.shape[0] > _UNROLLED_RANKS:
        return lax.scan(lambda s, term: (s + value_of(term), None), total, terms[1:])[0]
    for rank in range(1, terms.shape[0]):
        total = total + value_of(terms[rank])
    return total
