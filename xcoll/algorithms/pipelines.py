"""The hierarchy as one pipelined schedule: steps that hold pairs inside hosts and between them.

Where a backend runs collectives one after another, two levels overlap only inside one
permutation. Here all ranks form one ring, through the ranks of a host and on to the next host,
and every slot starts at the first rank of a host and ends at the last rank of the host before: it
collects what a host has before it leaves for the next, so that hosts send the fewest
bytes, ``(outer - 1) / outer`` of the payload, where an ordinary ring, whose slots start at every
rank, sends nearly all of it. The slots that start at a host follow each other through the
ring: while one of them is between hosts, others are inside, on the links of the same step.

A step has one of two sets of pairs, so that the program does not grow with the ranks: the ring,
or only its links inside hosts, while the ring fills and drains. The links inside carry the whole
payload, and what nobody needs while not all ranks have something to send: the fast links pay.

References:
  Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel
  Processing Letters 5(2), 1995: segments that follow each other down a chain.
  Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network
  hierarchy", MLSys 2019: each level sums before the next one sends.
"""

from __future__ import annotations

from xcoll.algorithms.steps import backwards, every, in_windows, shift
from xcoll.schedule import ClosedForm, Lane, Phase, Schedule, Slots


def pipelined_all_reduce(num_ranks: int, *, dims: tuple[int, ...], num_segments: int) -> Schedule:
    """Builds the pipelined hierarchical all-reduce.

    With ``k = num_segments - 1`` slots a rank, ``2 (k n + inner - 2)`` steps of one slot, of which
    hosts send to each other in ``2 k (outer - 1) inner``. The all-gather takes the ways of the
    reduce-scatter back.

    Args:
      num_ranks: number of ranks.
      dims: number of hosts, and of ranks in each.
      num_segments: segments that the payload is pipelined in. Two, one slot a rank, keep both
        levels busy; more fill the ring sooner, in more steps.

    Raises:
      ValueError: ``dims`` are not two levels.

    >>> [step.count for step in pipelined_all_reduce(32, dims=(4, 8), num_segments=3).steps]
    [7, 48, 15, 15, 48, 7]
    """
    outer, inner = _two_levels(dims)
    n, last = num_ranks, inner - 1
    at_host = (num_segments - 1) * inner  # slots that start at one host
    crossing, num_slots = (outer - 1) * at_host, outer * at_host

    def slot(rank: int) -> int:
        """Returns what a rank sends in step 0, or would; each step sends the next one."""
        host, place = divmod(rank, inner)
        return ((1 - host) * at_host - place) % num_slots

    def sends(rank: int) -> range:
        # The last rank of a host sends only to the next host: what does not end there.
        place = rank % inner
        return range(place, place + (crossing if place == last else num_slots))

    lane = Lane(
        shift(n, 1),
        Slots(every(n, slot), num_slots, 1),
        Slots(every(n, lambda rank: slot((rank - 1) % n)), num_slots, 1),
        reduce=True,
        active=tuple(map(sends, range(n))),
    )
    scatter = in_windows(lane, (0, last, last + crossing, last + num_slots - 1))
    return Schedule(
        algorithm="hierarchical",
        collective="all_reduce",
        num_ranks=n,
        num_slots=num_slots,
        steps=scatter + backwards(scatter),
    )


def _two_levels(dims: tuple[int, ...]) -> tuple[int, int]:
    if len(dims) != 2:
        raise ValueError(
            f"hierarchical(num_segments=...) over levels {dims}: only two levels are pipelined;"
            " use num_segments=1 for other depths"
        )
    return dims[0], dims[1]


def pipelined_form(
    collective: str, num_ranks: int, *, dims: tuple[int, ...], num_segments: int
) -> ClosedForm:
    """Returns the closed form of the pipelined hierarchical all-reduce.

    The links inside hosts, which form chains, are stated as rings; they carry as much.
    """
    del collective
    outer, inner = _two_levels(dims)
    at_host = (num_segments - 1) * inner
    phases = (
        Phase(inner - 1, 1, block=inner, reduce=True),
        Phase((outer - 1) * at_host, 1, reduce=True),
        Phase(at_host - 1 if inner > 1 else 0, 1, block=inner, reduce=True),
    )
    scatter = tuple(phase for phase in phases if phase.steps)
    gather = tuple(Phase(p.steps, p.slots, block=p.block) for p in reversed(scatter))
    return ClosedForm(outer * at_host, scatter + gather)
