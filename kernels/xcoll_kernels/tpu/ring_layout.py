"""Where things are in a ring: neighbours, and the tiles that a payload is cut into."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 256
"""Elements of a row, which is a block with one scale where the wire is encoded."""

ROW_UNIT = 32
"""Rows of a tile are a multiple of it: the height of a native tile of int8."""

MAX_TILE_ROWS = 512
"""Exponent bytes of a tile fit one row of 128 lanes, four to an int32."""

MAX_IN_FLIGHT = 4
"""Tiles of one direction that travel the ring at the same time."""

DIRECTIONS = (0, 1)
"""0 sends to the next rank, 1 to the rank before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring over one mesh axis, as a device inside a kernel sees it.

    Attributes:
      axis_name: the mesh axis. The device's coordinates on all other axes are its neighbours' too.
      num_ranks: the axis's size.
      mesh_axes: all axes of the mesh, in its order.
    """

    axis_name: str
    num_ranks: int
    mesh_axes: tuple[str, ...]

    def rank(self, direction: int, distance: Any) -> Any:
        """Returns the rank ``distance`` hops downstream of this device, -num_ranks to num_ranks."""
        me = lax.axis_index(self.axis_name)
        found = me + distance if direction == 0 else me - distance
        found = jnp.where(found < 0, found + self.num_ranks, found)
        return jnp.where(found >= self.num_ranks, found - self.num_ranks, found)

    def downstream(self, direction: int) -> tuple[Any, ...]:
        """Returns the device id of the neighbour that this device sends to."""
        return self._device_id(self.rank(direction, 1))

    def upstream(self, direction: int) -> tuple[Any, ...]:
        """Returns the device id of the neighbour that this device receives from."""
        return self._device_id(self.rank(direction, -1))

    def _device_id(self, rank: Any) -> tuple[Any, ...]:
        # In coordinates. A dict that names only this axis is lowered to the same, but fails on
        # meshes of several axes under check_vma=True.
        return tuple(
            rank if name == self.axis_name else lax.axis_index(name) for name in self.mesh_axes
        )

    def barrier(self) -> None:
        """Waits until both neighbours are in the kernel, so that their buffers exist."""
        arrived = pltpu.get_barrier_semaphore()
        for direction in DIRECTIONS:
            pl.semaphore_signal(arrived, 1, device_id=self.downstream(direction))
        pl.semaphore_wait(arrived, len(DIRECTIONS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How one rank's chunk is cut: half for each direction, each half into tiles.

    Attributes:
      elements: elements of the chunk, without padding.
      half_rows: rows of `BLOCK` elements that each direction carries, the last one padded.
      num_tiles: tiles of a direction, a multiple of ``in_flight``.
      tile_rows: rows of a tile, a multiple of `ROW_UNIT`.
      in_flight: tiles that travel at the same time.
    """

    elements: int
    half_rows: int
    num_tiles: int
    tile_rows: int
    in_flight: int

    @property
    def half_shape(self) -> tuple[int, int, int]:
        """Shape of what one direction carries of a chunk."""
        return (self.num_tiles, self.tile_rows, BLOCK)

    def pack(self, chunks: jax.Array) -> jax.Array:
        """Lays ``[chunks, elements]`` out as ``[chunks, 2, num_tiles, tile_rows, BLOCK]``."""
        num_chunks = chunks.shape[0]
        short = 2 * self.half_rows * BLOCK - self.elements
        halves = jnp.pad(chunks, ((0, 0), (0, short))).reshape(num_chunks, 2, self.half_rows, BLOCK)
        missing = self.num_tiles * self.tile_rows - self.half_rows
        padded = jnp.pad(halves, ((0, 0), (0, 0), (0, missing), (0, 0)))
        return padded.reshape(num_chunks, 2, *self.half_shape)

    def unpack(self, tiled: jax.Array) -> jax.Array:
        """Undoes `pack`."""
        num_chunks = tiled.shape[0]
        halves = tiled.reshape(num_chunks, 2, self.num_tiles * self.tile_rows, BLOCK)
        flat = halves[:, :, : self.half_rows].reshape(num_chunks, 2 * self.half_rows * BLOCK)
        return flat[:, : self.elements]


def tiles_of(elements: int, max_tile_rows: int) -> Tiles:
    """Cuts a chunk into tiles of nearly equal size.

    Args:
      elements: of the chunk, at least 1.
      max_tile_rows: rows of a tile at most, a multiple of `ROW_UNIT`.
    """
    half_rows = _ceil(_ceil(elements, BLOCK), 2)
    num_tiles = _ceil(half_rows, max_tile_rows)
    if num_tiles > MAX_IN_FLIGHT:
        num_tiles = _ceil(num_tiles, MAX_IN_FLIGHT) * MAX_IN_FLIGHT
    else:  # a few tiles in flight keep the link busy, unless they become very small
        num_tiles = max(num_tiles, min(MAX_IN_FLIGHT, half_rows // 128))
    return Tiles(
        elements=elements,
        half_rows=half_rows,
        num_tiles=num_tiles,
        tile_rows=_ceil(_ceil(half_rows, num_tiles), ROW_UNIT) * ROW_UNIT,
        in_flight=min(num_tiles, MAX_IN_FLIGHT),
    )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
