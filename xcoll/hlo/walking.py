"""One execution of a program on one device, walked along its schedule with two clocks.

One clock counts computation alone, the other also what the device waits. A collective that runs
beside computation is waited for once as much has been computed as hides of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xcoll.hlo.loops import trip_count
from xcoll.hlo.rows import Event, Row
from xcoll.hlo.text import Computation, Instruction, Module
from xcoll.hlo.work import Compute
from xcoll.units import readable_time

COMPUTE = "compute"
LOOPS = "loops and branches"

_CALLERS = ("call", "fusion", "async-start", "while", "conditional")
_PS = 1e-12


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
      rows: its collectives, by computation and name.
      compute: how long its instructions take.

    Attributes:
      clock: has the events once `run` has returned.
    """

    def __init__(self, module: Module, rows: Mapping[str, Mapping[str, Row]], compute: Compute):
        self.clock = Clock()
        self._module, self._rows, self._compute = module, rows, compute
        self._busy = _leading_to(module, rows)
        # Running collectives: computation after which each is waited for, start, row.
        self._running: list[tuple[float, float, Row]] = []

    def run(self) -> None:
        """Walks the whole program."""
        self._computation(self._module.computations[self._module.entry])

    def _computation(self, computation: Computation) -> None:
        outside, self._running = self._running, []
        started = self._rows.get(computation.name, {})
        for i in computation.instructions.values():
            called = self._called(i)
            duration_s = self._compute.instruction_s(computation.name, i.name)
            if i.name in started:
                self._start(started[i.name])
            if called and i.opcode == "while":
                self._loop(computation, i, duration_s)
            elif called and i.opcode == "conditional":
                self._branch(i, called)
            elif called and i.opcode == "call":
                self._computation(self._module.computations[called[0]])
            else:
                for name in called:  # a fusion, or a wrapped operation
                    self._start_inside(name)
                self._advance(duration_s, i.name)
        for running in sorted(self._running, key=lambda running: running[0]):
            self._finish(*running[1:])
        self._running = outside

    def _called(self, i: Instruction) -> list[str]:
        """Returns the computations that an instruction calls and that lead to a collective."""
        if i.opcode not in _CALLERS:
            return []
        return [name for _, name in i.calls() if name in self._busy]

    def _start_inside(self, name: str) -> None:
        for row in self._rows.get(name, {}).values():
            self._start(row)
        for i in self._module.computations[name].instructions.values():
            for inner in self._called(i):
                self._start_inside(inner)

    def _start(self, row: Row) -> None:
        self.clock.flush()
        if not row.exposed_s:
            self._draw(row, self.clock.now_s)
        elif not row.hidden_s:
            self._finish(self.clock.now_s, row)
        else:
            due_s = self.clock.computed_s + row.hidden_s
            self._running.append((due_s, self.clock.now_s, row))

    def _finish(self, start_s: float, row: Row) -> None:
        self.clock.wait(row)
        self._draw(row, max(start_s, self.clock.now_s - (row.time_s or 0.0)))

    def _draw(self, row: Row, start_s: float) -> None:
        notes = [] if row.time_s is not None else ["its time is not known"]
        notes += ["only if its branch is taken"] if row.conditional else []
        name, duration_s = row.transfer or row.kind, row.time_s or 0.0
        self.clock.add(track_of(row), name, start_s, duration_s, row.name, "; ".join(notes))

    def _advance(self, duration_s: float, name: str) -> None:
        """Computes for so long; what is to be waited for meanwhile is waited for."""
        while duration_s > 0:
            running = min(self._running, key=lambda running: running[0], default=None)
            left_s = duration_s if running is None else running[0] - self.clock.computed_s
            if running is None or left_s > duration_s - _PS:
                self.clock.compute(duration_s, name)
                return
            if left_s > _PS:
                self.clock.compute(left_s, name)
                duration_s -= left_s
            self._running.remove(running)
            self._finish(*running[1:])

    def _loop(self, computation: Computation, i: Instruction, duration_s: float) -> None:
        """Walks the first iteration; the others are one event."""
        trips = trip_count(self._module, computation.name, i)
        if trips == 0:
            return self._advance(duration_s, i.name)
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
            note = f"of it {readable_time(round(computing_s / _PS))} computation"
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
            if longest is None or self.clock.now_s > longest.now_s:
                longest = self.clock
        assert longest is not None
        self.clock = longest
        note = "the branch that takes longest"
        taken_s = longest.now_s - before.now_s
        longest.add(LOOPS, i.name, before.now_s, taken_s, None, note)
        longest.events = before.events + longest.events


def track_of(row: Row) -> str:
    """Returns the links that a collective is on: levels of the topology, or else mesh axes."""
    levels = [level for level, num_bytes in row.level_bytes.items() if num_bytes]
    return "+".join(levels or row.axes or ()) or "collectives"


def _leading_to(module: Module, names: Mapping[str, object]) -> frozenset[str]:
    """Returns these computations and all that call them, however far."""
    callers: dict[str, list[str]] = {}
    for computation in module.computations.values():
        for i in computation.instructions.values():
            if i.opcode in _CALLERS:
                for _, callee in i.calls():
                    callers.setdefault(callee, []).append(computation.name)
    found: set[str] = set()
    frontier = list(names)
    while frontier:
        name = frontier.pop()
        if name not in found:
            found.add(name)
            frontier += callers.get(name, [])
    return frozenset(found)
