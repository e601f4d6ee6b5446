"""The hierarchy as one pipelined schedule: steps that hold pairs inside hosts and between them.

Where a backend runs collectives one after another, two levels overlap only inside one
permutation. Ranks ``(host, i)`` form a ring inside each host, and in a *mixed* step the ring is
opened at one link, ``i`` to ``i + 1``, which leads to the next host instead: ``(host, i)`` to
``(host + 1, i + 1)``. While the opened link goes round once, every link carries ``inner - 1``
slots of one segment inside, and one slot of another segment between hosts. So one rank of a host
sends out in a mixed step, and hosts send and receive at the same time. Every rank sends in every
step: ``2 num_segments (n - 1)`` steps, as many as it takes to send the fewest possible bytes.

Since a slot moves on by one rank with every hop between hosts, the inner reduce-scatter of
each host ends at a rank that depends on the host.

References:
  Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network
  hierarchy", MLSys 2019, for the decomposition into rings per level.
"""

from __future__ import annotations

from dataclasses import dataclass

from xcoll.algorithms.steps import in_place
from xcoll.schedule import ClosedForm, PermuteStep, Phase, Schedule, Step

_Move = tuple[int, int, int]
"""Source, destination, slot."""


@dataclass(frozen=True)
class _Hosts:
    """``outer`` hosts of ``inner`` ranks; a segment has ``inner * outer`` slots ``(c, o)``.

    Slot ``(c, o)`` is summed over hosts ``o + 1, o + 2, ..., o`` (hops 0 to ``outer - 2``), then
    sent round again; before hop ``h`` it is at rank ``c + h`` of its host.
    """

    outer: int
    inner: int

    def slot(self, segment: int, c: int, o: int) -> int:
        outer, inner = self.outer, self.inner
        return (segment * inner + c % inner) * outer + o % outer

    def inside(self, segment: int, link: int, number: int, *, reduce: bool) -> list[_Move]:
        """Returns what the ``link`` of every host's ring carries as its ``number``-th slot."""
        turn, o = divmod(number, self.outer)
        moves = []
        for host in range(self.outer):
            if reduce:  # ends at rank c + h, where hop h - 1 arrives and hop h starts
                c = link - 1 - turn - (host - o - 1) % self.outer
            else:  # starts where the last hop arrived
                c = link - turn - (self.outer - 1) - (host - o) % self.outer
            source = host * self.inner + link
            destination = host * self.inner + (link + 1) % self.inner
            moves.append((source, destination, self.slot(segment, c, o)))
        return moves

    def between(self, segment: int, link: int, hop: int) -> list[_Move]:
        """Returns what the ``link``, opened, carries to the next host in ``hop``."""
        moves = []
        for host in range(self.outer):
            source = host * self.inner + link
            destination = (host + 1) % self.outer * self.inner + (link + 1) % self.inner
            moves.append((source, destination, self.slot(segment, link - hop, host - 1 - hop)))
        return moves


def _mixed(
    hosts: _Hosts, across: int | None, inside: int | None, first_hop: int, *, reduce: bool
) -> list[list[_Move]]:
    """Returns segment ``across`` between hosts together with segment ``inside`` inside them.

    One of them may be None, at the ends of the pipeline: then the other has the steps to itself.
    """
    links = range(hosts.inner)
    hops = range(first_hop, first_hop + hosts.outer - 1)
    if inside is None:
        assert across is not None
        return [[m for k in links for m in hosts.between(across, k, hop)] for hop in hops]
    steps = []
    carried = [0] * hosts.inner
    if across is not None:
        for hop in hops:
            for opened in links:
                moves = hosts.between(across, opened, hop)
                for link in links:
                    if link != opened:
                        moves += hosts.inside(inside, link, carried[link], reduce=reduce)
                        carried[link] += 1
                steps.append(moves)
    for number in range(carried[0], hosts.outer * (hosts.inner - 1)):
        steps.append([m for k in links for m in hosts.inside(inside, k, number, reduce=reduce)])
    return steps


def pipelined_all_reduce(num_ranks: int, *, dims: tuple[int, ...], num_segments: int) -> Schedule:
    """Builds the pipelined hierarchical all-reduce, ``2 num_segments (n - 1)`` steps.

    First every segment's reduce-scatter, inside hosts and then between them, pipelined; then
    every segment's all-gather, between hosts and then inside them, pipelined.

    Args:
      num_ranks: number of ranks.
      dims: number of hosts, and of ranks in each.
      num_segments: segments of the payload that follow each other through the levels.

    Raises:
      ValueError: ``dims`` are not two levels.
    """
    hosts = _hosts(dims)
    num_slots = num_segments * num_ranks
    steps: list[Step] = []
    for last in range(num_segments + 1):
        ahead = last if last < num_segments else None
        behind = last - 1 if last > 0 else None
        steps += _steps(num_slots, _mixed(hosts, behind, ahead, 0, reduce=True), num_ranks, True)
    for last in range(num_segments + 1):
        ahead = last if last < num_segments else None
        behind = last - 1 if last > 0 else None
        moves = _mixed(hosts, ahead, behind, hosts.outer - 1, reduce=False)
        steps += _steps(num_slots, moves, num_ranks, False)
    return Schedule(
        algorithm="hierarchical",
        collective="all_reduce",
        num_ranks=num_ranks,
        num_slots=num_slots,
        steps=tuple(steps),
    )


def _hosts(dims: tuple[int, ...]) -> _Hosts:
    if len(dims) != 2:
        raise ValueError(
            f"hierarchical(num_segments=...) over levels {dims}: only two levels are pipelined;"
            " use num_segments=1 for other depths"
        )
    return _Hosts(*dims)


def _steps(num_slots: int, steps: list[list[_Move]], n: int, reduce: bool) -> list[Step]:
    return [
        PermuteStep(
            (
                in_place(
                    n,
                    [(a, b) for a, b, _ in moves],
                    [slot for _, _, slot in moves],
                    (0,),
                    num_slots,
                    reduce=reduce,
                ),
            )
        )
        for moves in steps
    ]


def pipelined_form(
    collective: str, num_ranks: int, *, dims: tuple[int, ...], num_segments: int
) -> ClosedForm:
    """Returns the closed form of the pipelined hierarchical all-reduce.

    A mixed step reads like one of a ring over all ranks: one pair of each host leads out.
    """
    del collective
    hosts = _hosts(dims)
    outer, inner, mixed = hosts.outer, hosts.inner, num_segments - 1
    levels = (
        Phase((inner - 1) * outer, 1, block=inner, reduce=True),
        Phase(mixed * (outer - 1) * inner, 1, reduce=True),
        Phase(mixed * (inner - 1), 1, block=inner, reduce=True),
        Phase(outer - 1, 1, distance=inner, reduce=True),
    )
    phases = tuple(phase for phase in levels if phase.steps)
    back = tuple(
        Phase(phase.steps, 1, distance=phase.distance, block=phase.block)
        for phase in reversed(phases)
    )
    return ClosedForm(num_segments * num_ranks, phases + back)
