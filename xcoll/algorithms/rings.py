"""Rings: every rank talks to its neighbours only; optimal bytes, steps linear in the ranks.

References:
  Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  JPDC 69(2), 2009: the ring all-reduce and the lower bound ``2 (n - 1) / n``.
  Chan et al., "Collective communication: theory, practice, and experience", 2007, section 4:
  the bucket (ring) forms of reduce-scatter and all-gather.
"""

from __future__ import annotations

from xcoll.algorithms.steps import every, in_windows, repeated, shift
from xcoll.schedule import ClosedForm, Lane, Phase, Schedule, Slots, Step

_WINDOWS = 8
"""Loops that the pipelined broadcast is cut into."""


def _reduce_scatter(n: int) -> tuple[Step, ...]:
    # Share s starts at rank s + 1 and collects contributions on its way round to rank s.
    lane = Lane(
        shift(n, 1),
        Slots(every(n, lambda r: (r - 1) % n), n, -1),
        Slots(every(n, lambda r: (r - 2) % n), n, -1),
        reduce=True,
    )
    return repeated(n - 1, lane)


def _all_gather(n: int) -> tuple[Step, ...]:
    lane = Lane(
        shift(n, 1),
        Slots(every(n, lambda r: r), n, -1),
        Slots(every(n, lambda r: (r - 1) % n), n, -1),
    )
    return repeated(n - 1, lane)


def ring_all_reduce(num_ranks: int) -> Schedule:
    """Builds the ring all-reduce: a ring reduce-scatter, then a ring all-gather.

    ``2 (n - 1)`` steps of ``1 / n`` of the payload each: the fewest bytes possible.

    >>> ring_all_reduce(8).steps[0].count
    7
    """
    return Schedule(
        algorithm="ring",
        collective="all_reduce",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=_reduce_scatter(num_ranks) + _all_gather(num_ranks),
    )


def ring_reduce_scatter(num_ranks: int) -> Schedule:
    """Builds the ring reduce-scatter: ``n - 1`` steps of one share."""
    return Schedule(
        algorithm="ring",
        collective="reduce_scatter",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=_reduce_scatter(num_ranks),
    )


def ring_all_gather(num_ranks: int) -> Schedule:
    """Builds the ring all-gather: ``n - 1`` steps of one share."""
    return Schedule(
        algorithm="ring",
        collective="all_gather",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=_all_gather(num_ranks),
        enter="own",
    )


def ring_broadcast(num_ranks: int, *, root: int = 0) -> Schedule:
    """Builds the pipelined ring broadcast: ``n`` chunks travel down a chain from the root.

    ``2 (n - 1)`` steps of ``1 / n`` of the payload. While the chain fills and drains some ranks
    have nothing to send, yet the pairs of a loop cannot change: each of eight loops has those
    pairs that send in one of its steps, and on average a rank sends a quarter more than it needs
    to.
    """
    n, num_steps = num_ranks, 2 * (num_ranks - 1)
    place = every(n, lambda r: (r - root) % n)
    # In step t the rank q after the root sends chunk t - q.
    lane = Lane(
        shift(n, 1),
        Slots(every(n, lambda r: -place[r] % n), n, 1),
        Slots(every(n, lambda r: (1 - place[r]) % n), n, 1),
        active=tuple(range(q, q + n) if q < n - 1 else range(0) for q in place),
    )
    bounds = [num_steps * i // _WINDOWS for i in range(_WINDOWS + 1)]
    return Schedule(
        algorithm="ring",
        collective="broadcast",
        num_ranks=n,
        num_slots=n,
        steps=in_windows(lane, bounds),
        root=root,
    )


def ring_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of every ring."""
    n = num_ranks
    if n == 1:
        return ClosedForm(1, ())
    gather = Phase(n - 1, 1)
    if collective == "broadcast":
        return ClosedForm(n, (Phase(2 * (n - 1), 1),))
    if collective == "all_gather":
        return ClosedForm(n, (gather,))
    scatter = Phase(n - 1, 1, reduce=True)
    return ClosedForm(n, (scatter, gather) if collective == "all_reduce" else (scatter,))
