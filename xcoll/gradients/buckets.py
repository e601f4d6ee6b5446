"""Buckets: which leaves travel in one collective."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xcoll.gradients.leaves import Leaf


def fill_buckets(
    leaves: Sequence[Leaf], positions: Sequence[int], axes: Sequence[str], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Groups leaves by dtype, in reverse order of use.

    The backward pass makes the gradients of the last parameters first, so buckets are filled from
    the last leaf to the first. A bucket holds one dtype, and leaves that vary over the same mesh
    axes besides ``axes``, and is closed before it would pass ``bucket_bytes``; a larger leaf has a
    bucket of its own.

    Args:
      leaves: all leaves of the tree.
      positions: those to group.
      axes: the axes to sum over.
      bucket_bytes: size of a bucket.

    Returns:
      Positions in each bucket, the first bucket to be complete first.

    Example:
      >>> leaves = [Leaf(name, (4,), "float32", frozenset()) for name in "abc"]
      >>> fill_buckets(leaves, [0, 1, 2], ("data",), 32)
      [(2, 1), (0,)]
    """
    is_open: dict[Hashable, tuple[list[int], int]] = {}
    done: list[tuple[int, ...]] = []
    for position in reversed(positions):
        leaf = leaves[position]
        num_bytes = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        key = (leaf.dtype, leaf.varying - set(axes))
        members, filled = is_open.get(key, ([], 0))
        if members and filled + num_bytes > bucket_bytes:
            done.append(tuple(members))
            members, filled = [], 0
        is_open[key] = ([*members, position], filled + num_bytes)
    # What is still open closes with its last member: the one used earliest.
    rest = sorted((m for m, _ in is_open.values()), key=lambda members: -members[-1])
    return done + [tuple(members) for members in rest]


def flatten(values: Sequence[Any]) -> jax.Array:
    """Puts arrays of one dtype side by side: ``(sum of elements,)``."""
    flat = [jnp.reshape(value, -1) for value in values]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def unflatten(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Takes what `flatten` made, or what lies behind it, apart again: one array a shape."""
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return parts
