"""The times of one variant, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xcoll.units import in_digits, readable_seconds


@dataclass(frozen=True)
class Times:
    """Seconds of one variant, one a round.

    Example:
      >>> times = Times((0.9, 0.7, 0.8, 1.4, 0.8))
      >>> times.median_s, times.low_s, times.high_s
      (0.8, 0.8, 0.9)
      >>> print(times)
      800 ms [800, 900]
      >>> print(Times((0.9, 1.1, 0.8)))
      900 ms [850, 1000]
    """

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds_s)

    @property
    def low_s(self) -> float:
        """The lower quartile."""
        return self._quartiles()[0]

    @property
    def high_s(self) -> float:
        """The upper quartile."""
        return self._quartiles()[2]

    def over(self, other: Times) -> float:
        """Returns the median over rounds of this time over the other's of the same round."""
        pairs = zip(self.rounds_s, other.rounds_s, strict=True)
        return statistics.median(mine / others for mine, others in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Returns what a JSON file keeps."""
        return {
            "median_s": self.median_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "rounds_s": list(self.rounds_s),
        }

    def _quartiles(self) -> list[float]:
        if len(self.rounds_s) == 1:
            return [self.rounds_s[0]] * 3
        return statistics.quantiles(self.rounds_s, n=4, method="inclusive")

    def __str__(self) -> str:
        number, unit = readable_seconds(self.median_s).split()
        scale = self.median_s / float(number) if float(number) else 1.0
        low, high = (in_digits(time_s / scale) for time_s in (self.low_s, self.high_s))
        return f"{number} {unit} [{low}, {high}]"


def over_processes(spans_s: Sequence[Sequence[Sequence[float]]], calls: int = 1) -> Times:
    """Returns a variant's times over all processes.

    Args:
      spans_s: for each process and round, start and end on a clock that they share, which
        `time.monotonic` is on one machine.
      calls: calls between a start and its end.

    Example:
      >>> over_processes([[(0.0, 1.0)], [(0.5, 3.0)]])
      Times(rounds_s=(3.0,))
    """
    rounds = zip(*spans_s, strict=True)
    return Times(tuple((max(e for _, e in r) - min(s for s, _ in r)) / calls for r in rounds))
