"""Collectives beyond jax.lax, in its style: products, any op, and MPI's rooted ones.

MPI's meaning, stated for programs that all ranks run alike: a rank that MPI leaves without a
result holds zeros. Arguments and errors common to all are those of `xcoll.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xcoll import collectives
from xcoll.barriers import bind_barrier
from xcoll.calls import Axes, Call
from xcoll.composites import bind_pgather, bind_pprod, bind_preduce, bind_pscatter, check_root
from xcoll.errors import unknown
from xcoll.policy import Policy

OPS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""The operations of `all_reduce` and `preduce`."""

_LIKE = {
    "sum": "psum",
    "mean": "pmean",
    "max": "pmax",
    "min": "pmin",
    "prod": "pprod",
    "any": "pmax",
    "all": "pmin",
}
"""The collective that carries each operation out."""


def pprod(x: Any, axis_name: Axes, *, policy: Policy | None = None) -> Any:
    """Multiplies over ranks.

    Args:
      x: pytree of numbers or booleans (as int32), per shard.
      axis_name: mesh axis, or a tuple of them.
      policy: what xcoll may do.

    Returns:
      The products, replicated over the axes, rounded in the dtype of ``x`` at each factor.
      Differentiable, at zeros too.

    Example:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
      >>> f = jax.shard_map(
      ...     lambda x: pprod(x, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()
      ... )
      >>> print(f(jnp.array([1, 2, 3, 4])))
      [24]
    """
    call = Call("pprod", axis_name, policy)
    call.check_leaves(x, numbers=True)
    return call.run(lambda x: jax.tree.map(lambda v: bind_pprod(_number(v), call.axes), x), x)


def all_reduce(x: Any, axis_name: Axes, op: str = "sum", *, policy: Policy | None = None) -> Any:
    """Combines over ranks by any operation.

    Args:
      x: pytree of numbers or booleans, per shard.
      axis_name: mesh axis, or a tuple of them.
      op: one of `OPS`; ``any`` and ``all`` ask whether elements are non-zero, and return booleans.
      policy: what xcoll may do.

    Returns:
      The combination, replicated over the axes.

    Raises:
      ValueError: ``op`` is unknown; the valid ones are listed.
    """
    _check_op("all_reduce", op)
    call = Call("all_reduce", axis_name, policy, _LIKE[op])
    call.check_leaves(x, numbers=True)
    axes = call.axes
    by_op: dict[str, Callable[[Any], Any]] = {
        "sum": lambda v: lax.psum(v, axes),
        "mean": lambda v: collectives.in_wide(lambda w: lax.pmean(w, axes), v),
        "max": lambda v: lax.pmax(v, axes),
        "min": lambda v: lax.pmin(v, axes),
        "prod": lambda v: bind_pprod(_number(v), axes),
        "any": lambda v: lax.pmax(_flags(v), axes).astype(bool),
        "all": lambda v: lax.pmin(_flags(v), axes).astype(bool),
    }
    return call.run(lambda x: jax.tree.map(by_op[op], x), x)


def preduce(
    x: Any, axis_name: Axes, root: int = 0, op: str = "sum", *, policy: Policy | None = None
) -> Any:
    """Combines over ranks, to one of them (MPI_Reduce).

    Args:
      x: pytree of numbers or booleans, per shard.
      axis_name: mesh axis, or a tuple of them.
      root: the rank that gets the result.
      op: one of `OPS`.
      policy: what xcoll may do.

    Returns:
      On ``root`` the combination; on other ranks zeros (False for ``any`` and ``all``).

    Raises:
      ValueError: ``root`` is out of range or ``op`` unknown.
    """
    _check_op("preduce", op)
    call = Call("preduce", axis_name, policy)
    call.check_leaves(x, numbers=True)
    check_root("preduce", root, call.axes)

    def to_root(v: Any, op: str) -> Any:
        return bind_preduce(v, call.axes, root, op)

    def reduce(v: Any) -> Any:
        is_flag = op in ("any", "all") or (
            op in ("max", "min") and jnp.issubdtype(jnp.result_type(v), jnp.bool_)
        )
        if is_flag:
            return to_root(_flags(v), "max" if op in ("any", "max") else "min").astype(bool)
        if op == "mean":
            return collectives.in_wide(lambda w: to_root(w, "sum") / call.num_ranks, _number(v))
        return to_root(_number(v), op)

    return call.run(lambda x: jax.tree.map(reduce, x), x)


