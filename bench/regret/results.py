"""What was measured, kept in a file that later runs add to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.regret.grid import Case
from bench.timing import write_json
from xcoll import records

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The times of one plan.

    Attributes:
      name: how the plan reads.
      kind: what kind of plan it is (`bench.regret.considered.kind_of`).
      predicted_s: the predicted time.
      policies: under which it was considered.
      same_as: name of the plan before it whose program, and so whose times, it shares; else empty.
      is_contender: whether it came near enough to the best to be timed in the further rounds, as
        native and the chosen plans are in any case.
      rounds_s: seconds, one a round. Native is timed as two variants; these are both.
    """

    name: str
    kind: str
    predicted_s: float
    policies: tuple[str, ...]
    same_as: str
    is_contender: bool
    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds_s)

    def half_s(self, half: int) -> float:
        """The median over every second round, from the first (0) or the second (1) on."""
        return statistics.median(self.rounds_s[half::2] or self.rounds_s)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case's plans took.

    Attributes:
      case: what was done.
      chosen: name of the chosen plan, by policy.
      timed: all plans that were timed, native first.
      native_noise: how far two variants of native are apart, as a part of the faster one.
      too_slow: plans not timed, since they are predicted too slow.
      barred: plans not timed, since the planner may not choose them.
      topology: name of what they were planned for.
      launch_s: seconds that starting a program takes, which no plan's prediction holds.
      machine: where they were timed.
    """

    case: Case
    chosen: dict[str, str]
    timed: tuple[Timed, ...]
    native_noise: float
    too_slow: tuple[str, ...]
    barred: tuple[str, ...]
    topology: str
    launch_s: float
    machine: str


@dataclass(frozen=True)
class _File:
    results: tuple[Result, ...]


def read(path: Path) -> list[Result]:
    """Returns what a file holds; nothing where there is none.

    Raises:
      ValueError: it holds something else.
      OSError: it can't be read.
    """
    if not path.exists():
        return []

    def make(data: dict[str, Any]) -> _File:
        made: _File = records.read(_File, data, "results")
        return made

    found = records.decode(str(path), "results of bench.regret", path.read_text(), _VERSION, make)
    return list(found.results)


def write(path: Path, results: Sequence[Result]) -> None:
    """Writes results, the whole file or nothing.

    Raises:
      OSError: it can't be written.
    """
    write_json(path, {"version": _VERSION, "results": [asdict(result) for result in results]})
