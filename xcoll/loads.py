"""How many messages of a step share the busiest link of each level, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from xcoll.plan import Span
from xcoll.schedule import Phase
from xcoll.topology import Digit, Topology


@dataclass(frozen=True)
class Load:
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


def loads(digits: tuple[Digit, ...], phase: Phase) -> Iterator[Load]:
    """Yields what one step of ``phase`` puts on each level that has wires.

    All ranks of the span, and all the other spans of the mesh, do the step at the same time.
    Exact for shifts and exchanges whose distance and block fit the levels; else an upper bound.
    """
    for digit in digits:
        level = digit.level
        if level.link.network == "memory":
            continue
        behind = min(level.shared_by, digit.stride)
        # Devices that share the link but lie in other spans send the same at the same time.
        others = level.shared_by // behind
        for count, distance in _moves(digit, phase):
            if count == 0 or distance == 0:
                continue
            messages = min(count, behind) * others
            hops = 1
            if level.link.network == "torus":
                passing, hops = _along(digit, distance, phase)
                messages *= passing
            if phase.lanes > 1 and not _both_ways(digit, phase):
                messages *= phase.lanes
            yield Load(digit, messages, hops)


def _moves(digit: Digit, phase: Phase) -> tuple[tuple[int, int], ...]:
    """Returns pairs: of ``stride`` ranks with equal position, how many move, and how far."""
    stride, size = digit.stride, digit.level.size
    if phase.pattern == "shift":
        block = phase.block or stride * size
        if block <= stride:
            return ()
        whole, rest = divmod(phase.distance % min(block, stride * size), stride)
        return ((stride - rest, whole % size), (rest, (whole + 1) % size))
    if stride % (2 * phase.distance) == 0 or phase.distance % (stride * size) == 0:
        return ()
    positions = max(1, -(-phase.distance // stride))
    if phase.pattern == "exchange":
        return ((min(phase.distance, stride), positions % size or positions),)
    # Sparse: senders are two distances apart, so that a port of `stride` ranks sees one of them.
    return ((1, min(positions, size - 1)),)


def _along(digit: Digit, distance: int, phase: Phase) -> tuple[int, int]:
    """Returns messages that share a torus link, and hops, for moves of ``distance`` positions."""
    level = digit.level
    size = level.size
    block = phase.block // digit.stride if phase.block else size
    positions = min(size, block) if block else size
    if phase.pattern == "sparse":
        hops = min(distance, size - distance) if level.is_ring else distance
        return level.stride, hops * level.stride
    if phase.pattern == "exchange":
        return min(distance, size - 1) * level.stride, min(distance, size - 1) * level.stride
    shorter = min(distance, positions - distance)
    closed = level.is_ring and positions == size
    # On a line the ranks at the end send all the way back.
    hops = shorter if closed else max(distance, positions - distance)
    return max(1, shorter) * level.stride, hops * level.stride


def _both_ways(digit: Digit, phase: Phase) -> bool:
    """Whether two lanes use a link's two directions, so that they do not share bandwidth."""
    return phase.pattern == "shift" and digit.level.link.network == "torus" and digit.level.is_ring
