"""Encoding and decoding of what lies in HBM, tile by tile through VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xcoll_kernels.tpu.ring_layout import BLOCK, Tiles
from xcoll_kernels.tpu.ring_wire import Wire, groups

_BUFFERS = 2  # the next tile is loaded, and the last stored, while one is worked on


def scratch(tiles: Tiles, wire: Wire, dtype: Any) -> dict[str, Any]:
    """Returns buffers and semaphores, as ``scratch_shapes`` of a kernel.

    Args:
      tiles: how a chunk is cut.
      wire: the encoded form.
      dtype: of what is encoded, or decoded to.
    """
    parts = wire.parts(tiles.tile_rows)
    return {
        "values": [pltpu.VMEM((_BUFFERS, tiles.tile_rows, BLOCK), dtype)],
        "parts": [pltpu.VMEM((_BUFFERS, *shape), dtype) for shape, dtype in parts],
        "values_moved": pltpu.SemaphoreType.DMA((1, _BUFFERS)),
        "parts_moved": pltpu.SemaphoreType.DMA((len(parts), _BUFFERS)),
    }


def encode(source: Any, targets: Sequence[Any], wire: Wire, refs: dict[str, Any]) -> None:
    """Encodes half a chunk in HBM, ``[*half_shape]``, into the arrays that it is sent as.

    Args:
      source: an HBM ref.
      targets: HBM refs ``[num_tiles, ...]``.
      wire: the encoded form.
      refs: `scratch`.
    """

    def body(values: Sequence[Any], parts: Sequence[Any]) -> None:
        (value,) = values
        wire.write(lambda rows: value[rows, :].astype(jnp.float32), parts)

    _stream(
        body,
        _Side(refs=[source], buffers=refs["values"], moved=refs["values_moved"]),
        _Side(refs=targets, buffers=refs["parts"], moved=refs["parts_moved"]),
    )


def decode(sources: Sequence[Any], target: Any, wire: Wire, refs: dict[str, Any]) -> None:
    """Undoes `encode`.

    Args:
      sources: HBM refs ``[num_tiles, ...]``.
      target: an HBM ref ``[*half_shape]``, of the payload's dtype.
      wire: the encoded form.
      refs: `scratch`.
    """

    def body(parts: Sequence[Any], values: Sequence[Any]) -> None:
        (value,), value_of = values, wire.values(parts)
        for rows in groups(value.shape[0]):
            value[rows, :] = value_of(rows).astype(value.dtype)

    _stream(
        body,
        _Side(refs=sources, buffers=refs["parts"], moved=refs["parts_moved"]),
        _Side(refs=[target], buffers=refs["values"], moved=refs["values_moved"]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
    """One end of a stream: arrays in HBM, their buffers in VMEM, and semaphores."""

    refs: Sequence[Any]
    buffers: Sequence[Any]
    moved: Any

    def in_vmem(self, tile: Any) -> list[Any]:
        return [buffer.at[lax.rem(tile, _BUFFERS)] for buffer in self.buffers]

    def copies(self, tile: Any, *, inwards: bool) -> list[Any]:
        found = []
        for i, (ref, buffer) in enumerate(zip(self.refs, self.in_vmem(tile), strict=True)):
            ends = (ref.at[tile], buffer) if inwards else (buffer, ref.at[tile])
            moved = self.moved.at[i, lax.rem(tile, _BUFFERS)]
            found.append(pltpu.make_async_copy(*ends, moved))
        return found


def _stream(
    body: Callable[[Sequence[Any], Sequence[Any]], None], sources: _Side, targets: _Side
) -> None:
    """Calls ``body`` with each tile's refs in VMEM, of ``sources`` and of ``targets``."""
    num_tiles = sources.refs[0].shape[0]

    def load(tile: Any) -> None:
        for copy in sources.copies(tile, inwards=True):
            copy.start()

    def stored(tile: Any) -> None:
        for copy in targets.copies(tile, inwards=False):
            copy.wait()

    def step(tile: Any, _: None) -> None:
        pl.when(tile + 1 < num_tiles)(lambda: load(tile + 1))
        pl.when(tile >= _BUFFERS)(lambda: stored(tile - _BUFFERS))
        for copy in sources.copies(tile, inwards=True):
            copy.wait()
        body(sources.in_vmem(tile), targets.in_vmem(tile))
        for copy in targets.copies(tile, inwards=False):
            copy.start()

    load(jnp.int32(0))
    lax.fori_loop(0, num_tiles, step, None)
    for tile in range(max(0, num_tiles - _BUFFERS), num_tiles):
        stored(jnp.int32(tile))
