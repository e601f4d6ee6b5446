"""The reduce-scatter phase of a ring kernel: receive a tile, add one's own, send it on.

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

from xcoll_kernels.tpu.ring_layout import BLOCK, DIRECTIONS, Ring, Tiles
from xcoll_kernels.tpu.ring_wire import Wire, groups

_BUFFERS = 2  # of what is loaded, sent and stored: one is worked on while the other moves


def _received_slots(tiles: Tiles) -> int:
    # Each tile in flight has a slot (with fewer the ring would wait for itself); two more, and
    # the word that a slot is free has arrived before it is needed.
    return tiles.in_flight + 2


def scratch(tiles: Tiles, wire: Wire, payload_dtype: Any, result_dtype: Any) -> dict[str, Any]:
    """Returns the phase's buffers and semaphores, as ``scratch_shapes`` of a kernel."""
    slots, parts = _received_slots(tiles), wire.parts(tiles.tile_rows)
    both, tile = len(DIRECTIONS), (tiles.tile_rows, BLOCK)
    return {
        "mine": pltpu.VMEM((both, _BUFFERS, *tile), payload_dtype),
        "result": pltpu.VMEM((both, _BUFFERS, *tile), result_dtype),
        "sent": [pltpu.VMEM((both, _BUFFERS, *shape), dtype) for shape, dtype in parts],
        "received": [pltpu.VMEM((both, slots, *shape), dtype) for shape, dtype in parts],
        "load": pltpu.SemaphoreType.DMA((both, _BUFFERS)),
        "store": pltpu.SemaphoreType.DMA((both, _BUFFERS)),
        "send": pltpu.SemaphoreType.DMA((len(parts), both, _BUFFERS)),
        "receive": pltpu.SemaphoreType.DMA((len(parts), both, slots)),
        "free": pltpu.SemaphoreType.REGULAR((both,)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter:
    """One run of the phase inside a kernel; at least two ranks.

    Attributes:
      ring: where this device is.
      tiles: how a chunk is cut.
      wire: what tiles are sent as.
      payload: HBM ref ``[num_ranks, 2, *half_shape]``.
      result_of: gives the HBM ref ``[*half_shape]`` that a direction's sums go to.
      refs: `scratch`.
    """

    ring: Ring
    tiles: Tiles
    wire: Wire
    payload: Any
    result_of: Callable[[int], Any]
    refs: dict[str, Any]

    def run(self) -> None:
        """Runs it: afterwards the sums of this rank's chunk are in HBM."""
        for direction in DIRECTIONS:
            self._load(direction, 0).start()
        lax.fori_loop(0, self._num_iterations, self._iteration, None)
        for direction in DIRECTIONS:
            for item in range(max(0, self._num_items - _BUFFERS), self._num_items):
                for copy in self._sends(direction, item):
                    copy.wait_send()
            for tile in range(max(0, self.tiles.num_tiles - _BUFFERS), self.tiles.num_tiles):
                self._store(direction, tile).wait()
            # Nobody may signal a device that has left the kernel: all signals are waited for.
            pl.semaphore_wait(
                self.refs["free"].at[direction],
                min(_received_slots(self.tiles), self._num_items),
            )

    @property
    def _num_iterations(self) -> int:
        return self.ring.num_ranks * self.tiles.num_tiles

    @property
    def _num_items(self) -> int:
        """Tiles that this device sends, and receives, in one direction."""
        return (self.ring.num_ranks - 1) * self.tiles.num_tiles

    def _place(self, iteration: Any) -> tuple[Any, Any, Any]:
        """Returns an iteration's step, its tile, and the number of the item it would send.

        Iterations go by groups of ``in_flight`` tiles, in a group by step, in a step by tile.
        """
        in_flight, num_ranks = self.tiles.in_flight, self.ring.num_ranks
        group = lax.div(iteration, num_ranks * in_flight)
        in_group = lax.rem(iteration, num_ranks * in_flight)
        step = lax.div(in_group, in_flight)
        return step, group * in_flight + lax.rem(in_group, in_flight), iteration - group * in_flight

    def _iteration(self, iteration: Any, _: None) -> None:
        step, tile, item = self._place(iteration)

        @pl.when(iteration + 1 < self._num_iterations)
        def _() -> None:
            for direction in DIRECTIONS:
                self._load(direction, iteration + 1).start()

        for direction in DIRECTIONS:
            self._load(direction, iteration).wait()
            mine = self.refs["mine"].at[direction, lax.rem(iteration, _BUFFERS)]
            self._work(direction, mine, step, tile, item)

    def _work(self, direction: int, mine: Any, step: Any, tile: Any, item: Any) -> None:
        last = self.ring.num_ranks - 1

        def own(rows: pl.Slice) -> Any:
            return mine[rows, :].astype(jnp.float32)

        arrived = item - self.tiles.in_flight  # sent in the step before, of the same tile
        values = self.wire.values(self._received(direction, arrived))

        def total(rows: pl.Slice) -> Any:
            return values(rows) + own(rows)

        @pl.when(step > 0)
        def _() -> None:
            for copy in self._receives(direction, arrived):
                copy.wait_recv()

        @pl.when(step < last)
        def _() -> None:
            @pl.when(item >= _BUFFERS)
            def _() -> None:
                for copy in self._sends(direction, item - _BUFFERS):
                    copy.wait_send()

            @pl.when(step == 0)
            def _() -> None:
                self.wire.write(own, self._sent(direction, item))

            @pl.when(step > 0)
            def _() -> None:
                self.wire.write(total, self._sent(direction, item))

        @pl.when(step == last)
        def _() -> None:
            @pl.when(tile >= _BUFFERS)
            def _() -> None:
                self._store(direction, tile - _BUFFERS).wait()

            result = self.refs["result"].at[direction, lax.rem(tile, _BUFFERS)]
            for rows in groups(self.tiles.tile_rows):
                result[rows, :] = total(rows).astype(result.dtype)
            self._store(direction, tile).start()

        @pl.when(step > 0)  # what was received has been read
        def _() -> None:
            free = self.refs["free"].at[direction]
            pl.semaphore_signal(free, 1, device_id=self.ring.upstream(direction))

        @pl.when(step < last)
        def _() -> None:
            @pl.when(item >= _received_slots(self.tiles))
            def _() -> None:
                pl.semaphore_wait(self.refs["free"].at[direction], 1)

            for copy in self._sends(direction, item):
                copy.start()

    def _load(self, direction: int, iteration: Any) -> Any:
        step, tile, _ = self._place(iteration)
        chunk = self.ring.rank(direction, -1 - step)  # the one that needs as many hops more
        slot = lax.rem(iteration, _BUFFERS)
        return pltpu.make_async_copy(
            self.payload.at[chunk, direction, tile],
            self.refs["mine"].at[direction, slot],
            self.refs["load"].at[direction, slot],
        )

    def _store(self, direction: int, tile: Any) -> Any:
        slot = lax.rem(tile, _BUFFERS)
        return pltpu.make_async_copy(
            self.refs["result"].at[direction, slot],
            self.result_of(direction).at[tile],
            self.refs["store"].at[direction, slot],
        )

    def _sent(self, direction: int, item: Any) -> Sequence[Any]:
        return [ref.at[direction, lax.rem(item, _BUFFERS)] for ref in self.refs["sent"]]

    def _received(self, direction: int, item: Any) -> Sequence[Any]:
        slot = lax.rem(item, _received_slots(self.tiles))
        return [ref.at[direction, slot] for ref in self.refs["received"]]

    def _sends(self, direction: int, item: Any) -> list[Any]:
        """Returns the copies that take an item to the neighbour."""
        return [
            pltpu.make_async_remote_copy(
                sent,
                received,
                self.refs["send"].at[part, direction, lax.rem(item, _BUFFERS)],
                self.refs["receive"].at[part, direction, lax.rem(item, _received_slots(self.tiles))],
                device_id=self.ring.downstream(direction),
            )
            for part, (sent, received) in enumerate(
                zip(self._sent(direction, item), self._received(direction, item), strict=True)
            )
        ]

    # A receiver waits with the descriptor of the copy that the sender started: same item, same
    # slots, as all devices number items alike.
    _receives = _sends
