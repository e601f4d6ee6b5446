"""The all-gather phase of a ring kernel: encoded or not, chunks are passed on as they came.

See `xcoll_kernels.tpu.remote_dma` for the protocol.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xcoll_kernels.tpu.ring_layout import DIRECTIONS, Ring, Tiles
from xcoll_kernels.tpu.ring_wire import Wire, groups

_SLOTS = 2  # of semaphores: the copies of a step and of the one before are told apart


def scratch(num_parts: int) -> dict[str, Any]:
    """Returns the phase's semaphores, as ``scratch_shapes`` of a kernel.

    Args:
      num_parts: arrays that a chunk is sent as.
    """
    both = len(DIRECTIONS)
    return {
        "send": pltpu.SemaphoreType.DMA((num_parts, both, _SLOTS)),
        "receive": pltpu.SemaphoreType.DMA((num_parts, both, _SLOTS)),
        "copy": pltpu.SemaphoreType.DMA((both,)),
        "free": pltpu.SemaphoreType.REGULAR((both,)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather:
    """One run of the phase inside a kernel.

    Attributes:
      ring: where this device is.
      gathered: an HBM ref ``[num_ranks, 2, ...]`` for each array that a chunk is sent as.
      own: where this rank's chunk is, ``[2, ...]`` each; None: in ``gathered`` already.
      then: called with a direction and a rank once, when that half of that rank's chunk is in
        ``gathered``; while it runs the half is on its way to the neighbour.
      refs: `scratch`.
    """

    ring: Ring
    gathered: Sequence[Any]
    own: Sequence[Any] | None
    then: Callable[[int, Any], None] | None
    refs: dict[str, Any]

    def run(self) -> None:
        """Runs it: afterwards all chunks are in ``gathered``."""
        num_steps = self.ring.num_ranks - 1
        if self.own is not None:
            for direction in DIRECTIONS:
                self._copy_of_own(direction).start()
        if num_steps:
            self._step(0, self.own)
            lax.fori_loop(1, num_steps, lambda step, _: self._step(step, None), None)
        if self.own is not None:
            for direction in DIRECTIONS:
                self._copy_of_own(direction).wait()
        for direction in DIRECTIONS:
            if self.then is not None:
                self.then(direction, self.ring.rank(direction, -num_steps))
            if num_steps:
                # Nobody may signal a device that has left the kernel.
                pl.semaphore_wait(self.refs["free"].at[direction], min(_SLOTS, num_steps))

    def _step(self, step: Any, own: Sequence[Any] | None) -> None:
        for direction in DIRECTIONS:

            @pl.when(step >= _SLOTS)
            def _(direction: int = direction) -> None:
                pl.semaphore_wait(self.refs["free"].at[direction], 1)

            for copy in self._sends(direction, step, own):
                copy.start()
        for direction in DIRECTIONS:
            if self.then is not None:
                self.then(direction, self.ring.rank(direction, -step))
        for direction in DIRECTIONS:
            copies = self._sends(direction, step, own)
            for copy in copies:
                copy.wait_recv()
            free = self.refs["free"].at[direction]
            pl.semaphore_signal(free, 1, device_id=self.ring.upstream(direction))
            for copy in copies:
                copy.wait_send()

    def _sends(self, direction: int, step: Any, own: Sequence[Any] | None) -> list[Any]:
        """Returns the copies that take a step's half chunk to the neighbour.

        Their ``wait_recv`` waits for what comes from the other neighbour in the same step, which
        has the same size and semaphore and only another place.
        """
        chunk, slot = self.ring.rank(direction, -step), lax.rem(jnp.int32(step), _SLOTS)
        sources = (
            [ref.at[chunk, direction] for ref in self.gathered]
            if own is None
            else [ref.at[direction] for ref in own]
        )
        return [
            pltpu.make_async_remote_copy(
                source,
                ref.at[chunk, direction],
                self.refs["send"].at[part, direction, slot],
                self.refs["receive"].at[part, direction, slot],
                device_id=self.ring.downstream(direction),
            )
            for part, (source, ref) in enumerate(zip(sources, self.gathered, strict=True))
        ]

    def _copy_of_own(self, direction: int) -> Any:
        assert self.own is not None
        (own,), (gathered,) = self.own, self.gathered
        return pltpu.make_async_copy(
            own.at[direction],
            gathered.at[self.ring.rank(direction, 0), direction],
            self.refs["copy"].at[direction],
        )


def encode(source: Any, targets: Sequence[Any], tiles: Tiles, wire: Wire) -> None:
    """Encodes half a chunk in HBM, ``[*half_shape]``, into the arrays it is sent as."""

    def body(values: Sequence[Any], parts: Sequence[Any]) -> None:
        (value,) = values
        wire.write(lambda rows: value[rows, :].astype(jnp.float32), parts)

    _stream(body, [source], targets)


def decode(sources: Sequence[Any], target: Any, tiles: Tiles, wire: Wire) -> None:
    """Undoes `encode`, into ``[*half_shape]`` of the payload's dtype."""

    def body(parts: Sequence[Any], values: Sequence[Any]) -> None:
        (value,), value_of = values, wire.values(parts)
        for rows in groups(tiles.tile_rows):
            value[rows, :] = value_of(rows).astype(value.dtype)

    _stream(body, sources, [target])


