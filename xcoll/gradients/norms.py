"""Clipping by the norm of gradients that are cut over mesh axes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xcoll import _compat
from xcoll.calls import Axes, check_axes
from xcoll.gradients.leaves import leaves_of
from xcoll.gradients.options import axis_names


def clip_by_global_norm(max_norm: float, *, axis_name: Axes) -> optax.GradientTransformation:
    """Scales gradients down to a global norm, where ranks hold different parts of them.

    For parameters that are cut over ``axis_name`` (FSDP, tensor parallelism): optax's own would
    clip every rank by its own part. After `sync`, where all ranks hold the same gradients, use
    `optax.clip_by_global_norm`.

    Squares are summed in float32, over a rank's elements and then over ranks (one scalar
    all-reduce). Under ``check_vma=True`` a leaf counts once for the axes that it does not vary
    over, being the same on all of their ranks; under ``check_vma=False`` that cannot be seen, and
    every leaf is taken to be cut over all of ``axis_name``: mask those that are not.

    Args:
      max_norm: the largest norm that stays as it is.
      axis_name: mesh axis, or a tuple of them.

    Returns:
      An `optax.GradientTransformation` without state, whose ``update`` is called inside
      `jax.shard_map`. Shapes and dtypes stay as they are. A gradient that is not finite makes NaN.

    Raises:
      ValueError: ``max_norm`` is not positive and finite.
      TypeError: an argument is of a wrong type, or a leaf is no array of numbers.

    Example:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> clip = clip_by_global_norm(1.0, axis_name="data")
      >>> clipped = jax.shard_map(
      ...     lambda g: clip.update(g, clip.init(g))[0],
      ...     mesh=mesh,
      ...     in_specs=jax.P("data"),
      ...     out_specs=jax.P("data"),
      ... )
      >>> print(clipped(jnp.array([1.0, 1.0, 1.0, 1.0])))
      [0.5 0.5 0.5 0.5]
    """
    axes = axis_names("clip_by_global_norm(axis_name", axis_name)
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
        raise TypeError(f"clip_by_global_norm(max_norm={max_norm!r}): must be a number")
    if not 0 < max_norm < math.inf:
        raise ValueError(f"clip_by_global_norm(max_norm={max_norm!r}): must be positive and finite")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        check_axes("clip_by_global_norm", axis_name)
        norm = jnp.sqrt(_sum_of_squares(updates, axes))
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)

        def scaled(leaf: Any) -> Any:
            return leaf if _is_nothing(leaf) else (leaf * factor).astype(jnp.result_type(leaf))

        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _sum_of_squares(updates: Any, axes: tuple[str, ...]) -> jax.Array:
    """Returns the sum over all elements of all ranks, the same on all of them."""
    parts: dict[tuple[str, ...], jax.Array] = {}
    leaves = leaves_of("clip_by_global_norm", updates)
    for leaf, value in zip(leaves, jax.tree.leaves(updates), strict=True):
        if leaf.is_nothing:
            continue
        cut = tuple(a for a in axes if a in leaf.varying) if _compat.checks_vma() else axes
        squares = jnp.sum(jnp.square(jnp.abs(value).astype(jnp.float32)))
        parts[cut] = parts.get(cut, jnp.float32(0)) + squares
    total = jnp.float32(0)
    for cut, part in parts.items():
        total = total + (jax.lax.psum(part, cut) if cut else part)
    return total


def _is_nothing(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0
