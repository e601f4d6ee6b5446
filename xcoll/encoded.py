"""Runs the stages of plans whose payload travels through a codec."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xcoll.plan import Request, Stage
from xcoll.ranks import Ranks
from xcoll.wire import Wire


def permute(x: jax.Array, request: Request, ranks: Ranks, wire: Wire, slot: int) -> jax.Array:
    """Sends a payload along the request's pairs; who receives nothing gets zeros.

    Args:
      x: float32 ``(elements,)``.
      request: has the pairs.
      ranks: all ranks of the request.
      wire: the codec.
      slot: elements of the padded payload.
    """
    bits = wire.encode(jnp.pad(x, (0, slot - x.size))[None])
    arrived = ranks.permute(bits, request.pairs)
    return wire.decode(arrived, slot)[0, : x.size]


def fold(slots: jax.Array) -> jax.Array:
    """Returns the sum over the leading dimension, ``((x0 + x1) + x2) + ...``."""
    if len(slots) <= _UNROLL_MAX_RANKS:
        total = slots[0]
        for rank in range(1, len(slots)):
            total = total + slots[rank]
        return total
    return lax.scan(lambda s, x: (s + x, None), slots[0], slots[1:])[0]


_UNROLL_MAX_RANKS = 16


def two_shot(slots: jax.Array, ranks: Ranks, wire: Wire) -> jax.Array:
    """Sums over ranks: encode, exchange, decode and sum, encode, gather, decode.

    The owner of a slot encodes its sum, and all ranks, the owner too, decode those bits.

    Args:
      slots: float32 ``(num_ranks, elements)``.
      ranks: the ranks.
      wire: the codec.

    Returns:
      The sums, float32 ``(num_ranks, elements)``.
    """
    elements = slots.shape[1]
    contributions = ranks.all_to_all(wire.encode(slots))
    total = wire.reduce_and_encode(contributions, elements)
    return wire.decode(ranks.all_gather(total), elements)
