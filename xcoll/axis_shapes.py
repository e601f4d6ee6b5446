"""Sizes and names of mesh axes: what is wrong with them, and the nearest sizes that fit."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence


def check_axes(
    call: str, axis_shapes: Sequence[int], axis_names: Sequence[str] | str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the sizes and the names of axes as tuples; one name may be a string.

    Raises:
      TypeError: sizes are no sequence of integers.
      ValueError: a size is below 1, there are more of one than of the other, or a name is repeated.

    Example:
      >>> check_axes("make_mesh", [8], "data")
      ((8,), ('data',))
    """
    try:
        shape = tuple(operator.index(size) for size in axis_shapes)
    except TypeError:
        raise TypeError(
            f"{call}(axis_shapes={axis_shapes!r}): must be a sequence of integers, a size for each"
            " axis"
        ) from None
    if min(shape, default=1) < 1:
        raise ValueError(f"{call}(axis_shapes={shape}): every size must be at least 1")
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if len(names) != len(shape):
        raise ValueError(
            f"{call}({shape}, {names}): {len(shape)} sizes for {len(names)} names; give one for"
            " each"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{call}({shape}, {names}): a name is there twice; name each axis once")
    return shape, names


def does_not_fit(call: str, shape: tuple[int, ...], num_devices: int, why: str = "") -> str:
    """Returns a message with both numbers of devices, and the nearest sizes that fit."""
    near = nearest_shapes(shape, num_devices)
    fix = f"the nearest sizes that fit: {', '.join(map(str, near))}" if near else "give axes"
    return (
        f"{call}: the axes make {math.prod(shape)} devices, there are {num_devices}"
        + (f", {why}" if why else "")
        + f"; {fix}"
    )


def nearest_shapes(shape: Sequence[int], num_devices: int, most: int = 3) -> list[tuple[int, ...]]:
    """Returns the shapes with as many axes that use all devices, nearest first.

    Near is a small sum of squares, over the axes, of the logarithm of the sizes' ratio.

    >>> nearest_shapes((4, 8), 16)
    [(2, 8), (4, 4), (1, 16)]
    """
    best: dict[int, list[tuple[float, tuple[int, ...]]]] = {num_devices: [(0.0, ())]}
    for position, wanted in enumerate(shape):
        is_last = position == len(shape) - 1
        found: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        for left, shapes in best.items():
            for size in [left] if is_last else _divisors(left):
                far = math.log2(size / wanted) ** 2
                longer = [(round(d + far, 9), (*s, size)) for d, s in shapes]
                found.setdefault(left // size, []).extend(longer)
        best = {left: heapq.nsmallest(most, shapes) for left, shapes in found.items()}
    return [shape for _, shape in best.get(1, [])]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
