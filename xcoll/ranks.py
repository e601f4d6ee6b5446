"""The ranks a stage spans, inside a manual computation, and XLA's collectives over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll.plan import Span
from xcoll.schedule import swaps

Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Ranks:
    """Ranks of a span, with jax.lax's collectives restricted to them.

    Where the span covers whole mesh axes, those axes are named; else jax.lax's
    ``axis_index_groups`` pick the ranks out of the axes.

    Args:
      span: the span.
      axis_sizes: size of every mesh axis that the spans name, in the mesh's order.
      beside: ranks that take turns where partners swap (`xcoll.plan.Stage`).
    """

    def __init__(self, span: Span, axis_sizes: Mapping[str, int], beside: Span | None = None):
        self._span_sizes = sizes = [axis_sizes[a] for a in span.axes]
        self._span, self._sizes, self._beside = span, axis_sizes, beside
        self.num_ranks = span.num_ranks
        self._stride = span.stride
        self._total = math.prod(sizes)
        self._whole = self._total == span.num_ranks
        self._axes = span.axes
        # jax.lax.ppermute wants axes in the mesh's order; ranks are numbered in the span's.
        self._mesh_order = tuple(a for a in axis_sizes if a in span.axes)
        places = np.arange(self._total).reshape(sizes)
        order = [span.axes.index(a) for a in self._mesh_order]
        self._in_mesh_order = np.argsort(places.transpose(order).reshape(-1))

    @property
    def groups(self) -> list[list[int]] | None:
        """jax.lax's ``axis_index_groups``: None where the span covers its axes."""
        if self._whole:
            return None
        block = self._stride * self.num_ranks
        return [
            [base + offset + self._stride * digit for digit in range(self.num_ranks)]
            for base in range(0, self._total, block)
            for offset in range(self._stride)
        ]

    def index(self) -> jax.Array:
        """Returns this rank's position in the span, a traced int32 scalar."""
        flat = lax.axis_index(self._axes)
        if self._whole:
            return flat
        return lax.rem(lax.div(flat, np.int32(self._stride)), np.int32(self.num_ranks))

    def permute(self, x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """Sends ``x`` along ``pairs`` of positions; who receives nothing gets zeros."""
        if self._beside is not None and swaps(pairs):
            return self._in_turns(x, pairs, self._beside)
        groups = self.groups
        if groups is not None:
            pairs = [(g[s], g[d]) for g in groups for s, d in pairs]
        place = self._in_mesh_order
        return lax.ppermute(x, self._mesh_order, [(int(place[s]), int(place[d])) for s, d in pairs])

    def _in_turns(self, x: jax.Array, pairs: Sequence[tuple[int, int]], beside: Span) -> jax.Array:
        """Permutes twice: one half of the ranks beside sends up while the other sends down."""
        axes = tuple(a for a in self._sizes if a in (*self._span.axes, *beside.axes))
        shape = tuple(self._sizes[a] for a in axes)
        places = np.indices(shape).reshape(len(axes), -1)
        rows, sizes = [axes.index(a) for a in self._span.axes], self._span_sizes
        flat = np.ravel_multi_index(tuple(places[rows]), sizes)
        is_low = _position(places, axes, self._sizes, beside) < beside.num_ranks // 2
        turns: list[list[tuple[int, int]]] = [[], []]
        for source, destination in pairs:
            here = np.flatnonzero(flat // self._stride % self.num_ranks == source)
            there = places[:, here]
            moved = flat[here] + (destination - source) * self._stride
            there[rows] = np.unravel_index(moved, sizes)
            in_second = is_low[here] != (destination > source)
            ends = zip(here.tolist(), np.ravel_multi_index(tuple(there), shape), strict=True)
            for (start, end), number in zip(ends, in_second.astype(int), strict=True):
                turns[number].append((start, int(end)))
        first, second = (lax.ppermute(x, axes, turn) for turn in turns)
        comes_up = np.zeros(self.num_ranks, bool)
        comes_up[[d for s, d in pairs if d > s]] = True
        low = Ranks(beside, self._sizes).index() < beside.num_ranks // 2
        return jnp.where(jnp.asarray(comes_up)[self.index()] == low, first, second)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Concatenates the ranks' ``x`` along the leading dimension."""
        return lax.all_gather(x, self._axes, axis_index_groups=self.groups, tiled=True)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Exchanges the leading dimension: share ``s`` of rank ``r`` goes to rank ``s``."""
        return lax.all_to_all(x, self._axes, 0, 0, axis_index_groups=self.groups, tiled=True)

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """Sums over ranks and keeps this rank's part of the leading dimension."""
        return lax.psum_scatter(x, self._axes, axis_index_groups=self.groups, tiled=True)

    def all_reduce(self, x: jax.Array, op: str) -> jax.Array:
        """Combines ``x`` over ranks with XLA's all-reduce."""
        reduce = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[op]
        return reduce(x, self._axes, axis_index_groups=self.groups)


def _position(places: Places, axes: Sequence[str], sizes: Mapping[str, int], span: Span) -> Places:
    """Returns the position in a span of each place (column of coordinates along some axes)."""
    at = tuple(places[axes.index(a)] for a in span.axes)
    flat = np.ravel_multi_index(at, [sizes[a] for a in span.axes])
    return np.asarray(flat // span.stride % span.num_ranks)
