"""What is measured next, so that the time given is used and kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from xcoll.calibration.families import (
    BETWEEN,
    COPIED_SIZES,
    MOVED_SIZES,
    SIZES,
    STARTS,
    Family,
)

MOST_ROUNDS = 15
"""Times that a case is measured at most."""

ROUNDS = 3
"""Further rounds for which there is to be time before a larger size is taken in."""

MOST_CALLS = 30
"""Calls of a short operation in one measurement."""

SHORT_SHARE = 0.2
"""Share of the budget that is kept for further rounds of what is short: it varies most."""

SHORT_S = 0.1
"""Seconds that a measurement takes which is short."""

LONG_ENOUGH_S = 0.04
"""Seconds that a measurement should last: the first calls after a barrier are slow."""

_OFTEN = 3
"""Times in a round that a start is measured."""

_BARRIER_S = 0.003


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    family: Family
    num_bytes: int


@dataclass
class _Known:
    """What a case has cost so far: seconds of one call, and of everything around it."""

    call_s: float
    around_s: float
    count: int = 1
    calls: int = field(default=1)

    @property
    def turn_s(self) -> float:
        return self.call_s * self.calls + self.around_s


class Agenda:
    """Decides what is measured next.

    First every operation once, size by size, as far as time will do for further rounds of all that
    is taken in; then rounds, in an order that changes.

    Args:
      families: what matters most first.
      operand_bytes: what a family is measured with for one of the sizes; 0 where it is left out.
      clock: seconds since the start.
      budget_s: seconds in which all has to be done.
    """

    def __init__(
        self,
        families: Sequence[Family],
        operand_bytes: Callable[[Family, int], int],
        clock: Callable[[], float],
        budget_s: float,
    ):
        self._families = families
        self._clock = clock
        self._budget_s = budget_s
        self._operand_bytes = operand_bytes
        self._known: dict[Case, _Known] = {}
        self._compile_s = 0.1
        self._steps = self._all()

    def next(self) -> tuple[Case, int] | None:
        """Returns a case and how often it is called in a row; None where time is over."""
        return next(self._steps, None)

    def numbers(self, case: Case, calls: int) -> tuple[int, int, int]:
        """Returns what `next` returned as numbers, for the other processes; `case` reads them."""
        return self._families.index(case.family), case.num_bytes, calls

    def case(self, family: int, num_bytes: int, calls: int) -> tuple[Case, int]:
        """Returns the case and the calls that `numbers` wrote."""
        return Case(self._families[family], num_bytes), calls

    def record(self, case: Case, call_s: float, calls: int, took_s: float) -> None:
        """Takes note of a measurement.

        Args:
          case: what was measured.
          call_s: seconds of one call, on the process that took longest.
          calls: how often it was called.
          took_s: seconds for everything, compilation included.
        """
        around = max(0.0, took_s - call_s * calls)
        call_s = max(call_s - _BARRIER_S / calls, 0.1 * call_s)
        known = self._known.get(case)
        if known is None:
            # The call that is not timed, and the program.
            self._compile_s += 0.2 * (max(0.0, around - call_s) - self._compile_s)
            known = self._known[case] = _Known(call_s=call_s, around_s=0.005)
        else:
            known.call_s += 0.5 * (call_s - known.call_s)
            known.around_s += 0.5 * (around - known.around_s)
            known.count += 1
        wanted = round(LONG_ENOUGH_S / max(known.call_s, 1e-6))
        known.calls = min(max(wanted, 1), MOST_CALLS)

    @property
    def share_done(self) -> float:
        """Share of the budget that is over, 0 to 1."""
        return min(1.0, self._clock() / self._budget_s)

    @property
    def num_cases(self) -> int:
        """Cases that were measured."""
        return len(self._known)

    def _left_s(self) -> float:
        return self._budget_s - self._clock()

    def _all(self) -> Iterator[tuple[Case, int]]:
        # Two points make a line: with these, what matters most is known whatever the budget.
        for family in self._families:
            if family.is_needed:
                yield from self._first(family, (SIZES[0], SIZES[3]), always=True)
        yield from self._grow((SIZES[0], SIZES[3]))
        for family in self._families:
            early = (
                COPIED_SIZES if family.is_local else MOVED_SIZES if family.kind == "shift" else ()
            )
            yield from self._first(family, early)
        yield from self._grow(SIZES)
        for number in range(MOST_ROUNDS):
            order = list(self._known)
            if number >= ROUNDS and sum(k.turn_s for k in self._known.values()) > self._left_s():
                order = [case for case, known in self._known.items() if known.turn_s <= SHORT_S]
            order += (_OFTEN - 1) * [case for case in order if case.family.kind in STARTS]
            random.Random(number).shuffle(order)
            before = self._clock()
            done = False
            for case in order:
                known = self._known[case]
                if known.turn_s < self._left_s():
                    done = True
                    yield case, known.calls
            if not done:
                return
            if number >= ROUNDS - 1 and self._left_s() > 2 * (self._clock() - before):
                yield from self._grow((*SIZES, *BETWEEN))

    def _grow(self, sizes: Sequence[int]) -> Iterator[tuple[Case, int]]:
        for num_bytes in sizes:
            for family in self._families:
                yield from self._first(family, (num_bytes,))

    def _first(
        self, family: Family, sizes: Sequence[int], *, always: bool = False
    ) -> Iterator[tuple[Case, int]]:
        for size in sizes:
            case = Case(family, self._operand_bytes(family, size))
            if case in self._known or not case.num_bytes:
                continue
            # Twice at once: the first call is not timed.
            needed = self._compile_s + (2 + ROUNDS) * self._guess_s(case)
            rounds = sum(k.turn_s * max(0, ROUNDS + 1 - k.count) for k in self._known.values())
            kept = SHORT_SHARE * self._budget_s
            if always or needed + rounds < self._left_s() - kept:
                yield case, 1

    def _guess_s(self, case: Case) -> float:
        """Seconds of a call at a size that was not measured, from smaller ones."""
        points = sorted(
            (c.num_bytes, k.call_s)
            for c, k in self._known.items()
            if c.family == case.family and c.num_bytes < case.num_bytes
        )
        if not points:
            return 0.01
        last_bytes, last_s = points[-1]
        ratio = case.num_bytes / last_bytes
        if len(points) == 1:
            return last_s * min(ratio, 8)
        before_bytes, before_s = points[-2]
        slope = max(0.0, last_s - before_s) / (last_bytes - before_bytes)
        return min(last_s * ratio, last_s + 1.3 * slope * (case.num_bytes - last_bytes))
