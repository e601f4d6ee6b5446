"""Functional collectives with jax.lax's names, arguments and results, and a ``policy=``.

A call with a policy is a region of its own (`xcoll.primitives`): planned by itself when it is
lowered, and differentiated and batched as jax.lax's collective is. Arguments common to all:

* ``x``: a pytree of arrays, per shard. Leaves are carried together where they can be.
* ``axis_name``: a mesh axis or a tuple of them. Ranks are numbered row-major in that order.
* ``policy``: what xcoll may do. None leaves it to an `xcoll.optimize` around the call, which plans
  it together with its neighbours; without one it is XLA's own. With a policy, what its forced
  algorithm cannot do is an error.
* ``key`` (of the six that a codec can carry): what a codec that rounds at random draws from: one
  key, ``jax.random.key(seed)`` or the older two uint32, the same on all ranks, each of which folds
  its rank in. Several leaves draw from keys of their own. Without such a codec it is ignored.

All raise `UnknownAxisError` (a `NameError`, as jax's) for an unknown axis or outside
`jax.shard_map`, `ValueError` for a repeated axis, an algorithm that cannot do the collective, or
no key where the policy's codec needs one, and `TypeError` for a leaf that is no array (its path is
named), a policy of another type, or what is no key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll.calls import Axes, Call
from xcoll.composites import bind_pbroadcast
from xcoll.policy import Policy

Groups = Sequence[Sequence[int]] | None


def psum(
    x: Any,
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    policy: Policy | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Sums over ranks, as `jax.lax.psum`.

    Args:
      x: pytree of numbers or booleans (summed as int32), per shard.
      axis_name: mesh axis, or a tuple of them.
      axis_index_groups: as in jax.lax; the sum is then XLA's own.
      policy: what xcoll may do.
      key: a PRNG key, for a codec that rounds at random.

    Returns:
      The sums, replicated over the axes; shapes and dtypes of ``x``. Partial sums are rounded in
      that dtype. A float sum differs from the exact one by at most ``(n - 1) u Σ|x|`` (u: unit
      roundoff); integer sums are exact.

    Raises:
      TypeError: a leaf is no number (see the module for the rest).

    Example:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> total = jax.shard_map(
      ...     lambda x: psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
      ... )
      >>> print(total(jnp.arange(4.0)))
      [6.]
    """
    call = Call("psum", axis_name, policy, key=key, takes_key=True)
    call.check_leaves(x, numbers=True)
    return call.run(lambda x: lax.psum(x, call.axes, axis_index_groups=axis_index_groups), x)


