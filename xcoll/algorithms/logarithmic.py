"""Bruck's algorithms, and broadcast as scatter and all-gather.

Blocks are numbered relative to the rank, so that every rank moves the same slots; a local
shuffle at the start and at the end translates.

References:
  Bruck et al., "Efficient algorithms for all-to-all communications in multiport
  message-passing systems", IEEE TPDS 8(11), 1997.
  Barnett et al., "Interprocessor collective communication library (InterCom)", SHPCC 1994:
  broadcast as scatter and all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable

from xcoll.algorithms.doubling import halving_form
from xcoll.algorithms.steps import ceil_log2, every, moved, shift
from xcoll.schedule import ClosedForm, Lane, PermuteStep, Phase, Schedule, ShuffleStep, Slots, Step


def bruck_all_to_all(num_ranks: int) -> Schedule:
    """Builds Bruck's all-to-all: ``ceil(log2 n)`` steps, about half of the shares in each.

    The block for the rank ``i`` further travels by the powers of two that make up ``i``.
    """
    n = num_ranks
    steps: list[Step] = []
    for bit in range(ceil_log2(n)):
        blocks = [i for i in range(n) if i >> bit & 1]
        steps.append(relative(n, 1 << bit, blocks, blocks))
    return exchange("bruck", n, steps)


def exchange(algorithm: str, n: int, steps: list[Step]) -> Schedule:
    """Returns an all-to-all whose steps see blocks numbered relative to the rank."""
    # In between, slot i holds the block for rank r + i, or that from rank r - i once moved.
    before = ShuffleStep(every(n, lambda r: r))
    after = ShuffleStep(every(n, lambda r: r), sign=-1)
    return Schedule(
        algorithm=algorithm,
        collective="all_to_all",
        num_ranks=n,
        num_slots=n,
        steps=(before, *steps, after) if n > 1 else (),
    )


def bruck_all_gather(num_ranks: int) -> Schedule:
    """Builds Bruck's all-gather: ``ceil(log2 n)`` steps and ``n - 1`` shares for any ``n``."""
    n = num_ranks
    return Schedule(
        algorithm="bruck",
        collective="all_gather",
        num_ranks=n,
        num_slots=n,
        steps=_gather(n, 0) if n > 1 else (),
        enter="own",
    )


def _gather(n: int, root: int) -> tuple[Step, ...]:
    """All-gathers slot ``q`` from the rank ``q`` after ``root``."""
    steps: list[Step] = [ShuffleStep(every(n, lambda r: (r - root) % n))]
    held = 1
    while held < n:
        count = min(held, n - held)
        steps.append(relative(n, -held, range(count), range(held, held + count)))
        held += count
    steps.append(ShuffleStep(every(n, lambda r: (root - r) % n)))
    return tuple(steps)


def relative(n: int, distance: int, send: Iterable[int], recv: Iterable[int]) -> PermuteStep:
    """Returns a step that sends the same slots of every rank to the rank ``distance`` further."""
    start = (0,) * n
    return PermuteStep(
        (
            Lane(
                shift(n, distance),
                Slots(start, n, pattern=tuple(send)),
                Slots(start, n, pattern=tuple(recv)),
            ),
        )
    )


def halving_doubling_broadcast(num_ranks: int, *, root: int = 0) -> Schedule:
    """Builds the broadcast for long messages: a binomial scatter, then Bruck's all-gather.

    ``2 ceil(log2 n)`` steps, ``2 (n - 1) / n`` of the payload, for any ``n``.
    """
    n = num_ranks
    steps: list[Step] = []
    # The rank q after the root gets slots q, ... of its subtree, so that nothing wraps around.
    for level in reversed(range(ceil_log2(n))):
        size = 1 << level
        moves = [
            (
                (q + root) % n,
                (q + size + root) % n,
                tuple(range(q + size, min(q + 2 * size, n))),
            )
            for q in range(0, n - size, 2 * size)
        ]
        steps += moved(n, moves, n, reduce=False)
    return Schedule(
        algorithm="halving_doubling",
        collective="broadcast",
        num_ranks=n,
        num_slots=n,
        steps=(*steps, *_gather(n, root)) if n > 1 else (),
        root=root,
    )


def _gather_phases(n: int) -> list[Phase]:
    sizes = [1 << level for level in range(ceil_log2(n))]
    return [Phase(1, min(size, n - size), distance=size) for size in sizes]


def halving_doubling_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of halving-doubling, the broadcast included."""
    n = num_ranks
    if collective != "broadcast":
        return halving_form(collective, n)
    gathers = _gather_phases(n)
    scatters = [
        Phase(1, phase.slots, pattern="sparse", distance=phase.distance)
        for phase in reversed(gathers)
    ]
    return ClosedForm(n, (*scatters, *gathers))


def bruck_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of Bruck's algorithms."""
    n = num_ranks
    if collective == "all_gather":
        return ClosedForm(n, tuple(_gather_phases(n)))
    phases = []
    for bit in range(ceil_log2(n)):
        size = 1 << bit
        # Numbers below n with this bit set: whole periods, and what the last one has.
        blocks = n // (2 * size) * size + max(0, n % (2 * size) - size)
        phases.append(Phase(1, blocks, distance=size))
    return ClosedForm(n, tuple(phases))
