"""Feedback state for another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xcoll.gradients.compressor import Feedback
from xcoll.gradients.layout import Layout
from xcoll.gradients.per_rank import PerRank
from xcoll.gradients.windows import AccumulateState


def reshard_residual(state: Any, new_num_ranks: int | Mapping[str, int]) -> Any:
    """Returns an optimizer state whose feedback is of another number of ranks.

    What is conserved is the sum of the residuals over ranks, element by element of every leaf: that
    is what is still to be applied. Residuals of contributions are summed in float64 and divided
    evenly among the new ranks, the remainder on the first; residuals of sums are cut anew into
    shares. Each sum is the old one up to one rounding in float32. Factors (PowerSGD's) stay.

    Args:
      state: any optimizer state with feedback in it, as it is outside of `jax.shard_map`, all of it
        on this process.
      new_num_ranks: the number of ranks, where the state has a single axis; else the new size of
        each axis that changes.

    Returns:
      The same structure; arrays that changed are on the default device: place them with the specs
      of `state_specs`.

    Raises:
      ValueError: an axis is unknown, a size not positive, the state has no feedback or several axes
        and only a number is given, or a window of `accumulate` is open.
      TypeError: ``new_num_ranks`` is of a wrong type.

    Example:
      >>> from xcoll import codecs
      >>> from xcoll.gradients import error_feedback, sync
      >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
      >>> optimizer = sync("data", compressor=error_feedback(codecs.int8()), mesh=mesh)
      >>> state = reshard_residual(optimizer.init(jnp.zeros(1000)), 3)
      >>> state.buckets[0].contributed.value.shape
      (3, 1536)
    """

    def is_ours(node: Any) -> bool:
        return isinstance(node, Feedback | AccumulateState)

    if not any(map(is_ours, jax.tree.leaves(state, is_leaf=is_ours))):
        raise ValueError("reshard_residual: the state has no feedback in it")

    def resharded(node: Any) -> Any:
        if isinstance(node, Feedback):
            return _feedback(node, new_num_ranks)
        if isinstance(node, AccumulateState):
            return _accumulators(
                node, new_num_ranks, jax.tree.map(resharded, node.inner, is_leaf=is_ours)
            )
        return node

    return jax.tree.map(resharded, state, is_leaf=is_ours)


def _sizes(axes: Mapping[str, int], new: int | Mapping[str, int]) -> dict[str, int]:
    """Returns the new size of every axis."""
    call = f"reshard_residual(new_num_ranks={new!r})"
    if isinstance(new, int) and not isinstance(new, bool):
        if len(axes) != 1:
            raise ValueError(
                f"{call}: the state has ranks over several axes, {dict(axes)}; give the new size of"
                " each axis that changes, for example {'data': 4}"
            )
        new = dict.fromkeys(axes, new)
    if not isinstance(new, Mapping):
        raise TypeError(f"{call}: must be a number of ranks, or sizes by axis")
    for axis, size in new.items():
        if axis not in axes:
            raise ValueError(f"{call}: the state has no axis {axis!r}; it has {dict(axes)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{call}: the size of {axis!r} must be a positive integer")
    return {**axes, **new}


def _feedback(old: Feedback, new_num_ranks: int | Mapping[str, int]) -> Feedback:
    layout = old.layout
    sizes = _sizes(dict(layout.axes), new_num_ranks)
    new = replace(layout, axes=tuple((axis, sizes[axis]) for axis in sizes))
    further = [a for a in layout.axis_names if a not in (*layout.exact, *layout.compressed)]
    if any(sizes[a] != dict(layout.axes)[a] for a in further):
        raise ValueError(
            f"reshard_residual: {further} are axes that parameters are cut over, not axes that"
            " gradients are summed over; their sizes cannot change"
        )
    contributed = reduced = None
    if old.contributed is not None:
        contributed = _contributed(_grouped(old.contributed, layout), layout, new)
    if old.reduced is not None:
        reduced = _reduced(_grouped(old.reduced, layout), layout, new)
    return Feedback(
        contributed=contributed,
        reduced=reduced,
        factors=tuple(_factor(f, layout, new) for f in old.factors),
        layout=new,
    )


def _grouped(array: PerRank, layout: Layout) -> np.ndarray:
    """Returns ``(further ranks, shards, compressed ranks, elements)`` in float64."""
    value = np.asarray(array.value, np.float64)
    elements = value.shape[-1]
    order, counts = _order(layout)
    cube = value.reshape(*(size for _, size in layout.axes), elements)
    return cube.transpose(*order, len(order)).reshape(*counts, elements)


def _per_rank(cube: np.ndarray, layout: Layout) -> PerRank:
    """Is the inverse of `_grouped`, in float32."""
    order, _ = _order(layout)
    sizes = [layout.axes[place][1] for place in order]
    back = np.argsort(order)
    value = cube.reshape(*sizes, -1).transpose(*back, len(order))
    flat = value.reshape(-1, cube.shape[-1]).astype(np.float32)
    return PerRank(jnp.asarray(flat), layout.axis_names)


def _order(layout: Layout) -> tuple[list[int], tuple[int, int, int]]:
    """Returns places of further, exact and compressed axes, and how many ranks each are."""
    names = layout.axis_names
    further = [a for a in names if a not in (*layout.exact, *layout.compressed)]
    order = [names.index(a) for a in (*further, *layout.exact, *layout.compressed)]
    return order, (layout.count(further), layout.num_shards, layout.num_ranks)


def _recut(rows: np.ndarray, old: Layout, new: Layout) -> np.ndarray:
    """Cuts ``(shards, padded)`` into the new shards, by way of the leaves."""
    cut: np.ndarray = new.pack(old.unpack(rows[:, : old.width]))
    return np.pad(cut, [(0, 0), (0, new.padded - new.width)])


def _contributed(cube: np.ndarray, old: Layout, new: Layout) -> PerRank:
    totals = np.stack([_recut(rows, old, new) for rows in cube.sum(axis=2)])
    ranks = new.num_ranks
    parts = np.repeat((totals / ranks).astype(np.float32)[:, :, None], ranks, axis=2)
    parts = parts.astype(np.float64)
    parts[:, :, 0] = totals - parts[:, :, 1:].sum(axis=2)
    return _per_rank(parts, new)


def _reduced(cube: np.ndarray, old: Layout, new: Layout) -> PerRank:
    whole = cube.reshape(*cube.shape[:2], -1)
    rows = np.stack([_recut(rows, old, new) for rows in whole])
    return _per_rank(rows.reshape(*rows.shape[:2], new.num_ranks, new.share), new)


def _factor(old: PerRank, layout: Layout, new: Layout) -> PerRank:
    """Returns the first shard's factor for all shards: any factor is a start."""
    old_sizes, new_sizes = dict(layout.axes), dict(new.axes)
    value = np.asarray(old.value)
    cube = value.reshape(*(old_sizes[a] for a in old.axes), *value.shape[1:])
    for place, axis in enumerate(old.axes):
        if old_sizes[axis] != new_sizes[axis]:
            first = cube.take([0], axis=place)
            cube = np.repeat(first, new_sizes[axis], axis=place)
    return PerRank(jnp.asarray(cube.reshape(-1, *value.shape[1:])), old.axes)


def _accumulators(
    old: AccumulateState, new_num_ranks: int | Mapping[str, int], inner: Any
) -> AccumulateState:
    if int(old.count):
        raise ValueError(
            f"reshard_residual: a window of accumulate is open, {int(old.count)} steps in; the"
            " gradients of its ranks cannot be divided anew; reshard at the end of a window"
        )
    sizes = _sizes(dict(old.sizes), new_num_ranks)
    ranks = [math.prod(sizes[a] for a in total.axes) for total in old.sums]
    sums = tuple(
        PerRank(jnp.zeros((count, *total.value.shape[1:]), total.value.dtype), total.axes)
        for count, total in zip(ranks, old.sums, strict=True)
    )
    return replace(old, sums=sums, inner=inner, sizes=tuple(sizes.items()))
