"""Bidirectional rings: half of the payload each way, for links that carry both at once.

References:
  Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
  interconnects", ICS 2010: buckets in both directions.
"""

from __future__ import annotations

from dataclasses import replace

from xcoll.algorithms import rings
from xcoll.algorithms.steps import every, repeated, shift
from xcoll.schedule import ClosedForm, Lane, Phase, Schedule, Slots, Step

# A share is two slots: slot 2 s goes up the ring, slot 2 s + 1 down.


def _lane(n: int, way: int, first: int, halves: tuple[int, ...], *, reduce: bool) -> Lane:
    """Returns a lane to the neighbour ``way`` (1 or -1) further.

    At first a rank sends the share of the rank ``first`` further, then of those before it.
    """
    return Lane(
        shift(n, way),
        Slots(every(n, lambda r: (r + first) % n), n, -way, 2, halves),
        Slots(every(n, lambda r: (r + first - way) % n), n, -way, 2, halves),
        reduce,
    )


def _reduce_scatter(n: int) -> tuple[Step, ...]:
    up, down = _lane(n, 1, -1, (0,), reduce=True), _lane(n, -1, 1, (1,), reduce=True)
    return repeated(n - 1, up, down)


def _all_gather(n: int) -> tuple[Step, ...]:
    # Nothing is combined, so a whole share can go each way, half as far; for an even number of
    # ranks the share of the farthest rank comes in halves from both sides.
    far = (n - 1) // 2
    whole = [_lane(n, way, 0, (0, 1), reduce=False) for way in (1, -1)]
    halves = [_lane(n, way, -way * far, (int(way < 0),), reduce=False) for way in (1, -1)]
    return repeated(far, *whole) + (repeated(1, *halves) if n % 2 == 0 else ())


def bidirectional_ring_all_reduce(num_ranks: int) -> Schedule:
    """Builds the bidirectional ring all-reduce: reduce-scatter, then all-gather, both ways.

    The bytes of a ring, half of them each way, in ``n - 1 + n // 2`` steps. Two ranks have one
    neighbour each: then it is the plain ring.
    """
    return _two_way(
        rings.ring_all_reduce(num_ranks), _reduce_scatter(num_ranks) + _all_gather(num_ranks)
    )


def bidirectional_ring_reduce_scatter(num_ranks: int) -> Schedule:
    """Builds the bidirectional ring reduce-scatter: ``n - 1`` steps of half a share each way."""
    return _two_way(rings.ring_reduce_scatter(num_ranks), _reduce_scatter(num_ranks))


def bidirectional_ring_all_gather(num_ranks: int) -> Schedule:
    """Builds the bidirectional ring all-gather: ``n // 2`` steps."""
    return _two_way(rings.ring_all_gather(num_ranks), _all_gather(num_ranks))


def _two_way(ring: Schedule, steps: tuple[Step, ...]) -> Schedule:
    ring = replace(ring, algorithm="bidirectional_ring")
    if ring.num_ranks <= 2:
        return ring
    return replace(ring, num_slots=2 * ring.num_ranks, steps=steps)


def two_way_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of the bidirectional rings."""
    n = num_ranks
    if n <= 2:
        return rings.ring_form(collective, n)
    scatters = (Phase(n - 1, 1, lanes=2, reduce=True),)
    gathers: tuple[Phase, ...] = (Phase((n - 1) // 2, 2, lanes=2),)
    if n % 2 == 0:
        gathers += (Phase(1, 1, lanes=2),)
    phases = {"all_reduce": scatters + gathers, "reduce_scatter": scatters, "all_gather": gathers}
    return ClosedForm(2 * n, phases[collective])
