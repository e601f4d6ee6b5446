"""Figures made of results: regret, loss against native, errors of prediction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.regret.grid import Case
from bench.regret.results import Result, Timed

MEDIAN_REGRET, HIGH_REGRET = 0.05, 0.20
"""At most this much may be the median regret, and its 95th percentile."""

LOSS = 0.05
"""No plan may be slower than native by more than this and native's own noise."""

WIRE_ERROR, OTHER_ERROR = 0.15, 0.30
"""Median error of prediction, where the wire is most of the time, and elsewhere."""

_WIRE_BYTES, _WIRE_BITS_PER_S = 4 << 20, 200 * 10**6
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Regret:
    """What choosing cost, in one case under one policy.

    Attributes:
      case: what was done.
      policy: what was permitted.
      chosen: the chosen plan.
      rivals: the plans considered that came near the best, the chosen one among them.
      native: XLA's own collective.
      noise: how far two variants of native are apart.
    """

    case: Case
    policy: str
    chosen: Timed
    rivals: tuple[Timed, ...]
    native: Timed
    noise: float

    @property
    def best(self) -> Timed:
        """The plan with the lowest median."""
        return min(self.rivals, key=lambda timed: timed.median_s)

    @property
    def regret(self) -> float:
        """The chosen plan's time over the best one's, less one.

        Which is the best is seen in one half of the rounds, and what it gains in the other half;
        the mean of both ways round. The lowest of many noisy times by itself is too low.
        """
        return sum(self._regret_of(half) for half in (0, 1)) / 2

    def _regret_of(self, half: int) -> float:
        best = min(self.rivals, key=lambda timed: timed.half_s(1 - half))
        return self.chosen.half_s(half) / best.half_s(half) - 1

    @property
    def loss(self) -> float:
        """By how much the chosen plan is slower than native, beyond native's noise."""
        if (self.chosen.same_as or self.chosen.name) == "native":
            return 0.0
        return self.chosen.median_s / self.native.median_s - 1 - self.noise


def regrets(results: Iterable[Result]) -> Iterator[Regret]:
    """Yields the regret of each case under each policy.

    A policy that considered nothing but what another did, as one with codecs does of payloads that
    stay exact, is the same choice, and counted once.
    """
    for result in results:
        seen: list[tuple[str, list[str]]] = []
        for policy, name in result.chosen.items():
            considered = [timed for timed in result.timed if policy in timed.policies]
            choice = (name, [timed.name for timed in considered])
            if choice in seen:
                continue
            seen.append(choice)
            yield Regret(
                case=result.case,
                policy=policy,
                chosen=next(timed for timed in considered if timed.name == name),
                rivals=tuple(timed for timed in considered if timed.is_contender),
                native=result.timed[0],
                noise=result.native_noise,
            )


@dataclass(frozen=True)
class Point:
    """One plan's time, predicted and measured: that of a program that does nothing else.

    Attributes:
      case: what was done.
      timed: the plan.
      predicted_s: as predicted, with the start of the program.
    """

    case: Case
    timed: Timed
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_s / self.timed.median_s

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of the measured time."""
        return abs(self.ratio - 1)


def points(results: Iterable[Result]) -> list[Point]:
    """Returns a point for each timed program; of plans that are the same program, the first's."""
    return [
        Point(result.case, timed, timed.predicted_s + result.launch_s)
        for result in results
        for timed in result.timed
        if not timed.same_as
    ]


def on_the_wire(case: Case) -> bool:
    """Whether the wire is most of a case's time: from 4 MiB at up to 200 Mbit/s."""
    return case.num_bytes >= _WIRE_BYTES and case.setting.rate_bits_per_s <= _WIRE_BITS_PER_S


def size_class(case: Case) -> str:
    """Returns the class of sizes that a case is in."""
    if case.num_bytes < _SMALL_BYTES:
        return "under 64 KiB"
    return "64 KiB to 4 MiB" if case.num_bytes < _WIRE_BYTES else "from 4 MiB"


def grouped[T](items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Returns items by a key, in the order of its first appearance."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def median(values: Sequence[float]) -> float:
    """Returns the median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile, between the two nearest values in proportion; NaN of nothing.

    Example:
      >>> percentile([4.0, 1.0, 3.0, 2.0, 5.0], 95)
      4.8
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Target:
    """A figure beside what it is to be.

    Attributes:
      name: what it is.
      value: as measured; NaN where nothing was.
      limit: it is to be no more than this.
      count: of what it is made.
    """

    name: str
    value: float
    limit: float
    count: int

    @property
    def is_met(self) -> bool:
        """Whether it was measured, and is within the limit."""
        return self.value <= self.limit


def targets(results: Sequence[Result]) -> list[Target]:
    """Returns the figures that have a target."""
    choices = list(regrets(results))
    costs = [choice.regret for choice in choices]
    losses = [choice.loss for choice in choices]
    all_points = points(results)
    wire = [point.error for point in all_points if on_the_wire(point.case)]
    other = [point.error for point in all_points if not on_the_wire(point.case)]
    return [
        Target("regret, median", median(costs), MEDIAN_REGRET, len(costs)),
        Target("regret, 95th percentile", percentile(costs, 95), HIGH_REGRET, len(costs)),
        Target(
            "slower than native beyond its noise, worst",
            max(losses, default=math.nan),
            LOSS,
            len(losses),
        ),
        Target(
            "error of prediction, median, from 4 MiB at up to 200mbit",
            median(wire),
            WIRE_ERROR,
            len(wire),
        ),
        Target("error of prediction, median, elsewhere", median(other), OTHER_ERROR, len(other)),
    ]
