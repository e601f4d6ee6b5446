"""What collectives took where they were measured: times by size, and rates of codecs."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xcoll.hardware.fields import many, one_of, whole, word

Points = tuple[tuple[int, int], ...]
"""Pairs of bytes and picoseconds."""

MEASURABLE = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""XLA's collectives of which a topology may hold a curve."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The measured time of one of XLA's own collectives, by the size of its operand.

    Attributes:
      collective: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"`` or ``"all_to_all"``.
      axes: the mesh axes it goes over, all of each; their order does not matter.
      points: ``(operand_bytes, time_ps)`` on each rank, at least two, both rising (times may stay).

    Raises:
      TypeError: a field has the wrong type.
      ValueError: an unknown collective; no axes, or one twice; fewer than two points, or points
        that do not rise; a number that has a fraction or is out of range.

    Example:
      >>> curve = Curve(collective="all_reduce", axes=("host",), points=((1000, 50), (3000, 150)))
      >>> [curve.time_ps(num_bytes) for num_bytes in (10, 1000, 2000, 5000)]
      [50, 50, 100, 250]
    """

    collective: str
    axes: tuple[str, ...]
    points: Points

    def __post_init__(self) -> None:
        one_of("Curve", "collective", self.collective, MEASURABLE)
        axes = many("Curve", "axes", self.axes, str)
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(f"Curve(axes={axes!r}): name one mesh axis or several, each once")
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "points", rising_points("Curve", "points", self.points))

    def time_ps(self, num_bytes: int) -> int:
        """Returns the time for an operand of so many bytes on each rank, in picoseconds.

        Between two points, and beyond the last one, on the straight line through two neighbours;
        below the first one its time. In integers, rounded up.
        """
        return between(self.points, num_bytes)


@dataclass(frozen=True, kw_only=True)
class CodecRate:
    """How fast a device encodes and decodes, all devices of its host at the same time.

    Attributes:
      codec: as `str` writes the codec: ``"int8"``, ``"int4"``, ``"cast(bfloat16)"``.
      encode_bytes_per_s: bytes of float32 that are encoded.
      decode_bytes_per_s: bytes of float32 that decoding gives.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a number has a fraction or is out of range; an empty name.
    """

    codec: str
    encode_bytes_per_s: int
    decode_bytes_per_s: int

    def __post_init__(self) -> None:
        word("CodecRate", "codec", self.codec)
        for name in ("encode_bytes_per_s", "decode_bytes_per_s"):
            object.__setattr__(self, name, whole("CodecRate", name, getattr(self, name), 1))


def between(points: Points, num_bytes: int) -> int:
    """Returns the time of so many bytes on a curve, rounded up.

    Between two points, and beyond the last one, on the straight line through two neighbours; below
    the first one its time.
    """
    if num_bytes <= points[0][0]:
        return points[0][1]
    right = bisect.bisect_left(points, num_bytes, key=lambda point: point[0])
    right = min(right, len(points) - 1)
    (low, start), (high, end) = points[right - 1 : right + 1]
    return start - (start - end) * (num_bytes - low) // (high - low)


def rising_points(call: str, name: str, value: Any) -> Points:
    """Returns the points of a curve, checked.

    Raises:
      TypeError: they are no tuple of pairs of whole numbers.
      ValueError: fewer than two, or they do not rise.
    """

    def point(value: Any) -> tuple[int, int]:
        pair = many(call, name, value)
        if len(pair) != 2:
            raise ValueError(f"{call}({name}=...): {pair!r} is no pair (bytes, time_ps)")
        return whole(call, name, pair[0], 0), whole(call, name, pair[1], 0)

    points = tuple(map(point, many(call, name, value)))
    if len(points) < 2:
        raise ValueError(f"{call}({name}={points!r}): give at least two, to draw a line through")
    for low, high in pairwise(points):
        if low[0] >= high[0] or low[1] > high[1]:
            raise ValueError(
                f"{call}({name}=...): {low} is followed by {high}; list them by rising bytes, with"
                " times that do not fall"
            )
    return points
