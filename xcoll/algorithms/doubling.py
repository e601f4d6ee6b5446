"""Recursive doubling and halving: steps logarithmic in the ranks, partners at doubling distance.

For a number of ranks that is no power of two, with ``p`` the largest one below it, the *extra*
ranks ``p + i`` hand what they have to rank ``i`` first and get what they need from it last.

References:
  Rabenseifner, "Optimization of collective reduction operations", ICCS 2004: halving-doubling.
  Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
  MPICH", IJHPCA 19(1), 2005: recursive doubling, and broadcast as scatter and all-gather.
"""

from __future__ import annotations

from xcoll.algorithms.steps import largest_power_of_two, moved
from xcoll.schedule import ClosedForm, Phase, Schedule, Step


def _block(rank: int, size: int, limit: int, n: int) -> tuple[int, ...]:
    """Slots of the ``size`` ranks around ``rank``, and of their extras at ``limit`` and above."""
    first = rank - rank % size
    low = range(first, first + size)
    return (*low, *range(limit + first, min(limit + first + size, n)))


def _extras(n: int, slots: range | None, *, back: bool, reduce: bool) -> tuple[Step, ...]:
    """Returns the step between extras and their partners; own slot of the extra for None."""
    p = largest_power_of_two(n)
    moves = []
    for i in range(n - p):
        pair = (i, p + i) if back else (p + i, i)
        moves.append((*pair, tuple(slots) if slots is not None else (p + i,)))
    return moved(n, moves, n, reduce=reduce)


def _halving(n: int, num_slots: int) -> list[Step]:
    p, steps, size = largest_power_of_two(n), list[Step](), largest_power_of_two(n) // 2
    while size:
        moves = [(r, r ^ size, _block(r ^ size, size, p, num_slots)) for r in range(p)]
        steps += moved(n, moves, num_slots, reduce=True)
        size //= 2
    return steps


def _doubling(n: int, num_slots: int) -> list[Step]:
    p, steps, size = largest_power_of_two(n), list[Step](), 1
    while size < p:
        moves = [(r, r ^ size, _block(r, size, p, num_slots)) for r in range(p)]
        steps += moved(n, moves, num_slots, reduce=False)
        size *= 2
    return steps


def recursive_doubling_all_reduce(num_ranks: int) -> Schedule:
    """Builds the recursive doubling all-reduce: partners swap and combine the whole payload.

    ``floor(log2 n)`` steps, and two more where ``n`` is no power of two.
    """
    n, p = num_ranks, largest_power_of_two(num_ranks)
    steps = list(_extras(n, range(1), back=False, reduce=True))
    size = 1
    while size < p:
        steps += moved(n, [(r, r ^ size, (0,)) for r in range(p)], 1, reduce=True)
        size *= 2
    steps += _extras(n, range(1), back=True, reduce=False)
    return Schedule(
        algorithm="recursive_doubling",
        collective="all_reduce",
        num_ranks=n,
        num_slots=1,
        steps=tuple(steps),
        replicates_sums=True,
    )


def recursive_doubling_all_gather(num_ranks: int) -> Schedule:
    """Builds the recursive doubling all-gather: what is held doubles with every step.

    ``n - 1`` shares sent for a power of two, which is the fewest possible; else the partners
    of extras also send them the whole result.
    """
    n = num_ranks
    steps = [
        *_extras(n, None, back=False, reduce=False),
        *_doubling(n, n),
        *_extras(n, range(n), back=True, reduce=False),
    ]
    return Schedule(
        algorithm="recursive_doubling",
        collective="all_gather",
        num_ranks=n,
        num_slots=n,
        steps=tuple(steps),
        enter="own",
    )


def halving_doubling_reduce_scatter(num_ranks: int) -> Schedule:
    """Builds the recursive halving reduce-scatter: what is summed halves with every step."""
    n = num_ranks
    steps = [
        *_extras(n, range(n), back=False, reduce=True),
        *_halving(n, n),
        *_extras(n, None, back=True, reduce=False),
    ]
    return Schedule(
        algorithm="halving_doubling",
        collective="reduce_scatter",
        num_ranks=n,
        num_slots=n,
        steps=tuple(steps),
    )


def halving_doubling_all_reduce(num_ranks: int) -> Schedule:
    """Builds Rabenseifner's all-reduce: recursive halving, then recursive doubling.

    For a power of two ``2 log2 n`` steps and the fewest bytes possible, ``2 (n - 1) / n``.
    """
    n, p = num_ranks, largest_power_of_two(num_ranks)
    steps = [
        *_extras(n, range(p), back=False, reduce=True),
        *_halving(n, p),
        *_doubling(n, p),
        *_extras(n, range(p), back=True, reduce=False),
    ]
    return Schedule(
        algorithm="halving_doubling",
        collective="all_reduce",
        num_ranks=n,
        num_slots=p,
        steps=tuple(steps),
    )


def doubling_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of recursive doubling."""
    n, p = num_ranks, largest_power_of_two(num_ranks)
    if collective == "all_reduce":
        swaps = [Phase(1, 1, pattern="exchange", distance=d, reduce=True) for d in _sizes(p)]
        return ClosedForm(1, (*_handover(n, 1, reduce=True), *swaps, *_handover(n, 1)))
    return ClosedForm(n, (*_handover(n, 1), *_gathers(n, n), *_handover(n, n)))


def halving_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of halving-doubling, all-reduce and reduce-scatter."""
    n, p = num_ranks, largest_power_of_two(num_ranks)
    if collective == "all_reduce":
        gathers = _gathers(n, p)
        scatters = [_summed(phase) for phase in reversed(gathers)]
        return ClosedForm(p, (*_handover(n, p, reduce=True), *scatters, *gathers, *_handover(n, p)))
    scatters = [_summed(phase) for phase in reversed(_gathers(n, n))]
    return ClosedForm(n, (*_handover(n, n, reduce=True), *scatters, *_handover(n, 1)))


def _handover(n: int, slots: int, *, reduce: bool = False) -> tuple[Phase, ...]:
    p = largest_power_of_two(n)
    return (Phase(1, slots, pattern="exchange", distance=p, reduce=reduce),) if n > p else ()


def _sizes(p: int) -> list[int]:
    return [1 << i for i in range(p.bit_length() - 1)]


def _gathers(n: int, num_slots: int) -> list[Phase]:
    # The busiest ranks are those of the first block: it has the most extras.
    p = largest_power_of_two(n)
    extra = num_slots - p
    return [Phase(1, d + min(d, extra), pattern="exchange", distance=d) for d in _sizes(p)]


def _summed(phase: Phase) -> Phase:
    return Phase(phase.steps, phase.slots, pattern="exchange", distance=phase.distance, reduce=True)
