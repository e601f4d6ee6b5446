"""Differentiation and batching of the collectives that jax.lax lacks.

The linear ones are closed under transposition, as maps of the values of all ranks:
``preduce(sum)ᵀ = pbroadcast`` and ``pgatherᵀ = pscatter``, and the other way round. A
product has the derivative ``sum over ranks of t_r * (product of the other ranks' x)``, which
divides by nothing and so holds at zeros too.

Under `jax.vmap` over one of the axes, the ranks of that axis are elements of one array: the part
over that axis becomes local, and the collective goes on over the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching

from xcoll.composite_types import (
    Axes,
    pbroadcast_p,
    pgather_p,
    pprod_p,
    preduce_p,
    pscatter_p,
    vary,
)
from xcoll.errors import UnsupportedError

LOCAL_REDUCE: dict[str, Callable[..., Any]] = {
    "sum": lax.reduce_sum,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
}
"""The reduction over array dimensions that goes with each op."""

_OF_EQUALS: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda x, count: x * jnp.asarray(count).astype(x.dtype),
    "max": lambda x, count: x,
    "min": lambda x, count: x,
    "prod": lambda x, count: lax.integer_pow(x, count),
}
"""The reduction of ``count`` equal values."""


# Differentiation


def _product_of_others(x: Any, axes: Axes) -> Any:
    """Returns, on each rank, the product of ``x`` over all other ranks."""
    num_ranks = lax.axis_size(axes)
    every = vary(x, axes)
    for axis in reversed(axes):  # one at a time: vmap knows no other way over its own axis
        every = lax.all_gather(every, axis)
    every = every.reshape(num_ranks, *x.shape)
    own = lax.broadcasted_iota(jnp.int32, every.shape, 0) == lax.axis_index(axes)
    return jnp.prod(jnp.where(own, jnp.ones_like(every), every), axis=0, dtype=x.dtype)


def _zero(y: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _pprod_jvp(primals: Any, tangents: Any, *, axes: Axes) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = pprod_p.bind(x, axes=axes)
    if type(t) is ad.Zero:
        return y, _zero(y)
    return y, lax.psum(t * _product_of_others(x, axes), axes)


def _preduce_jvp(primals: Any, tangents: Any, *, axes: Axes, root: int, op: str) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = preduce_p.bind(x, axes=axes, root=root, op=op)
    if type(t) is ad.Zero:
        return y, _zero(y)
    if op == "prod":
        t = t * _product_of_others(x, axes)
    elif op != "sum":
        raise UnsupportedError(
            f"preduce(op={op!r}): has no derivative, as jax.lax.p{op} has none; reduce"
            " jax.lax.stop_gradient(x), or differentiate around it with jax.custom_jvp"
        )
    return y, preduce_p.bind(vary(t, axes), axes=axes, root=root, op="sum")


def _preduce_transpose(ct: Any, x: Any, *, axes: Axes, root: int, op: str) -> list[Any]:
    assert op == "sum", op
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval.to_ct_aval())]
    return [pbroadcast_p.bind(vary(ct, axes), axes=axes, root=root)]


ad.primitive_jvps[pprod_p] = _pprod_jvp
ad.primitive_jvps[preduce_p] = _preduce_jvp
ad.primitive_transposes[preduce_p] = _preduce_transpose
ad.deflinear2(
    pbroadcast_p,
    lambda ct, x, *, axes, root: [preduce_p.bind(vary(ct, axes), axes=axes, root=root, op="sum")],
)
ad.deflinear2(
    pgather_p,
    lambda ct, x, *, axes, root: [pscatter_p.bind(vary(ct, axes), axes=axes, root=root)],
)
ad.deflinear2(
    pscatter_p,
    lambda ct, x, *, axes, root: [pgather_p.bind(vary(ct, axes), axes=axes, root=root)],
)


# Batching


def _without(axes: Axes, name: Any, size: int, root: int) -> tuple[Axes, int, int]:
    """Splits ``root`` into its digit along axis ``name`` and its rank over the other axes.

    Returns:
      The other axes, the root's rank over them, the root's digit.
    """
    rest = tuple(a for a in axes if a != name)
    sizes = [size if a == name else lax.axis_size(a) for a in axes]
    digits = []
    for n in reversed(sizes):
        digits.append(root % n)
        root //= n
    digits.reverse()
    rest_root = 0
    for a, n, digit in zip(axes, sizes, digits, strict=True):
        if a != name:
            rest_root = rest_root * n + digit
    return rest, rest_root, digits[axes.index(name)]


def _only_at(x: Any, size: int, digit: int) -> Any:
    """Returns a new leading dimension of zeros, with ``x`` at index ``digit``."""
    shape = (size, *x.shape)
    here = lax.broadcasted_iota(jnp.int32, shape, 0) == digit
    return jnp.where(here, x[None], jnp.zeros((), x.dtype))


def _local(op: str, x: Any, dim: int | None, size: int) -> Any:
    return _OF_EQUALS[op](x, size) if dim is None else LOCAL_REDUCE[op](x, (dim,))


def _pprod_batch(axis: Any, args: Any, dims: Any, *, axes: Axes) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    if axis.name not in axes:
        return pprod_p.bind(x, axes=axes), dim
    x = _local("prod", x, dim, axis.size)
    rest = tuple(a for a in axes if a != axis.name)
    return (pprod_p.bind(x, axes=rest) if rest else x), None


def _preduce_batch(
    axis: Any, args: Any, dims: Any, *, axes: Axes, root: int, op: str
) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    if axis.name not in axes:
        return preduce_p.bind(x, axes=axes, root=root, op=op), dim
    rest, rest_root, digit = _without(axes, axis.name, axis.size, root)
    x = _local(op, x, dim, axis.size)
    if rest:
        x = preduce_p.bind(x, axes=rest, root=rest_root, op=op)
    return _only_at(x, axis.size, digit), 0


def _pbroadcast_batch(axis: Any, args: Any, dims: Any, *, axes: Axes, root: int) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    if axis.name not in axes:
        return pbroadcast_p.bind(x, axes=axes, root=root), dim
    rest, rest_root, digit = _without(axes, axis.name, axis.size, root)
    if dim is not None:
        x = lax.index_in_dim(x, digit, dim, keepdims=False)
    return (pbroadcast_p.bind(x, axes=rest, root=rest_root) if rest else x), None


def _pgather_batch(axis: Any, args: Any, dims: Any, *, axes: Axes, root: int) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    if axis.name not in axes:
        return pgather_p.bind(x, axes=axes, root=root), None if dim is None else dim + 1
    rest, rest_root, digit = _without(axes, axis.name, axis.size, root)
    x = _in_front(x, dim, axis.size)
    shape = x.shape[1:]
    if rest:
        x = pgather_p.bind(x, axes=rest, root=rest_root)
        x = x.reshape(*(lax.axis_size(a) for a in rest), axis.size, *shape)
        x = jnp.moveaxis(x, len(rest), axes.index(axis.name))
    return _only_at(x.reshape(_ranks(axes, axis), *shape), axis.size, digit), 0


def _pscatter_batch(axis: Any, args: Any, dims: Any, *, axes: Axes, root: int) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    if axis.name not in axes:
        if dim == 0:
            x, dim = jnp.moveaxis(x, 0, 1), 1
        return pscatter_p.bind(x, axes=axes, root=root), None if dim is None else dim - 1
    rest, rest_root, digit = _without(axes, axis.name, axis.size, root)
    if dim is not None:
        x = lax.index_in_dim(x, digit, dim, keepdims=False)
    if rest:
        shape = x.shape[1:]
        x = x.reshape(*(axis.size if a == axis.name else lax.axis_size(a) for a in axes), *shape)
        x = jnp.moveaxis(x, axes.index(axis.name), len(rest))
        x = x.reshape(_ranks(rest, axis), axis.size, *shape)
        x = pscatter_p.bind(x, axes=rest, root=rest_root)
    return x, 0


def _ranks(axes: Axes, axis: Any) -> int:
    return math.prod(axis.size if a == axis.name else lax.axis_size(a) for a in axes)


def _in_front(x: Any, dim: int | None, size: int) -> Any:
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


_BATCHING: dict[core.Primitive, Callable[..., Any]] = {
    pprod_p: _pprod_batch,
    preduce_p: _preduce_batch,
    pbroadcast_p: _pbroadcast_batch,
    pgather_p: _pgather_batch,
    pscatter_p: _pscatter_batch,
}
batching.fancy_primitive_batchers.update(_BATCHING)
