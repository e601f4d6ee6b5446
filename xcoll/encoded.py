"""Runs the stages of plans whose payload travels through a codec."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from xcoll.plan import Request
from xcoll.ranks import Ranks
from xcoll.schedule import Repeat
from xcoll.wire import Wire


def hops_on(step: Repeat) -> bool:
    """Whether what a rank receives in one iteration is what it sends in the next, summed up."""
    if step.count < 1 or len(step.body) > 1:
        return False
    for lane in step.body[0].lanes:
        send, recv = lane.send, lane.recv
        alike = replace(send, start=()) == replace(recv, start=())
        ranks = range(len(send.start))
        if not (lane.reduce and alike and not lane.active and len(lane.pairs) == len(ranks)):
            return False
        if any(recv.first(rank, 0) != send.first(rank, 1) for rank in ranks):
            return False
    return True


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
