"""The compressed buckets of `sync`: their state, and the way of a bucket through a compressor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xcoll import collectives
from xcoll.gradients.buckets import fill_buckets
from xcoll.gradients.channel import Channel
from xcoll.gradients.checks import check_compressor_of, check_feedback_of
from xcoll.gradients.compressor import Compressor, Feedback
from xcoll.gradients.layout import Layout
from xcoll.gradients.leaves import COMPRESSED_DTYPES, Leaf, leaves_of
from xcoll.gradients.options import Options
from xcoll.gradients.per_rank import rank_axes
from xcoll.policy import Policy

_LANES = 128
_TILE = 8 * _LANES


class SyncState(NamedTuple):
    """State of `sync` with a compressor.

    Attributes:
      step: int32 scalar, the number of steps taken; random draws are counted by it.
      buckets: state of each compressed bucket.
    """

    step: jax.Array
    buckets: tuple[Feedback, ...]


def initial_state(options: Options, params: Any) -> SyncState:
    """Returns the state before the first step; one rank's inside `jax.shard_map`.

    Raises:
      ValueError: the number of ranks is not known here.
      TypeError: a leaf is no array.
    """
    compressor = options.compressor
    assert compressor is not None
    leaves = leaves_of("sync", params)
    axes, inside = rank_axes("sync", options.axes, options.mesh)
    sizes = dict(axes)
    num_shards = math.prod(sizes[a] for a in options.exact)
    taken = [
        position
        for position, leaf in enumerate(leaves)
        if leaf.dtype in COMPRESSED_DTYPES
        and 0 not in leaf.shape
        and compressor.takes(leaf.shape, num_shards)
    ]
    key = jax.random.key(options.seed)
    buckets = []
    for number, members in enumerate(
        fill_buckets(leaves, taken, options.axes, options.bucket_bytes)
    ):
        further = sorted(leaves[members[0]].varying - set(options.axes))
        layout = Layout(
            leaves=members,
            names=tuple(leaves[m].name for m in members),
            shapes=tuple(leaves[m].shape for m in members),
            num_leaves=len(leaves),
            axes=(*axes, *((a, jax.lax.axis_size(a)) for a in further)),
            compressed=options.compressed,
            exact=options.exact,
            by_rows=compressor.by_rows,
            block=compressor.block,
        )
        own_key = jax.random.fold_in(key, number)
        buckets.append(compressor.init(layout, own_key, inside=inside, mesh=options.mesh))
    return SyncState(jnp.zeros((), jnp.int32), tuple(buckets))


def reduce_compressed(
    options: Options, leaves: Sequence[Leaf], values: Sequence[Any], state: Any
) -> tuple[SyncState, dict[int, jax.Array]]:
    """Reduces the leaves that the state's buckets hold.

    Args:
      options: what was asked for.
      leaves: all leaves of the gradients.
      values: their values.
      state: as it is inside `jax.shard_map`.

    Returns:
      The next state, and the reduced values by position of the leaf.

    Raises:
      ValueError: the state is of other gradients or ranks.
      TypeError: the state is of something else.
    """
    if not isinstance(state, SyncState):
        raise TypeError(
            f"sync: the state is a {type(state).__name__}, not of a sync with a compressor; make it"
            " with the same transformation's init"
        )
    sizes = {axis: jax.lax.axis_size(axis) for axis in options.axes}
    compressor = options.compressor
    assert compressor is not None
    key = jax.random.fold_in(jax.random.key(options.seed), state.step)
    num_ranks = math.prod(sizes.values())
    done: dict[int, jax.Array] = {}
    buckets = []
    for number, feedback in enumerate(state.buckets):
        layout = feedback.layout
        check_feedback_of(feedback, leaves, sizes)
        check_compressor_of(feedback, compressor, options.axes, options.compressed)
        dtypes = {leaves[m].dtype for m in layout.leaves}
        channel = Channel(
            axes=layout.compressed,
            num_ranks=layout.num_ranks,
            sync_axes=options.axes,
            dtype=dtypes.pop() if len(dtypes) == 1 else "float32",
            key=jax.random.fold_in(key, number),
        )
        parts = [jnp.asarray(values[m], jnp.float32) for m in layout.leaves]
        if options.op == "mean":
            parts = [part / num_ranks for part in parts]
        totals, feedback = _through(compressor, parts, feedback, channel)
        for position, total in zip(layout.leaves, totals, strict=True):
            done[position] = total.astype(leaves[position].dtype)
        buckets.append(feedback)
    return SyncState(state.step + 1, tuple(buckets)), done


def _through(
    compressor: Compressor, parts: Sequence[jax.Array], feedback: Feedback, channel: Channel
) -> tuple[list[jax.Array], Feedback]:
    """Reduces one bucket: exactly over the exact axes, compressed over the others."""
    layout = feedback.layout
    rows = layout.pack(parts)
    native = Policy.native()  # No lossy policy around the step may touch what is exact here.
    if not layout.exact:
        total, feedback = compressor.apply(rows[0], feedback, channel)
        return layout.unpack(total[None]), feedback
    tiles = _in_tiles(rows)
    shard = collectives.psum_scatter(tiles, layout.exact, tiled=True, policy=native)
    shard = shard.reshape(-1)[: layout.width]
    total, feedback = compressor.apply(shard, feedback, channel)
    rows = collectives.all_gather(total, layout.exact, to="invarying", policy=native)
    return layout.unpack(rows), feedback


def _in_tiles(rows: jax.Array) -> jax.Array:
    """Returns ``(num_shards, width)`` as rows of 128 elements, the shards one below the other.

    The TPU compiler turns a reduce-scatter of flat shards, or of shards that are no whole tiles of
    (8, 128), into an all-reduce and a slice. Shards under two tiles are left as they are.
    """
    width = rows.shape[1]
    if width < 2 * _TILE:
        return rows
    rows = jnp.pad(rows, ((0, 0), (0, -width % _TILE)))
    return rows.reshape(-1, _LANES)
