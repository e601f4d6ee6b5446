"""Whether a plan for a TPU follows from the program that XLA was given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, islice

from xcoll.hlo.promised import Given, Promise
from xcoll.hlo.written import Written

TILED = ("all-reduce", "reduce-scatter", "all-gather")
"""What is padded, or carried out as another of them."""

_MOST_STATES = 1000

_Part = tuple[str, tuple[str, ...], int]


def is_planned_from(promises: Sequence[Promise], given: Given) -> bool:
    """Whether the sums and gathers planned are those of the program, each whole or in parts.

    None is missing, and none is too many.
    """
    planned: Counter[_Part] = Counter()
    for p in promises:
        if p.kind in TILED:
            planned[p.kind, p.axes, p.num_bytes] += p.written
    # Everything that can be left of the plan, once it is known where some collectives are in it.
    states = {frozenset(planned.items())}
    for written in given.collectives:
        if written.kind in TILED and written.num_bytes:
            ways = [Counter(way) for way in _ways(written, given)]
            found = (
                frozenset((Counter(dict(state)) - way).items())
                for state in states
                for way in ways
                if way <= Counter(dict(state))
            )
            states = set(islice(found, _MOST_STATES))
    return frozenset() in states


def _ways(written: Written, given: Given) -> Iterator[list[_Part]]:
    """Yields what a collective may become: the most parts first, over any axes that it may have."""
    axes = [axis for axis, size in given.axis_sizes.items() if size > 1]
    if written.axes is not None:
        axes = [axis for axis in axes if axis in written.axes]
    groups = [some for n in range(1, len(axes) + 1) for some in combinations(axes, n)]
    pairs = [(a, b) for a in groups for b in groups if not {*a} & {*b}]
    if written.axes is not None:
        groups = groups[-1:]
        pairs = [(a, b) for a, b in pairs if len(a) + len(b) == len(axes)]
    whole, kind = written.num_bytes, written.kind
    for inside, across in pairs:
        share = _share(written, given, inside)
        for first in TILED[:2]:
            if kind == "all-reduce":
                yield from _sent(
                    written,
                    (first, inside, whole),
                    (kind, across, share),
                    ("all-gather", inside, share),
                )
            if kind == "reduce-scatter":
                yield from _sent(written, (first, inside, whole), (kind, across, share))
        if kind == "all-reduce":
            yield from _sent(written, (kind, inside, whole), (kind, across, whole))
        if kind == "all-gather":
            copies = math.prod(given.axis_sizes[axis] for axis in across)
            yield from _sent(written, (kind, across, whole), (kind, inside, copies * whole))
    for some in groups:
        yield from _sent(written, (kind, some, whole))
        if kind == "reduce-scatter":
            yield from _sent(written, ("all-reduce", some, whole))


def _share(written: Written, given: Given, axes: tuple[str, ...]) -> int:
    """Returns the bytes of a share, of whole elements."""
    itemsize = written.itemsize * (2 if written.is_complex else 1)
    ranks = math.prod(given.axis_sizes[axis] for axis in axes)
    return -(-math.prod(written.dims) // ranks) * itemsize


def _sent(written: Written, *parts: _Part) -> Iterator[list[_Part]]:
    """Yields parts, and where they are of complex numbers, with some of them in two halves."""
    ways: list[list[_Part]] = [[]]
    for kind, axes, size in parts:
        halves = [(kind, axes, size // 2)] * 2
        ways = [
            [*way, *new]
            for way in ways
            for new in (
                [[(kind, axes, size)], halves] if written.is_complex else [[(kind, axes, size)]]
            )
        ]
    yield from ways
