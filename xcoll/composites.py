"""Collectives that jax.lax lacks: how they are called on one array, and what the pass sees.

MPI's meaning, stated for programs that all ranks run alike: a rank that MPI leaves without a result
holds **zeros** of the result's shape and dtype. That makes every one of these a function of the
values of all ranks, with a derivative, and the linear ones transposes of each other.

| function | rank ``root`` | other ranks |
| --- | --- | --- |
| `bind_pprod` | the product over all ranks | the same |
| `bind_preduce` | the sum, maximum, minimum or product over all ranks | zeros |
| `bind_pgather` | the ranks' arrays, in rank order | zeros of that shape |
| `bind_pscatter` | slice ``root`` of its own array | slice ``rank`` of the root's array |
| `bind_pbroadcast` | its own array | the root's array |

Ranks are numbered row-major over ``axes``. Where varying-axes types are checked, operands are cast
to vary over the axes, as jax.lax's collectives do; a product is then invariant over them, and all
other results vary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

# Imported for what they register: lowerings, derivatives, batching.
from xcoll import composite_native as _native
from xcoll import composite_rules as _rules
from xcoll.composite_types import (
    Axes,
    check_axes,
    pbroadcast_p,
    pgather_p,
    pprod_p,
    preduce_p,
    pscatter_p,
    vary,
)
from xcoll.errors import unknown

REDUCE_OPS = tuple(_native.ALL_REDUCE)
"""What `bind_preduce` can combine with."""

assert set(REDUCE_OPS) == set(_rules.LOCAL_REDUCE)


@dataclass(frozen=True)
class Composite:
    """How the pass reads an equation of one of these primitives.

    Attributes:
      call: name of the public function.
      collective: the schedules' name.
      combines: op of the combination; None where the parameter ``op`` says it.
    """

    call: str
    collective: str
    combines: str | None = "none"

    def name(self, params: Mapping[str, Any]) -> str:
        """Returns the public name of an equation with these parameters."""
        return self.call

    def op(self, params: Mapping[str, Any]) -> str:
        """Returns how the equation combines: sum, max, min, prod or none."""
        return params["op"] if self.combines is None else self.combines


COMPOSITES: Mapping[core.Primitive, Composite] = MappingProxyType(
    {
        pprod_p: Composite("pprod", "all_reduce", "prod"),
        preduce_p: Composite("preduce", "reduce", None),
        pgather_p: Composite("pgather", "gather"),
        pscatter_p: Composite("pscatter", "scatter"),
        pbroadcast_p: Composite("pbroadcast", "broadcast"),
    }
)
"""All have the parameter ``axes``, a tuple; those with a root, the parameter ``root``."""


def bind_pprod(x: Any, axes: Axes) -> Any:
    """Multiplies over all ranks.

    Differentiable, also where factors are zero.

    Args:
      x: per-shard array of numbers.
      axes: axis names, each once.

    Returns:
      ``x0 * x1 * ...`` of the shape and dtype of ``x``, the same on all ranks. Accumulated in the
      dtype of ``x``, in XLA's order.

    Raises:
      UnknownAxisError: an axis is not bound.

    Example:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> f = jax.shard_map(
      ...     lambda x: bind_pprod(x, ("x",)), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()
      ... )
      >>> print(f(jnp.array([1, 2, 3, 4])))
      [24]
    """
    check_axes("pprod", axes)
    return pprod_p.bind(vary(x, axes), axes=axes)


def bind_preduce(x: Any, axes: Axes, root: int, op: str = "sum") -> Any:
    """Reduces over all ranks, to one.

    Differentiable for sum and prod.

    Args:
      x: per-shard array of numbers.
      axes: axis names, each once.
      root: the rank that gets the result.
      op: one of `REDUCE_OPS`.

    Returns:
      On ``root`` the reduction, elsewhere zeros; of the shape and dtype of ``x``, accumulated in
      that dtype. Of NaN, max and min make what `jax.lax.pmax` makes of it on the platform.

    Raises:
      UnknownAxisError: an axis is not bound.
      ValueError: ``root`` is out of range, or ``op`` is unknown.
    """
    root = check_root("preduce", root, axes)
    if op not in REDUCE_OPS:
        raise ValueError(unknown("preduce", "op", op, REDUCE_OPS))
    return preduce_p.bind(vary(x, axes), axes=axes, root=root, op=op)


def bind_pbroadcast(x: Any, axes: Axes, source: Any) -> Any:
    """Sends the array of one rank to all.

    Exact bit for bit, on every platform.

    Args:
      x: per-shard array.
      axes: axis names, each once.
      source: the rank whose array is sent; or, as in `jax.lax.pbroadcast`, a traced scalar of an
        integer dtype: an all-gather and a choice, which does not check the rank.

    Returns:
      The array of ``source``, on all ranks.

    Raises:
      UnknownAxisError: an axis is not bound.
      ValueError: ``source`` is out of range.
    """
    if isinstance(source, jax.core.Tracer):
        if source.shape != () or not jnp.issubdtype(source.dtype, jnp.integer):
            raise TypeError(
                f"pbroadcast: source is a traced {source.dtype}{list(source.shape)}; it must be an"
                " integer, or a traced scalar of an integer dtype"
            )
        # A gather and a choice: linear, exact, and differentiated by jax itself.
        check_axes("pbroadcast", axes)
        return lax.all_gather(vary(x, axes), axes)[source]
    root = check_root("pbroadcast", source, axes, "source")
    return pbroadcast_p.bind(vary(x, axes), axes=axes, root=root)


def bind_pgather(x: Any, axes: Axes, root: int, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gathers the arrays of all ranks on one.

    Args:
      x: per-shard array.
      axes: axis names, each once.
      root: the rank that gets the result.
      axis: the new dimension that numbers the ranks; with ``tiled``, the existing dimension along
        which they are concatenated.
      tiled: as in `jax.lax.all_gather`.

    Returns:
      On ``root`` what `jax.lax.all_gather` returns, elsewhere zeros of that shape.

    Raises:
      UnknownAxisError: an axis is not bound.
      ValueError: ``root`` or ``axis`` is out of range.
    """
    root = check_root("pgather", root, axes)
    axis = check_dimension("pgather", axis, jnp.ndim(x) + (not tiled))
    out = jnp.moveaxis(pgather_p.bind(vary(x, axes), axes=axes, root=root), 0, axis)
    if tiled:
        shape = jnp.shape(x)
        out = out.reshape(*shape[:axis], out.shape[axis] * shape[axis], *shape[axis + 1 :])
    return out