def pmean(
    x: Any,
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    policy: Policy | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Averages over ranks, as `jax.lax.pmean`, and without overflow in narrow floats.

    Args:
      x: pytree of numbers or booleans, per shard.
      axis_name: mesh axis, or a tuple of them.
      axis_index_groups: as in jax.lax.
      policy: what xcoll may do.
      key: a PRNG key, for a codec that rounds at random.

    Returns:
      The means, replicated over the axes. float16 and float8 are summed in float32 (and travel so),
      since their sum can overflow where the mean is finite; other floats in their own dtype.

    Raises:
      TypeError: a leaf is no number.
    """
    call = Call("pmean", axis_name, policy, key=key, takes_key=True)
    call.check_leaves(x, numbers=True)

    def mean(x: Any) -> Any:
        return lax.pmean(x, call.axes, axis_index_groups=axis_index_groups)

    return call.run(lambda x: jax.tree.map(lambda v: in_wide(mean, v), x), x)


def pmax(
    x: Any, axis_name: Axes, *, axis_index_groups: Groups = None, policy: Policy | None = None
) -> Any:
    """Takes the maximum over ranks, as `jax.lax.pmax`; not differentiable, as there.

    Args:
      x: pytree of real numbers or booleans, per shard.
      axis_name: mesh axis, or a tuple of them.
      axis_index_groups: as in jax.lax.
      policy: what xcoll may do.

    Returns:
      The maxima, replicated over the axes; exact. What a NaN gives is up to who reduces: XLA:CPU's
      own all-reduce passes over it, a decomposition returns it, as `jax.lax.max` does.
    """
    return _extreme("pmax", lax.pmax, x, axis_name, axis_index_groups, policy)


def pmin(
    x: Any, axis_name: Axes, *, axis_index_groups: Groups = None, policy: Policy | None = None
) -> Any:
    """Takes the minimum over ranks, as `jax.lax.pmin`; not differentiable, as there.

    Args:
      x: pytree of real numbers or booleans, per shard.
      axis_name: mesh axis, or a tuple of them.
      axis_index_groups: as in jax.lax.
      policy: what xcoll may do.

    Returns:
      The minima, replicated over the axes; exact. For NaN see `pmax`.
    """
    return _extreme("pmin", lax.pmin, x, axis_name, axis_index_groups, policy)


def in_wide(mean: Callable[[Any], Any], leaf: Any) -> Any:
    """Takes a mean in float32 where the sum of narrow floats can overflow (float16, float8)."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating) or float(jnp.finfo(dtype).max) > 1e30:
        return mean(leaf)
    return mean(jnp.asarray(leaf, jnp.float32)).astype(dtype)


def _extreme(
    name: str, reduce: Any, x: Any, axis_name: Axes, groups: Groups, policy: Policy | None
) -> Any:
    call = Call(name, axis_name, policy)
    call.check_leaves(x, numbers=True)
    return call.run(lambda x: reduce(x, call.axes, axis_index_groups=groups), x)


def psum_scatter(
    x: Any,
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    policy: Policy | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Sums over ranks and leaves each rank its slice, as `jax.lax.psum_scatter`.

    Args:
      x: pytree of numbers, per shard.
      axis_name: mesh axis, or a tuple of them.
      scatter_dimension: the dimension that is cut; may count from the end.
      axis_index_groups: as in jax.lax.
      tiled: keep the dimension, of a multiple of the number of ranks; else it has one element a
        rank and goes.
      policy: what xcoll may do.
      key: a PRNG key, for a codec that rounds at random.

    Returns:
      Slice ``rank`` of the sums; error bound as for `psum`.

    Raises:
      ValueError: the dimension is out of range or does not divide (sizes named).
    """
    call = Call("psum_scatter", axis_name, policy, key=key, takes_key=True)
    call.check_leaves(x, numbers=True)
    ranks = call.num_ranks if axis_index_groups is None else len(axis_index_groups[0])
    call.check_divides(x, scatter_dimension, "scatter_dimension", tiled, ranks)

    def scatter(leaf: Any) -> Any:
        return lax.psum_scatter(
            leaf,
            call.axes,
            scatter_dimension=scatter_dimension % np.ndim(leaf),
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )

    return call.run(lambda x: jax.tree.map(scatter, x), x)


def all_gather(
    x: Any,
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    policy: Policy | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Gathers the ranks' arrays on all of them, as `jax.lax.all_gather`.

    Args:
      x: pytree of arrays, per shard.
      axis_name: mesh axis, or a tuple of them.
      axis_index_groups: as in jax.lax.
      axis: the new dimension that numbers the ranks; with ``tiled`` the one to concatenate along.
      tiled: concatenate rather than stack.
      to: type of the result under ``check_vma=True``, as in jax.lax.
      policy: what xcoll may do.
      key: a PRNG key, for a codec that rounds at random.

    Returns:
      The ranks' arrays in rank order; exact bit for bit.

    Raises:
      ValueError: the dimension is out of range.
    """
    call = Call("all_gather", axis_name, policy, key=key, takes_key=True)
    call.check_leaves(x)
    call.check_dimension(x, axis, "axis", extra=0 if tiled else 1)

    def gather(leaf: Any) -> Any:
        return lax.all_gather(
            leaf,
            call.axes,
            axis_index_groups=axis_index_groups,
            axis=axis % (np.ndim(leaf) + (not tiled)),
            tiled=tiled,
            to=to,
        )

    return call.run(lambda x: jax.tree.map(gather, x), x)


def all_to_all(
    x: Any,
    axis_name: Axes,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    policy: Policy | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Exchanges slices among ranks, as `jax.lax.all_to_all`.

    Args:
      x: pytree of arrays, per shard.
      axis_name: mesh axis, or a tuple of them.
      split_axis: the dimension that is cut, one slice a rank.
      concat_axis: where the slices that arrive are put together.
      axis_index_groups: as in jax.lax.
      tiled: slices are concatenated rather than stacked.
      policy: what xcoll may do.
      key: a PRNG key, for a codec that rounds at random.

    Returns:
      The slices from all ranks, in rank order; exact bit for bit.

    Raises:
      ValueError: a dimension is out of range, or ``split_axis`` does not divide.
    """
    call = Call("all_to_all", axis_name, policy, key=key, takes_key=True)
    call.check_leaves(x)
    ranks = call.num_ranks if axis_index_groups is None else len(axis_index_groups[0])
    call.check_divides(x, split_axis, "split_axis", tiled, ranks)
    call.check_dimension(x, concat_axis, "concat_axis")

    def exchange(leaf: Any) -> Any:
        return lax.all_to_all(
            leaf,
            call.axes if len(call.axes) != 1 else call.axes[0],
            split_axis % np.ndim(leaf),
            concat_axis % np.ndim(leaf),
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )

    return call.run(lambda x: jax.tree.map(exchange, x), x)


def ppermute(
    x: Any,
    axis_name: Axes,
    perm: Sequence[tuple[int, int]],
    *,
    policy: Policy | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Sends arrays along a permutation of ranks, as `jax.lax.ppermute`.

    Args:
      x: pytree of arrays, per shard.
      axis_name: mesh axis, or a tuple of them.
      perm: pairs of source and destination rank; who receives nothing gets zeros.
      policy: what xcoll may do: a permutation is already the smallest step, so nothing but native.
      key: a PRNG key, for a codec that rounds at random.

    Returns:
      What arrived; exact bit for bit.

    Raises:
      ValueError: a rank is out of range, or twice a source or destination.
    """
    call = Call("ppermute", axis_name, policy, key=key, takes_key=True)
    call.check_leaves(x)
    try:
        pairs = [(int(source), int(destination)) for source, destination in perm]
    except (TypeError, ValueError):
        raise TypeError(
            f"ppermute(perm={perm!r}): must be a sequence of pairs (source, destination)"
        ) from None
    for what, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        for rank in ranks:
            if not 0 <= rank < call.num_ranks or ranks.count(rank) > 1:
                rule = "is there twice" if 0 <= rank < call.num_ranks else "is out of range"
                raise ValueError(
                    f"ppermute(perm={perm!r}): {what} {rank} {rule}; there are {call.num_ranks}"
                    f" ranks over {call.axes}, each at most once a {what}"
                )
    return call.run(lambda x: lax.ppermute(x, call.axes, pairs), x)


def pbroadcast(x: Any, axis_name: Axes, source: Any, *, policy: Policy | None = None) -> Any:
    """Sends one rank's arrays to all, as `jax.lax.pbroadcast`, and on every platform.

    Args:
      x: pytree of arrays, per shard.
      axis_name: mesh axis, or a tuple of them.
      source: the rank whose arrays are sent: an integer; or, as in jax.lax, a traced one, which is
        not checked and costs a whole all-gather.
      policy: what xcoll may do.

    Returns:
      The source's arrays; exact bit for bit.

    Raises:
      ValueError: ``source`` is out of range.
    """
    call = Call("pbroadcast", axis_name, policy)
    call.check_leaves(x, plain=True)
    return call.run(lambda x: jax.tree.map(lambda v: bind_pbroadcast(v, call.axes, source), x), x)
