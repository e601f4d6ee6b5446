"""How many messages of a step share the busiest link of each level, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xcoll.plan import Span
from xcoll.schedule import Phase
from xcoll.topology import Digit, Topology


@dataclass(frozen=True)
class OnLink:
    """What a step puts on one level.

    Attributes:
      digit: the level, as the ranks of the span see it.
      messages: messages on its busiest link, in the busier direction.
      hops: links that the farthest message passes.
    """

    digit: Digit
    messages: int
    hops: int


def span_digits(topology: Topology, span: Span) -> tuple[Digit, ...]:
    """Returns the levels that the ranks of ``span`` lie on, innermost first.

    Strides are those of ranks of the span. Neighbouring levels that are pieces of the same physical
    dimension are joined.
    """
    out: list[Digit] = []
    for digit in topology.digits(span.axes):
        if not span.stride <= digit.stride < span.stride * span.num_ranks:
            continue
        digit = replace(digit, stride=digit.stride // span.stride)
        joined = _join(out[-1], digit) if out else None
        if joined is not None:
            out[-1] = joined
        else:
            out.append(digit)
    return tuple(out)


def _join(low: Digit, high: Digit) -> Digit | None:
    a, b = low.level, high.level
    if (a.dimension, a.link) != (b.dimension, b.link) or low.stride * a.size != high.stride:
        return None
    if b.stride != a.stride * a.size:
        return None
    return replace(low, level=replace(a, size=a.size * b.size))


def loads(digits: tuple[Digit, ...], phase: Phase) -> Iterator[OnLink]:
    """Yields what one step of ``phase`` puts on each level that has wires.

    All ranks of the span, and all the other spans of the mesh, do the step at the same time.
    Exact for shifts and exchanges whose distance and block fit the levels; else an upper bound.
    """
    ranks = math.prod(digit.level.size for digit in digits)
    for digit in digits:
        level = digit.level
        if level.link.network == "memory":
            continue
        behind = min(level.shared_by, digit.stride)
        # Devices that share the link but lie in other spans send the same at the same time.
        others = level.shared_by // behind
        moves = [(c, d) for c, d in _moves(digit, phase, ranks) if c and d]
        through = sum(count for count, _ in moves)
        for count, distance in moves:
            torus = level.link.network == "torus"
            messages = min(count if torus else through, behind) * others
            hops = 1
            if torus:
                passing, hops = _along(digit, distance, phase, ranks)
                messages *= passing
            if phase.lanes > 1 and not _both_ways(digit, phase):
                messages *= phase.lanes
            yield OnLink(digit, messages, hops)


def twin_tree_loads(digits: tuple[Digit, ...]) -> Iterator[OnLink]:
    """Yields the same for a step of the pipelined double tree, whose closed form has no distances.

    The edges of all depths are in use at the same time. Two of them lead out of a block of ranks;
    in a line of n, log2(n) / 2 + 1 of them pass a link, rounded down (seen on the schedules of up
    to 256 ranks).
    """
    ranks = math.prod(digit.level.size for digit in digits)
    for digit in digits:
        level = digit.level
        if level.link.network == "memory":
            continue
        behind = min(level.shared_by, digit.stride)
        messages = min(2, behind) * (level.shared_by // behind)
        hops = 1
        if level.link.network == "torus":
            messages *= ((ranks - 1).bit_length() // 2 + 1) * level.stride
            hops = max(1, level.size // 2 if level.is_ring else level.size - 1) * level.stride
        yield OnLink(digit, messages, hops)


def _moves(digit: Digit, phase: Phase, ranks: int) -> tuple[tuple[int, int], ...]:
    """Returns pairs: of ``stride`` ranks with equal position, how many move, and how far."""
    stride, size = digit.stride, digit.level.size
    distance = phase.distance
    if phase.pattern == "shift":
        block = phase.block or stride * size
        if block <= stride:
            return ()
        whole, rest = divmod(distance % min(block, stride * size), stride)
        return ((stride - rest, whole % size), (rest, (whole + 1) % size))
    block = phase.block or 2 * distance
    if stride % block == 0 or distance % (stride * size) == 0:
        return ()
    positions = max(1, distance // stride % size)
    if phase.pattern == "exchange":
        # The ranks beyond a power of two hand over to partners: only those move.
        movers = min(distance, ranks - distance)
        return ((min(movers, stride), positions),)
    if block % stride == 0 and distance < stride:
        # Parents stand where a port's ranks begin.
        return ()
    # Sparse: senders are a block apart, so that a port of `stride` ranks sees one of them.
    return ((1, positions),)


def _along(digit: Digit, distance: int, phase: Phase, ranks: int) -> tuple[int, int]:
    """Returns messages that share a torus link, and hops, for moves of ``distance`` positions."""
    level = digit.level
    size = level.size
    if phase.pattern != "shift":
        hops = min(distance, size - distance) if level.is_ring else distance
        if phase.pattern == "sparse":
            return level.stride, hops * level.stride
        movers = max(1, min(phase.distance, ranks - phase.distance) // digit.stride)
        return min(distance, movers) * level.stride, hops * level.stride
    block = phase.block // digit.stride if phase.block else size
    positions = min(size, block) if block else size
    shorter = min(distance, positions - distance)
    closed = level.is_ring and positions == size
    # On a line the ranks at the end send all the way back.
    hops = shorter if closed else max(distance, positions - distance)
    return max(1, shorter) * level.stride, hops * level.stride


def _both_ways(digit: Digit, phase: Phase) -> bool:
    """Whether two lanes use a link's two directions, so that they do not share bandwidth."""
    return phase.pattern == "shift" and digit.level.link.network == "torus" and digit.level.is_ring
