"""Small parts that the builders of schedules share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from xcoll.schedule import Lane, PermuteStep, Repeat, Slots, Step

Moves = Iterable[tuple[int, int, tuple[int, ...]]]
"""Transfers of a step: source, destination, slots (read and written at the same places)."""


def repeated(count: int, *lanes: Lane) -> tuple[Step, ...]:
    """Returns a step of ``lanes`` run ``count`` times; nothing where that is zero times."""
    return (Repeat((PermuteStep(lanes),), count),) if count > 0 and lanes else ()


def in_windows(lane: Lane, bounds: Iterable[int]) -> tuple[Step, ...]:
    """Returns a lane's iterations, cut at ``bounds``: a repeat for each window.

    A window has only the pairs that are active in one of its iterations.

    Args:
      lane: a lane with active iterations.
      bounds: the first iteration, those that start a window, and the end; none below the one
        before.
    """
    steps: list[Step] = []
    for begin, end in itertools.pairwise(bounds):
        active = tuple(
            range(max(span.start, begin) - begin, min(span.stop, end) - begin)
            for span in lane.active
        )
        pairs = tuple(pair for pair in lane.pairs if active[pair[0]])
        always = all(len(active[source]) == end - begin for source, _ in pairs)
        part = Lane(
            pairs,
            _later(lane.send, begin),
            _later(lane.recv, begin),
            lane.reduce,
            () if always else active,
        )
        steps += repeated(end - begin, part) if pairs else ()
    return tuple(steps)


def backwards(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Returns repeats of lanes in reverse: what was combined at the end of a pair is copied back.

    So a reduce-scatter becomes the all-gather that takes results the same ways back.
    """
    back: list[Step] = []
    for step in reversed(steps):
        assert isinstance(step, Repeat)
        ((body,), count) = (step.body, step.count)
        back += repeated(count, *(_lane_backwards(lane, count) for lane in body.lanes))
    return tuple(back)


def _lane_backwards(lane: Lane, count: int) -> Lane:
    active = [range(0)] * len(lane.active)
    if lane.active:
        for source, destination in lane.pairs:
            span = lane.active[source]
            active[destination] = range(count - span.stop, count - span.start)
    send, recv = (_later(slots, count - 1) for slots in (lane.recv, lane.send))
    return Lane(
        tuple((destination, source) for source, destination in lane.pairs),
        replace(send, advance=-send.advance),
        replace(recv, advance=-recv.advance),
        active=tuple(active),
    )


def _later(slots: Slots, iteration: int) -> Slots:
    """Returns slots whose first iteration is ``iteration`` of those given."""
    moved = slots.advance * iteration
    return replace(slots, start=tuple((start + moved) % slots.modulus for start in slots.start))


def every(num_ranks: int, value: Callable[[int], int]) -> tuple[int, ...]:
    """Returns ``value(rank)`` for every rank."""
    return tuple(value(rank) for rank in range(num_ranks))


def shift(num_ranks: int, distance: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs in which every rank sends ``distance`` further, cyclically."""
    return tuple((rank, (rank + distance) % num_ranks) for rank in range(num_ranks))


def in_place(
    num_ranks: int,
    pairs: Sequence[tuple[int, int]],
    starts: Sequence[int],
    pattern: tuple[int, ...],
    num_slots: int,
    *,
    reduce: bool,
) -> Lane:
    """Returns a lane in which pair ``i`` moves the slots ``starts[i] + pattern``.

    They are read at the source and written at the destination at the same places.
    """
    send, recv = [0] * num_ranks, [0] * num_ranks
    for (source, destination), start in zip(pairs, starts, strict=True):
        send[source] = recv[destination] = start
    return Lane(
        tuple(pairs),
        Slots(tuple(send), num_slots, pattern=pattern),
        Slots(tuple(recv), num_slots, pattern=pattern),
        reduce,
    )


def moved(num_ranks: int, moves: Moves, num_slots: int, *, reduce: bool) -> tuple[PermuteStep, ...]:
    """Returns one step for ``moves``, a lane for each shape of the slots moved.

    Ranks that move unequal numbers of slots are on lanes of their own, since a lane moves the
    same number everywhere. No moves, no step.
    """
    shapes: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for source, destination, slots in moves:
        pattern = tuple(s - slots[0] for s in slots)
        shapes.setdefault(pattern, []).append((source, destination, slots[0]))
    lanes = tuple(
        in_place(
            num_ranks,
            [(a, b) for a, b, _ in group],
            [start for _, _, start in group],
            pattern,
            num_slots,
            reduce=reduce,
        )
        for pattern, group in shapes.items()
    )
    return (PermuteStep(lanes),) if lanes else ()


def largest_power_of_two(num_ranks: int) -> int:
    """Returns the largest power of two that is not above ``num_ranks``.

    >>> [largest_power_of_two(n) for n in (1, 2, 3, 8, 9)]
    [1, 2, 2, 8, 8]
    """
    return 1 << (num_ranks.bit_length() - 1)


def ceil_log2(num_ranks: int) -> int:
    """Returns the smallest ``d`` with ``2**d >= num_ranks``.

    >>> [ceil_log2(n) for n in (1, 2, 3, 8, 9)]
    [0, 1, 2, 3, 4]
    """
    return (num_ranks - 1).bit_length()
