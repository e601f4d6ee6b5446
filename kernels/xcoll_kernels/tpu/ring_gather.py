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

from xcoll_kernels.tpu.ring_layout import DIRECTIONS, Ring

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