def bind_pscatter(x: Any, axes: Axes, root: int, *, axis: int = 0, tiled: bool = False) -> Any:
    """Sends a slice of the array of one rank to each rank.

    Args:
      x: per-shard array; only that of ``root`` matters, but all have its shape.
      axes: axis names, each once.
      root: the rank whose array is cut.
      axis: the dimension that is cut, of as many elements as there are ranks; with ``tiled``, of
        a multiple of that.
      tiled: keep the cut dimension, as in `jax.lax.psum_scatter`.

    Returns:
      Slice ``rank`` of the root's array: without the cut dimension, or with ``tiled`` with a
      ``num_ranks``-th of it.

    Raises:
      UnknownAxisError: an axis is not bound.
      ValueError: ``root`` or ``axis`` is out of range, or the dimension does not divide.
    """
    root = check_root("pscatter", root, axes)
    axis = check_dimension("pscatter", axis, jnp.ndim(x))
    num_ranks = lax.axis_size(axes)
    shape = jnp.shape(x)
    if tiled:
        if shape[axis] % num_ranks:
            raise ValueError(
                f"pscatter(tiled=True): dimension {axis} of shape {shape} has {shape[axis]}"
                f" elements; it must be a multiple of the {num_ranks} ranks over {axes}"
            )
        share = shape[axis] // num_ranks
        x = jnp.reshape(x, (*shape[:axis], num_ranks, share, *shape[axis + 1 :]))
    elif shape[axis] != num_ranks:
        raise ValueError(
            f"pscatter(tiled=False): dimension {axis} of shape {shape} has {shape[axis]} elements;"
            f" it must have one for each of the {num_ranks} ranks over {axes}, or pass tiled=True"
        )
    return pscatter_p.bind(vary(jnp.moveaxis(x, axis, 0), axes), axes=axes, root=root)


def check_root(call: str, root: Any, axes: Axes, argument: str = "root") -> int:
    """Returns ``root`` as a Python integer.

    Raises:
      UnknownAxisError: an axis is not bound.
      TypeError: it is no integer.
      ValueError: it is no rank over ``axes``.
    """
    check_axes(call, axes)
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(
            f"{call}({argument}={root!r}): must be an integer, the same on all ranks"
        ) from None
    num_ranks = math.prod(lax.axis_size(a) for a in axes)
    if not 0 <= rank < num_ranks:
        raise ValueError(
            f"{call}({argument}={rank}): out of range; there are {num_ranks} ranks over {axes},"
            f" 0 to {num_ranks - 1}"
        )
    return rank


def check_dimension(call: str, axis: int, ndim: int) -> int:
    """Returns ``axis`` counted from the front.

    Raises:
      ValueError: it is out of range.
    """
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{call}(axis={axis}): out of range for {ndim} dimensions, {-ndim} to {ndim - 1}"
        )
    return axis % ndim
