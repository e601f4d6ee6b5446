"""Executes a schedule: its steps as `jax.lax` operations on a buffer of slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll.encoded import hops_on
from xcoll.indexing import affine_lookup, lookup, put_slots, take_slots
from xcoll.ranks import Ranks
from xcoll.schedule import (
    TO_SHARES,
    FoldStep,
    Lane,
    LocalOrWire,
    NativeStep,
    PermuteStep,
    Repeat,
    Schedule,
    ShuffleStep,
    Slots,
)
from xcoll.wire import Wire

UNROLL_MAX_RANKS = 16
"""Repeats are written out up to this many ranks, and become one loop beyond."""

_COMBINE: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
}


class Run:
    """Runs a schedule on a buffer of slots: ``(num_slots, *slot)`` or, own, ``(share, *slot)``.

    Args:
      schedule: what to do.
      ranks: the ranks it connects.
      op: how values combine.
      wire: how slots travel, if a codec encodes them.
      in_place: fence every update of the buffer. XLA:CPU would fuse it with the next step's read,
        do it twice, and copy the whole buffer for that.
    """

    def __init__(
        self,
        schedule: Schedule,
        ranks: Ranks,
        op: str,
        wire: Wire | None = None,
        *,
        in_place: bool = False,
    ):
        self.in_place = in_place
        self.schedule = schedule
        self.wire = wire
        self.ranks = ranks
        self.op = op
        self.num_ranks = schedule.num_ranks
        self.rank = ranks.index()

    def __call__(self, buffer: jax.Array) -> jax.Array:
        """Returns the buffer after all steps: the rank's own share of what is scattered."""
        schedule = self.schedule
        is_own = schedule.enter == "own"
        if lanes := sums_at_owners(schedule):
            return self._sum_at_owners(lanes, buffer)
        for step in schedule.steps:
            if self.wire is not None and isinstance(step, Repeat) and hops_on(step):
                buffer, is_own = self._hops(step, self._full(buffer, is_own)), False
                continue
            if isinstance(step, Repeat) and self.num_ranks > UNROLL_MAX_RANKS:
                buffer, is_own = self._full(buffer, is_own), False
                buffer = self._loop(step, buffer)
                continue
            body, count = (step.body, step.count) if isinstance(step, Repeat) else ((step,), 1)
            for iteration in range(count):
                for inner in body:
                    buffer, is_own = self._step(inner, buffer, is_own, iteration)
        # XLA:GPU fuses a final slice into the whole chain of updates before it, and takes minutes.
        buffer = lax.optimization_barrier(buffer)
        if schedule.collective in TO_SHARES:
            return self._own(buffer, is_own)
        if schedule.collective == "all_reduce" and schedule.enter == "own":
            return self._own(buffer, is_own)
        return self._full(buffer, is_own)

    def _sum_at_owners(self, lanes: Sequence[Lane], buffer: jax.Array) -> jax.Array:
        """Returns the own share, to which what arrives is added: the buffer need not be written."""
        total = self._own(buffer, False)
        for lane in lanes:
            _, (arrived,) = self._exchange((lane,), buffer, 0)
            total = self._combine(total, arrived)
        return total

    def _step(
        self, step: LocalOrWire, buffer: jax.Array, is_own: bool, iteration: int
    ) -> tuple[jax.Array, bool]:
        match step:
            case PermuteStep(lanes):
                buffer = self._full(buffer, is_own)
                return self._permute(lanes, buffer, iteration), False
            case NativeStep("all_gather"):
                return self._wire(self.ranks.all_gather, self._own(buffer, is_own)), False
            case NativeStep("all_to_all"):
                return self._wire(self.ranks.all_to_all, self._full(buffer, is_own)), False
            case NativeStep("reduce_scatter"):
                return self.ranks.reduce_scatter(self._full(buffer, is_own)), True
            case NativeStep("all_reduce"):
                return self.ranks.all_reduce(self._full(buffer, is_own), self.op), False
            case FoldStep():
                return self._fold(self._full(buffer, is_own)), True
            case ShuffleStep(start, sign):
                buffer = self._full(buffer, is_own)
                order = [[(s + sign * i) % len(buffer) for i in range(len(buffer))] for s in start]
                return buffer[jnp.asarray(np.array(order, np.int32))[self.rank]], False
        raise AssertionError(step)

    def _loop(self, step: Repeat, buffer: jax.Array) -> jax.Array:
        def body(iteration: jax.Array, state: jax.Array) -> jax.Array:
            wire = None if self.wire is None else self.wire.numbered(iteration)
            run = Run(self.schedule, self.ranks, self.op, wire, in_place=self.in_place)
            for inner in step.body:
                state = run._permute(inner.lanes, state, iteration)
            return state

        return lax.fori_loop(0, step.count, body, buffer)

    def _hops(self, step: Repeat, buffer: jax.Array) -> jax.Array:
        """Runs a ring's reduce-scatter: what arrives is summed, encoded and sent on at once."""
        wire, (lanes,) = self.wire, (body.lanes for body in step.body)
        assert wire is not None

        def mine(slots: Slots, iteration: int | jax.Array) -> jax.Array:
            return take_slots(buffer, slots, self._first(slots, iteration))

        def hop(iteration: int | jax.Array, sent: list[jax.Array]) -> list[jax.Array]:
            on_way = wire.numbered(iteration)
            arrived = self._arrived(lanes, sent)
            return [
                on_way.accumulate_and_encode(mine(lane.recv, iteration), bits)
                for lane, bits in zip(lanes, arrived, strict=True)
            ]

        sent, last = [wire.encode(mine(lane.send, 0)) for lane in lanes], step.count - 1
        if self.num_ranks > UNROLL_MAX_RANKS:
            sent = lax.fori_loop(0, last, hop, sent)
        else:
            for iteration in range(last):
                sent = hop(iteration, sent)
        for lane, bits in zip(lanes, self._arrived(lanes, sent), strict=True):
            own = mine(lane.recv, last)
            total = own + wire.decode(bits, own.shape[1])
            buffer = put_slots(buffer, total, lane.recv, self._first(lane.recv, last))
        return buffer

    def _arrived(self, lanes: tuple[Lane, ...], sent: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(lanes, sent, strict=True)
        return [self.ranks.permute(bits, lane.pairs) for lane, bits in pairs]

    def _permute(
        self, lanes: tuple[Lane, ...], buffer: jax.Array, iteration: int | jax.Array
    ) -> jax.Array:
        buffer, arrived = self._exchange(lanes, buffer, iteration)
        for lane, new in zip(lanes, arrived, strict=True):
            first = self._first(lane.recv, iteration)
            receives = self._receives(lane, iteration)
            if lane.reduce or receives is not None:
                old = take_slots(buffer, lane.recv, first)
            if lane.reduce:
                new = self._combine(old, new)
            if receives is not None:
                new = jnp.where(receives, new, old)
            buffer = put_slots(buffer, new, lane.recv, first)
        return lax.optimization_barrier(buffer) if self.in_place else buffer

    def _exchange(
        self, lanes: tuple[Lane, ...], buffer: jax.Array, iteration: int | jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the buffer that ranks go on with, and what arrives on each lane."""

        def taken(source: jax.Array) -> list[jax.Array]:
            return [
                take_slots(source, lane.send, self._first(lane.send, iteration)) for lane in lanes
            ]

        wire = self.wire
        if wire is None:
            sends = [partial(self.ranks.permute, pairs=lane.pairs) for lane in lanes]
            slots = zip(sends, taken(buffer), strict=True)
            return buffer, [self._wire(send, x) for send, x in slots]
        elements = buffer.shape[1]
        if not self.schedule.replicates_sums:
            sent = [wire.encode(x) for x in taken(buffer)]
            return buffer, [wire.decode(x, elements) for x in self._arrived(lanes, sent)]
        # Partners add up the same two terms: each goes on with what the other sees of it.
        encoded = wire.encode(buffer)
        arrived = self._arrived(lanes, taken(encoded))
        return wire.decode(encoded, elements), [wire.decode(x, elements) for x in arrived]

    def _receives(self, lane: Lane, iteration: int | jax.Array) -> jax.Array | None:
        """Whether this rank receives on a lane; None where every rank does."""
        if lane.active and not isinstance(iteration, int):
            begin, end = np.zeros((2, self.num_ranks), np.int32)
            for source, destination in lane.pairs:
                begin[destination] = lane.active[source].start
                end[destination] = lane.active[source].stop
            now = iteration.astype(jnp.int32)
            is_begun = now >= lookup(begin.tolist(), self.rank)
            return jnp.logical_and(is_begun, now < lookup(end.tolist(), self.rank))
        pairs = lane.sending(iteration) if isinstance(iteration, int) else lane.pairs
        if len(pairs) == self.num_ranks:
            return None
        mask = np.zeros(self.num_ranks, bool)
        mask[[destination for _, destination in pairs]] = True
        return jnp.asarray(mask)[self.rank]

    def _combine(self, old: jax.Array, new: jax.Array) -> jax.Array:
        if self.schedule.replicates_sums:
            # Several ranks compute this sum. Without the fence the compiler may fuse a rank's own
            # operand into a multiply-add, or keep it unrounded, and ranks come to differ.
            old, new = lax.optimization_barrier((old, new))
            return _one_nan(_COMBINE[self.op](old, new))
        return _COMBINE[self.op](old, new)

    def _fold(self, buffer: jax.Array) -> jax.Array:
        combine = _COMBINE[self.op]
        shares = buffer.reshape(self.num_ranks, -1, *buffer.shape[1:])
        # Half precisions are fenced after each addition: the compiler would keep float32 between
        # two of them, and the result would depend on how it fused.
        narrow = jnp.issubdtype(buffer.dtype, jnp.floating) and buffer.dtype.itemsize < 4
        fence = lax.optimization_barrier if narrow else lambda x: x
        if self.num_ranks <= UNROLL_MAX_RANKS:
            total = shares[0]
            for s in range(1, self.num_ranks):
                total = fence(combine(total, shares[s]))
            return total
        return lax.fori_loop(
            1,
            self.num_ranks,
            lambda s, total: fence(combine(total, lax.dynamic_index_in_dim(shares, s, 0, False))),
            shares[0],
        )

    def _full(self, buffer: jax.Array, is_own: bool) -> jax.Array:
        if not is_own:
            return buffer
        share = buffer.shape[0]
        full = jnp.zeros((share * self.num_ranks, *buffer.shape[1:]), buffer.dtype)
        return lax.dynamic_update_slice_in_dim(full, buffer, self.rank * share, 0)

    def _own(self, buffer: jax.Array, is_own: bool) -> jax.Array:
        if is_own:
            return buffer
        share = buffer.shape[0] // self.num_ranks
        return lax.dynamic_slice_in_dim(buffer, self.rank * share, share, 0)

    def _first(self, slots: Slots, iteration: int | jax.Array) -> int | jax.Array:
        """First slot touched by this rank: an int where it is the same for all ranks."""
        m = slots.modulus
        if isinstance(iteration, int):
            table = [(s + slots.advance * iteration) % m for s in slots.start]
        else:
            table = [s % m for s in slots.start]
        first = affine_lookup(table, m, self.rank)
        if not isinstance(iteration, int) and slots.advance % m:
            # Kept small by the signed remainder: a product near m * m would not fit 32 bits.
            first = lax.rem(first + slots.advance * iteration.astype(jnp.int32), np.int32(m))
            if slots.advance < 0:
                first = jnp.where(first < 0, first + m, first)
        first = first * slots.scale
        return first + lookup(slots.base, self.rank) if slots.base else first

    def _wire(self, send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Moves slots, encoded if there is a codec; narrow floats as integers of their width.

        XLA:CPU would carry bfloat16 as float32 and float8 as float16, twice the bytes.
        """
        if self.wire is not None:
            return self.wire.decode(send(self.wire.encode(x)), x.shape[1])
        bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
        if bits is None or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float16:
            return send(x)
        return lax.bitcast_convert_type(send(lax.bitcast_convert_type(x, bits)), x.dtype)


def sums_at_owners(schedule: Schedule) -> tuple[Lane, ...]:
    """Returns the lanes of a reduce-scatter that send each share to its owner; else nothing."""
    steps = schedule.steps
    if schedule.collective != "reduce_scatter" or schedule.share != 1:
        return ()
    lanes = [lane for s in steps if isinstance(s, PermuteStep) for lane in s.lanes]
    everyone = list(range(schedule.num_ranks))
    if len(lanes) != len(steps) or any(
        not lane.reduce
        or [lane.recv.first(rank) for rank in everyone] != everyone
        or sorted(d for _, d in lane.pairs) != everyone
        or any(lane.send.first(source) != destination for source, destination in lane.pairs)
        for lane in lanes
    ):
        return ()
    return tuple(lanes)


def _one_nan(x: jax.Array) -> jax.Array:
    """Gives all NaNs the same bits: which operand's an addition keeps is up to the machine."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_one_nan(lax.real(x)), _one_nan(lax.imag(x)))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
