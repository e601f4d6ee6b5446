"""How a bucket lies on the ranks: its shards, its shares, and the axes they belong to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from xcoll.gradients.buckets import unflatten


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the elements of a compressed bucket are; the unchanging part of its state.

    Over the exact axes the bucket is cut into *shards*, one a rank: a rank compresses its shard
    only. Over the compressed axes the shard, padded, is cut into *shares*: a rank sums its share.

    Attributes:
      leaves: positions of the leaves in the tree.
      names: names of the leaves, for messages; no part of what makes two layouts equal, since the
        same parameters are named otherwise inside Flax's variables.
      shapes: shapes of the leaves, per shard of the mesh.
      num_leaves: how many leaves the whole tree has.
      axes: ``(axis, size)`` of every axis that the state has ranks of, in the order of the ranks.
      compressed: axes that are compressed over.
      exact: axes that are reduced exactly, around the compression.
      by_rows: a leaf is a matrix and is cut by rows; else the bucket is one row of elements.
      block: elements that a share is a multiple of; 0 where there are no shares.
    """

    leaves: tuple[int, ...]
    names: tuple[str, ...] = field(compare=False)
    shapes: tuple[tuple[int, ...], ...]
    num_leaves: int
    axes: tuple[tuple[str, int], ...]
    compressed: tuple[str, ...]
    exact: tuple[str, ...] = ()
    by_rows: bool = False
    block: int = 0

    def count(self, names: Sequence[str]) -> int:
        """Returns the number of ranks over these axes."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes that the state has ranks of: its leading dimension is cut over them."""
        return tuple(axis for axis, _ in self.axes)

    @property
    def replicated_names(self) -> tuple[str, ...]:
        """Those over which ranks may differ after the compressed reduction."""
        return tuple(axis for axis in self.axis_names if axis not in self.compressed)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return self.count(self.exact)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that are compressed over."""
        return self.count(self.compressed)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a shard consists of: matrices, or a single row."""
        if not self.by_rows:
            total = sum(map(math.prod, self.shapes))
            return ((-(-total // self.num_shards),),)
        matrices = map(matrix_shape, self.shapes)
        return tuple((-(-rows // self.num_shards), columns) for rows, columns in matrices)

    @property
    def width(self) -> int:
        """Elements of a shard."""
        return sum(map(math.prod, self.parts))

    @property
    def share(self) -> int:
        """Elements of a share: whole blocks."""
        return -(-self.width // (self.num_ranks * self.block)) * self.block

    @property
    def padded(self) -> int:
        """Elements of a shard with its padding."""
        return self.num_ranks * self.share if self.block else self.width

    def pack(self, values: Sequence[Any]) -> Any:
        """Returns the leaves as ``(num_shards, width)``, padded with zeros; jax or NumPy arrays."""
        xp: Any = np if isinstance(values[0], np.ndarray) else jnp
        if self.by_rows:
            cut = []
            for value, part in zip(values, self.parts, strict=True):
                rows = self.num_shards * part[0]
                matrix = value.reshape(matrix_shape(value.shape))
                matrix = xp.pad(matrix, [(0, rows - matrix.shape[0]), (0, 0)])
                cut.append(matrix.reshape(self.num_shards, math.prod(part)))
            return xp.concatenate(cut, axis=1)
        flat = xp.concatenate([value.reshape(-1) for value in values])
        flat = xp.pad(flat, (0, self.num_shards * self.width - flat.size))
        return flat.reshape(self.num_shards, self.width)

    def unpack(self, rows: Any) -> list[Any]:
        """Returns the leaves out of ``(num_shards, width)``; inverse of `pack`."""
        if not self.by_rows:
            return unflatten(rows.reshape(-1), self.shapes)
        values, start = [], 0
        for shape, part in zip(self.shapes, self.parts, strict=True):
            end = start + math.prod(part)
            flat = rows[:, start:end].reshape(-1)
            values.append(flat[: math.prod(shape)].reshape(shape))
            start = end
        return values


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the shape as a matrix: split where rows plus columns are fewest.

    >>> matrix_shape((3, 3, 64, 128)), matrix_shape((10, 4)), matrix_shape((7,))
    ((576, 128), (10, 4), (7, 1))
    """
    if len(shape) < 2:
        return math.prod(shape), 1
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(cuts, key=sum)
