"""The pairwise exchange: every rank sends to every other what is meant for it, one a step.

A reduce-scatter adds up at the owner of a share, so that nothing is summed twice or passed on: the
bytes of a ring, without its chain of additions, and with a codec one rounding where a ring has one
a hop.

References:
  Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
  MPICH", IJHPCA 19(1), 2005, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

from xcoll.algorithms.logarithmic import exchange, relative
from xcoll.algorithms.steps import every, shift
from xcoll.schedule import ClosedForm, Lane, Layout, PermuteStep, Phase, Schedule, Slots


def pairwise_all_to_all(num_ranks: int) -> Schedule:
    """Builds the pairwise all-to-all: step ``t`` sends one share to the rank ``t`` further."""
    n = num_ranks
    return exchange("pairwise", n, [relative(n, t, [t], [t]) for t in range(1, n)])


def pairwise_reduce_scatter(num_ranks: int) -> Schedule:
    """Builds the pairwise reduce-scatter: ``n - 1`` steps of one share, added up by its owner."""
    return _scheduled("reduce_scatter", num_ranks, (_to_owner,))


def pairwise_all_gather(num_ranks: int) -> Schedule:
    """Builds the pairwise all-gather: step ``t`` sends the own share to the rank ``t`` further."""
    return _scheduled("all_gather", num_ranks, (_from_owner,), enter="own")


def pairwise_all_reduce(num_ranks: int) -> Schedule:
    """Builds the pairwise all-reduce: the reduce-scatter, then the all-gather."""
    return _scheduled("all_reduce", num_ranks, (_to_owner, _from_owner))


def _scheduled(
    collective: str,
    num_ranks: int,
    halves: tuple[Callable[[int, int], PermuteStep], ...],
    enter: Layout = "full",
) -> Schedule:
    return Schedule(
        algorithm="pairwise",
        collective=collective,
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=tuple(half(num_ranks, t) for half in halves for t in range(1, num_ranks)),
        enter=enter,
    )


def _to_owner(n: int, distance: int) -> PermuteStep:
    sent = Slots(every(n, lambda rank: (rank + distance) % n), n)
    return PermuteStep((Lane(shift(n, distance), sent, Slots(every(n, int), n), reduce=True),))


def _from_owner(n: int, distance: int) -> PermuteStep:
    come = Slots(every(n, lambda rank: (rank - distance) % n), n)
    return PermuteStep((Lane(shift(n, distance), Slots(every(n, int), n), come),))


def pairwise_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of every pairwise exchange.

    Its distances are 1 to n - 1; the phase states the middle one, n / 2.
    """
    n = num_ranks
    if n == 1:
        return ClosedForm(1, ())
    once = Phase(n - 1, 1, distance=max(1, n // 2))
    summed = Phase(n - 1, 1, distance=once.distance, reduce=True)
    phases = {"all_reduce": (summed, once), "reduce_scatter": (summed,)}
    return ClosedForm(n, phases.get(collective, (once,)))
