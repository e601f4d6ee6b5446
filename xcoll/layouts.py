"""Layouts: which part of which physical dimension each axis of a mesh lies on, and the best one.

A layout gives each axis a factor of some dimensions. Its time is the sum over axes of what
XLA's own all-reduce of the axis's bytes is predicted to take. The search goes from the heaviest
axis to the lightest, and remembers for every state of the dimensions the best way there; an axis
takes the innermost or the outermost free part of a dimension, so that a lighter axis never lies
inside or around a heavier one on both sides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xcoll.hardware.links import AxisLinks, Device, Level
from xcoll.hardware.placement import Dimension
from xcoll.natives import native_ps
from xcoll.topology import Digit

Part = tuple[int, int, int]
"""Number of a dimension, positions on it, and how far apart they are."""

Parts = tuple[Part, ...]
"""What one axis lies on, innermost first."""

_Free = tuple[tuple[int, int], ...]
"""For each dimension the stride and the size of its part that no axis has taken yet."""

_MOST_STATES = 512
"""States kept an axis. Meshes of up to four axes seldom have as many."""

_FACTOR_TO_BREAK = 2
"""How many times faster a layout must be predicted that breaks a ring."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A system to lay axes over: its devices, its dimensions, outermost first."""

    device: Device
    dimensions: tuple[Dimension, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Positions of each dimension."""
        return tuple(d.size for d in self.dimensions)

    def levels(self, parts: Parts) -> tuple[Level, ...]:
        """Returns what an axis lies on, innermost first."""
        return tuple(self.dimensions[k].level(size, stride) for k, size, stride in parts)

    def time_ps(self, levels: Sequence[Level], num_bytes: int) -> int:
        """Returns the predicted time of XLA's own all-reduce over an axis on these levels."""
        if not num_bytes:
            return 0
        digits, stride = [], 1
        for level in levels:
            if level.size > 1:
                digits.append(Digit("axis", stride, stride, level))
            stride *= level.size
        return native_ps(self.device, tuple(digits), "all_reduce", num_bytes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What each axis lies on, in the mesh's order, and the predicted time of all of them."""

    axes: tuple[Parts, ...]
    time_ps: int

    def coordinates(self, num_dimensions: int) -> np.ndarray[Any, Any]:
        """Returns the coordinates of each position of the mesh, along a last axis."""
        lines = []
        for parts in self.axes:
            size = math.prod(part[1] for part in parts)
            line = np.zeros((size, num_dimensions), int)
            inner = 1
            for k, count, stride in parts:
                line[:, k] += np.arange(size) // inner % count * stride
                inner *= count
            lines.append(line)
        shape = [len(line) for line in lines]
        out = np.zeros((*shape, num_dimensions), int)
        for position, line in enumerate(lines):
            spread = [1] * len(lines)
            spread[position] = len(line)
            out += line.reshape(*spread, num_dimensions)
        return out


def choose(system: System, axis_sizes: Sequence[int], axis_bytes: Sequence[int]) -> Layout:
    """Returns the best layout that leaves rings whole, unless breaking them is far faster.

    A part of a ring is a line, or shares its links with other lines. How XLA travels on parts is
    known less well than on whole rings (`jax.make_mesh` breaks them on v5e only), so that the
    gain must be a factor, as that of a light axis between slices in place of a heavy one.

    Args:
      system: what to lay the axes over; as many places as the axes have positions.
      axis_sizes: of the mesh.
      axis_bytes: payload of an all-reduce over each axis, on each device.
    """
    whole = search(system, axis_sizes, axis_bytes, whole_rings=True)
    free = search(system, axis_sizes, axis_bytes)
    assert free is not None
    if whole is not None and whole.time_ps <= _FACTOR_TO_BREAK * free.time_ps:
        return whole
    return free


def search(
    system: System,
    axis_sizes: Sequence[int],
    axis_bytes: Sequence[int],
    *,
    worst: bool = False,
    whole_rings: bool = False,
) -> Layout | None:
    """Returns the layout of least predicted time.

    Among equals: the one that splits the fewest dimensions, then the one nearest to row-major,
    whose first axes lie on the outermost dimensions. The same in every process: times are
    integers, and the order is total.

    Args:
      system: what to lay the axes over; as many places as the axes have positions.
      axis_sizes: of the mesh.
      axis_bytes: payload of an all-reduce over each axis, on each device.
      worst: the layout of most predicted time instead.
      whole_rings: only layouts in which no dimension that wraps around is divided.

    Returns:
      The layout; None where all divide a ring and none may.
    """
    closed = tuple(d.wrap for d in system.dimensions)
    sign = -1 if worst else 1
    order = sorted(range(len(axis_sizes)), key=lambda i: (-axis_bytes[i], -i))
    start: _Free = tuple((1, size) for size in system.sizes)
    best: dict[_Free, tuple[Any, ...]] = {start: (0, 0, 0, 0, ())}
    for i in order:
        price = functools.cache(functools.partial(_price, system, axis_bytes[i], i))
        found: dict[_Free, tuple[Any, ...]] = {}
        for free, (time, splits, far, inside, taken) in best.items():
            for parts, left in _takes(axis_sizes[i], free):
                if whole_rings and any(closed[k] and n < system.sizes[k] for k, n, _ in parts):
                    continue
                cost = price(parts)
                key = (
                    time + sign * cost[0],
                    splits + cost[1],
                    far + cost[2],
                    inside + cost[3],
                    (*taken, parts),
                )
                if left not in found or key < found[left]:
                    found[left] = key
        kept = sorted(found.items(), key=lambda item: item[1])[:_MOST_STATES]
        best = dict(kept)
    if not best:
        return None
    ((time, *_, taken),) = best.values()
    by_axis = dict(zip(order, taken, strict=True))
    return Layout(axes=tuple(by_axis[i] for i in range(len(order))), time_ps=sign * time)


def slowest(system: System, axis_size: int, num_bytes: int) -> Parts:
    """Returns the slowest that an axis by itself could lie on."""
    start: _Free = tuple((1, size) for size in system.sizes)
    found = (parts for parts, _ in _takes(axis_size, start))
    return min(
        found, key=lambda p: (-system.time_ps(system.levels(p), num_bytes), len(p), p), default=()
    )


def total_ps(system: System, axes: Sequence[AxisLinks], axis_bytes: Sequence[int]) -> int:
    """Returns the predicted time of axes that lie somewhere already."""
    pairs = zip(axes, axis_bytes, strict=True)
    return sum(system.time_ps(axis.levels, num_bytes) for axis, num_bytes in pairs)


def _price(system: System, num_bytes: int, axis: int, parts: Parts) -> tuple[int, int, int, int]:
    """Returns time, parts, and how far from row-major: across dimensions, and inside them."""
    return (
        system.time_ps(system.levels(parts), num_bytes),
        len(parts),
        -sum(_num_factors(size) * axis * k for k, size, _ in parts),
        sum(_num_factors(stride) * axis for _, _, stride in parts),
    )


@functools.lru_cache(maxsize=1 << 14)
def _takes(axis_size: int, free: _Free) -> tuple[tuple[Parts, _Free], ...]:
    """Returns what an axis could lie on, and what it then leaves."""
    return tuple(_take(axis_size, free, len(free) - 1))


def _take(axis_size: int, free: _Free, k: int) -> Iterator[tuple[Parts, _Free]]:
    """Yields the ways to take ``axis_size`` from dimensions ``k`` and outwards."""
    if axis_size == 1:
        yield (), free
        return
    if axis_size > math.prod(size for _, size in free[: k + 1]):
        return
    stride, size = free[k]
    for part in _divisors(math.gcd(axis_size, size)):
        rest = size // part
        choices = [(stride, (stride * part, rest))]
        if 1 < part < size:
            choices.append((stride * rest, (stride, rest)))
        for at, left in choices:
            changed = (*free[:k], left if left[1] > 1 else (1, 1), *free[k + 1 :])
            own = ((k, part, at),) if part > 1 else ()
            for parts, after in _take(axis_size // part, changed, k - 1):
                yield (*own, *parts), after


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


@functools.cache
def _num_factors(number: int) -> int:
    """Returns how many primes a number is the product of."""
    for d in range(2, math.isqrt(number) + 1):
        if number % d == 0:
            return 1 + _num_factors(number // d)
    return int(number > 1)
