"""Reading and writing slots of a buffer at positions that depend on the rank."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll.schedule import Slots


def lookup(table: Sequence[int], rank: jax.Array) -> int | jax.Array:
    """Returns ``table[rank]``: an int where it is the same for all ranks."""
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(np.array(table, np.int32))[rank]


def affine_lookup(table: Sequence[int], modulus: int, rank: jax.Array) -> int | jax.Array:
    """Returns ``table[rank]``, as arithmetic where the table is linear in the rank."""
    if len(set(table)) == 1:
        return table[0]
    for slope in (1, -1):
        if all(v == (table[0] + slope * r) % modulus for r, v in enumerate(table)):
            if len(table) > modulus + 1:
                break
            value = table[0] + slope * rank
            if slope == 1:
                return jnp.where(value >= modulus, value - modulus, value)
            return jnp.where(value < 0, value + modulus, value)
    return lookup(table, rank)


def _is_run(pattern: tuple[int, ...]) -> bool:
    return pattern == tuple(range(pattern[0], pattern[0] + len(pattern)))


def take_slots(buffer: jax.Array, slots: Slots, first: int | jax.Array) -> jax.Array:
    """Returns the slots of a pattern, counted from ``first``: ``(count, *slot)``."""
    if _is_run(slots.pattern):
        start, count = first + slots.pattern[0], slots.count
        if isinstance(start, int):
            return lax.slice_in_dim(buffer, start, start + count)
        return lax.dynamic_slice_in_dim(buffer, start, count)
    return buffer[jnp.asarray(np.array(slots.pattern, np.int32)) + first]


def put_slots(buffer: jax.Array, new: jax.Array, slots: Slots, first: int | jax.Array) -> jax.Array:
    """Returns the buffer with the slots of a pattern, counted from ``first``, replaced."""
    if slots.count == buffer.shape[0] and first == 0 and _is_run(slots.pattern):
        return new
    if _is_run(slots.pattern):
        return lax.dynamic_update_slice_in_dim(buffer, new, first + slots.pattern[0], 0)
    return buffer.at[jnp.asarray(np.array(slots.pattern, np.int32)) + first].set(new)
