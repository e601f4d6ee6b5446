"""One execution of a program on one device, walked along its schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xcoll.hlo.loops import trip_count
from xcoll.hlo.rows import Event, Row
from xcoll.hlo.spans import Span
from xcoll.hlo.text import WRAPPERS, Computation, Instruction, Module
from xcoll.hlo.work import Compute
from xcoll.units import readable_seconds

COMPUTE = "compute"
LOOPS = "loops and branches"

_CALLERS = ("call", "while", "conditional", *WRAPPERS)


@dataclass
class Clock:
    """What has happened so far.

    Attributes:
      events: in the order in which they were found.
      now_s: time since the start.
      computed_s: the part of it that was computation.
    """

    events: list[Event] = field(default_factory=list)
    now_s: float = 0.0
    computed_s: float = 0.0
    _merged: list[tuple[float, str]] = field(default_factory=list)
    _since_s: float = 0.0

    def compute(self, duration_s: float, name: str) -> None:
        """Computes for so long; one event with what was computed just before."""
        if duration_s > 0:
            if not self._merged:
                self._since_s = self.now_s
            self._merged.append((duration_s, name))
            self.now_s += duration_s
            self.computed_s += duration_s

    def flush(self) -> None:
        """Ends the event of what was computed so far."""
        if self._merged:
            name = max(self._merged)[1]
            more = f" and {len(self._merged) - 1} more" if len(self._merged) > 1 else ""
            start_s, self._merged = self._since_s, []
            self.add(COMPUTE, name + more, start_s, self.now_s - start_s)

    def wait(self, row: Row) -> None:
        """Waits for a collective, as long as it is exposed."""
        self.flush()
        duration_s = row.exposed_s or 0.0
        self.add(COMPUTE, f"waits for {row.name}", self.now_s, duration_s, row.name)
        self.now_s += duration_s

    def add(
        self,
        track: str,
        name: str,
        start_s: float,
        duration_s: float,
        row: str | None = None,
        note: str = "",
    ) -> None:
        """Adds an event."""
        self.events.append(
            Event(
                track=track, name=name, start_s=start_s, duration_s=duration_s, row=row, note=note
            )
        )


class Walk:
    """Walks a program.

    Args:
      module: the program.
      rows: its collectives.
      placed: where in the schedule those of them run that are asynchronous.
      compute: how long its instructions take.

    Attributes:
      clock: has the events once `run` has returned.
    """

    def __init__(
        self, module: Module, rows: Iterable[Row], placed: Iterable[Span], compute: Compute
    ):
        self.clock = Clock()
        self._module, self._compute = module, compute
        by_name = {row.name: row for row in rows}
        self._spans: dict[str, dict[int, list[Span]]] = {}
        for span in placed:
            self._spans.setdefault(span.computation, {}).setdefault(span.steps[0], []).append(span)
        self._rows = by_name
        self._awaited: dict[str, dict[str, Row]] = {}  # those of no span, by computation
        running = {span.row for span in placed}
        for row in by_name.values():
            if row.name not in running:
                self._awaited.setdefault(row.computation, {})[row.name] = row
        self._busy = _leading_to(module, (*self._spans, *self._awaited))

    def run(self) -> None:
        """Walks the whole program."""
        self._computation(self._module.computations[self._module.entry])

    def _computation(self, computation: Computation) -> None:
        clock = self.clock
        spans = self._spans.get(computation.name, {})
        awaited = self._awaited.get(computation.name, {})
        last = len(computation.instructions) - 1
        running: dict[int, list[tuple[float, Row]]] = {}
        for step, i in enumerate(computation.instructions.values()):
            for span in spans.get(step, ()):
                clock.flush()
                # What is done in the next iteration is waited for at the end of this one.
                end = last if span.steps[-1] < step else span.steps[-1]
                running.setdefault(end, []).append((clock.now_s, self._rows[span.row]))
            if i.name in awaited:
                self._finish(self.clock.now_s, awaited[i.name])
            self._instruction(computation, i)
            for start_s, row in running.get(step, ()):
                self._finish(start_s, row)

    def _instruction(self, computation: Computation, i: Instruction) -> None:
        called = [name for _, name in i.calls()] if i.opcode in _CALLERS else []
        duration_s = self._compute.instruction_s(computation.name, i.name)
        is_busy = not self._busy.isdisjoint(called)
        if is_busy and i.opcode == "while":
            self._loop(computation, i, duration_s)
        elif is_busy and i.opcode == "conditional":
            self._branch(i, called)
        elif is_busy and i.opcode == "call":
            self._computation(self._module.computations[called[0]])
        else:
            for name in called:  # a fusion, or a wrapped operation
                self._wait_inside(name)
            self.clock.compute(duration_s, i.name)

    def _wait_inside(self, name: str) -> None:
        if name in self._busy:
            for row in self._awaited.get(name, {}).values():
                self._finish(self.clock.now_s, row)
            for i in self._module.computations[name].instructions.values():
                for _, inner in i.calls() if i.opcode in _CALLERS else ():
                    self._wait_inside(inner)

    def _finish(self, start_s: float, row: Row) -> None:
        """Draws a collective that has started, and waits for what of it is exposed."""
        clock = self.clock
        clock.flush()
        if row.exposed_s:
            clock.wait(row)
            start_s = max(start_s, clock.now_s - (row.time_s or 0.0))
        notes = [] if row.time_s is not None else ["its time is not known"]
        notes += ["only if its branch is taken"] if row.conditional else []
        name, duration_s = row.transfer or row.kind, row.time_s or 0.0
        clock.add(track_of(row), name, start_s, duration_s, row.name, "; ".join(notes))

    def _loop(self, computation: Computation, i: Instruction, duration_s: float) -> None:
        """Walks the first iteration; the others are one event."""
        trips = trip_count(self._module, computation.name, i)
        if trips == 0:
            return self.clock.compute(duration_s, i.name)
        clock = self.clock
        clock.flush()
        start_s, computed_s = clock.now_s, clock.computed_s
        for name in dict(i.calls()).values():
            self._computation(self._module.computations[name])
        clock.flush()
        first_s = clock.computed_s - computed_s
        waited_s = clock.now_s - start_s - first_s
        if trips is None:
            note = "how often it repeats is not known: one iteration is drawn, and counted"
            clock.add(LOOPS, f"{i.name}: 1 of ?", start_s, clock.now_s - start_s, None, note)
        elif trips > 1:
            computing_s = max(0.0, duration_s - first_s)
            rest_s = computing_s + (trips - 1) * waited_s
            name = f"{i.name}: iterations 2..{trips}, alike"
            note = f"of it {readable_seconds(computing_s)} computation"
            clock.add(LOOPS, name, clock.now_s, rest_s, None, note)
            clock.now_s += rest_s
            clock.computed_s += computing_s
        return None

    def _branch(self, i: Instruction, called: list[str]) -> None:
        """Walks the branch that takes longest."""
        longest: Clock | None = None
        before = self.clock
        before.flush()
        for name in called:
            self.clock = Clock(now_s=before.now_s, computed_s=before.computed_s)
            self._computation(self._module.computations[name])
            self.clock.flush()
            if longest is None or _extent(self.clock) > _extent(longest):
                longest = self.clock
        assert longest is not None
        # The callers hold the clock: it stays the same.
        self.clock, start_s = before, before.now_s
        before.events += longest.events
        before.now_s, before.computed_s = longest.now_s, longest.computed_s
        note = "the branch that takes longest"
        before.add(LOOPS, i.name, start_s, before.now_s - start_s, None, note)


def _extent(clock: Clock) -> tuple[float, int]:
    """Orders branches: where times are not known, the one with the most to draw is the longest."""
    return clock.now_s, len(clock.events)


def track_of(row: Row) -> str:
    """Returns the links that a collective is on: levels of the topology, or else mesh axes."""
    levels = [level for level, num_bytes in row.level_bytes.items() if num_bytes]
    return "+".join(levels or row.axes or ()) or "collectives"


def _leading_to(module: Module, names: Iterable[str]) -> frozenset[str]:
    """Returns these computations and all that call them, however far."""
    found: set[str] = set()
    frontier = list(names)
    while frontier:
        name = frontier.pop()
        if name not in found:
            found.add(name)
            callers = module.callers.get(name, [])
            frontier += [caller for caller, i, _ in callers if i.opcode in _CALLERS]
    return frozenset(found)