def _stream(
    body: Callable[[Sequence[Any], Sequence[Any]], None],
    sources: Sequence[Any],
    targets: Sequence[Any],
) -> None:
    """Takes HBM arrays through VMEM tile by tile, the next being loaded and the last stored.

    Args:
      body: called with a tile's refs in VMEM: those of ``sources``, and those of ``targets``.
      sources: HBM refs ``[num_tiles, ...]``.
      targets: the same.
    """
    num_tiles = sources[0].shape[0]

    def run(loaded: list[Any], stored: list[Any], load: Any, store: Any) -> None:
        def loads(tile: Any) -> list[Any]:
            slot = lax.rem(tile, _SLOTS)
            return [
                pltpu.make_async_copy(source.at[tile], buffer.at[slot], load.at[i, slot])
                for i, (source, buffer) in enumerate(zip(sources, loaded, strict=True))
            ]

        def stores(tile: Any) -> list[Any]:
            slot = lax.rem(tile, _SLOTS)
            return [
                pltpu.make_async_copy(buffer.at[slot], target.at[tile], store.at[i, slot])
                for i, (target, buffer) in enumerate(zip(targets, stored, strict=True))
            ]

        def step(tile: Any, _: None) -> None:
            @pl.when(tile + 1 < num_tiles)
            def _() -> None:
                for copy in loads(tile + 1):
                    copy.start()

            @pl.when(tile >= _SLOTS)
            def _() -> None:
                for copy in stores(tile - _SLOTS):
                    copy.wait()

            for copy in loads(tile):
                copy.wait()
            slot = lax.rem(tile, _SLOTS)
            body([buffer.at[slot] for buffer in loaded], [buffer.at[slot] for buffer in stored])
            for copy in stores(tile):
                copy.start()

        for copy in loads(0):
            copy.start()
        lax.fori_loop(0, num_tiles, step, None)
        for tile in range(max(0, num_tiles - _SLOTS), num_tiles):
            for copy in stores(tile):
                copy.wait()

    def buffers(refs: Sequence[Any]) -> list[Any]:
        return [pltpu.VMEM((_SLOTS, *ref.shape[1:]), ref.dtype) for ref in refs]

    pl.run_scoped(
        run,
        buffers(sources),
        buffers(targets),
        pltpu.SemaphoreType.DMA((len(sources), _SLOTS)),
        pltpu.SemaphoreType.DMA((len(targets), _SLOTS)),
    )