def pgather(
    x: Any,
    axis_name: Axes,
    root: int = 0,
    *,
    axis: int = 0,
    tiled: bool = False,
    policy: Policy | None = None,
) -> Any:
    """Gathers the ranks' arrays on one of them (MPI_Gather).

    Args:
      x: pytree of arrays, per shard.
      axis_name: mesh axis, or a tuple of them.
      root: the rank that gets the result.
      axis: as in `jax.lax.all_gather`.
      tiled: as in `jax.lax.all_gather`.
      policy: what xcoll may do.

    Returns:
      On ``root`` what `all_gather` returns; on other ranks zeros of that shape.

    Raises:
      ValueError: ``root`` or ``axis`` is out of range.
    """
    call = Call("pgather", axis_name, policy)
    call.check_leaves(x, plain=True)
    check_root("pgather", root, call.axes)
    call.check_dimension(x, axis, "axis", extra=0 if tiled else 1)
    return call.run(
        lambda x: jax.tree.map(
            lambda v: bind_pgather(jnp.asarray(v), call.axes, root, axis=axis, tiled=tiled), x
        ),
        x,
    )


def pscatter(
    x: Any,
    axis_name: Axes,
    root: int = 0,
    *,
    axis: int = 0,
    tiled: bool = False,
    policy: Policy | None = None,
) -> Any:
    """Sends each rank its slice of one rank's arrays (MPI_Scatter).

    Args:
      x: pytree of arrays, per shard; only the root's matter, but all have their shapes.
      axis_name: mesh axis, or a tuple of them.
      root: the rank whose arrays are cut.
      axis: the dimension that is cut, of one element a rank; with ``tiled`` of a multiple.
      tiled: keep the dimension.
      policy: what xcoll may do.

    Returns:
      Slice ``rank`` of the root's arrays; exact bit for bit.

    Raises:
      ValueError: ``root`` or ``axis`` is out of range, or the dimension does not divide.
    """
    call = Call("pscatter", axis_name, policy)
    call.check_leaves(x, plain=True)
    check_root("pscatter", root, call.axes)
    call.check_divides(x, axis, "axis", tiled, call.num_ranks)
    return call.run(
        lambda x: jax.tree.map(
            lambda v: bind_pscatter(jnp.asarray(v), call.axes, root, axis=axis, tiled=tiled), x
        ),
        x,
    )


def barrier(x: Any, axis_name: Axes, *, policy: Policy | None = None) -> Any:
    """Returns ``x`` once all ranks have computed theirs (MPI_Barrier, as a function of data).

    Args:
      x: pytree of arrays, per shard.
      axis_name: mesh axis, or a tuple of them.
      policy: accepted as everywhere; a barrier is always native.

    Returns:
      ``x``, bit for bit. What does not come from the returned arrays does not wait.
    """
    call = Call("barrier", axis_name, policy, "psum")
    call.check_leaves(x, plain=True)
    return bind_barrier(x, call.axes)


def _check_op(call: str, op: str) -> None:
    if op not in OPS:
        raise ValueError(unknown(f"{call}(op={op!r})", "op", op, OPS))


def _flags(v: Any) -> Any:
    """Returns where an array is non-zero, as integers that every backend can reduce."""
    return (jnp.asarray(v) != 0).astype(jnp.uint8)


def _number(v: Any) -> Any:
    """Returns an array of numbers: booleans as int32, as jax.lax.psum takes them."""
    v = jnp.asarray(v)
    return v.astype(jnp.int32) if v.dtype == bool else v
