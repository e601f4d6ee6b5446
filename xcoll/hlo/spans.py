"""Where in the schedule of a compiled program its asynchronous transfers start and end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xcoll.hlo.reader import Collective
from xcoll.hlo.text import WRAPPERS, Computation, Instruction, Module, walk

_SAME = ("bitcast", "copy", "optimization-barrier", "opt-barrier")
_MEETING = "_xla_host_transfer_rendezvous"
_CHAIN = re.compile(r'chain_id="([^"]*)"')


@dataclass(frozen=True)
class Span:
    """What stands between the start and the done of a transfer.

    Attributes:
      row: name of the collective, as `xcoll.hlo.collectives` has it.
      computation: the one in which it starts.
      steps: positions of that computation's instructions, from start to done with both.
    """

    row: str
    computation: str
    steps: tuple[int, ...]


def spans(module: Module, rows: Sequence[Collective]) -> tuple[Span, ...]:
    """Finds the asynchronous transfers of a program.

    The order of a scheduled program (``is_scheduled=true``) is its schedule; in one that is not,
    nothing is known to be asynchronous. Asynchronous are

    * a ``-start`` with its ``-done``, a send or recv with its done, and what such a start calls; on
      GPU not those marked ``"is_sync":true``; where the operand is only handed over by a later
      ``-update``, as to the SparseCores of a TPU, from there;
    * what goes between TPU slices, from the send until its recv is done;
    * collectives whose steps the TPU compiler has fused with compute: the span goes from the first
      of these fusions to the last.

    A transfer that is started in one iteration of a loop and done in the next has the rest of the
    one and the beginning of the other. One that is started before a loop and done in it, or after
    it, has what stands before the loop.

    Args:
      module: the program.
      rows: its collectives.

    Returns:
      One span for each asynchronous transfer.
    """
    if "is_scheduled=true" not in module.header:
        return ()
    schedule = _Schedule(module)
    found = []
    for row in rows:
        i = module.computations[row.computation].instructions[row.name]
        if members := schedule.chains.get(_chain(i) or ()):
            places = [schedule.outside(computation, name) for computation, name in members]
            computation, start = places[0]
            end = max(step for other, step in places if other == computation)
            found.append(Span(row.name, computation, tuple(range(start, end + 1))))
            continue
        computation, start = schedule.outside(row.computation, row.name)
        outer = schedule.at(computation, start)
        starts = outer.opcode.endswith("-start") or outer.opcode in ("send", "recv")
        if starts and '"is_sync":true' not in outer.attributes:
            found.append(Span(row.name, computation, schedule.until_done(computation, start)))
    return tuple(found)


class _Schedule:
    """The order of a program's instructions, and what ends what."""

    def __init__(self, module: Module) -> None:
        self._computations = module.computations
        self._steps = {
            c.name: {name: step for step, name in enumerate(c.instructions)}
            for c in module.computations.values()
        }
        self.chains: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        self._callers: dict[str, tuple[str, str]] = {}
        self._dones: dict[tuple[str, str | int], int] = {}
        self._updates: dict[tuple[str, str | int], int] = {}
        self._receives: dict[tuple[str, str], str] = {}
        for computation, i in walk(module):
            if key := _chain(i):
                self.chains.setdefault(key, []).append((computation.name, i.name))
            if i.opcode in WRAPPERS:
                for _, callee in i.calls():
                    self._callers[callee] = computation.name, i.name
            if i.opcode == "recv" and (meeting := i.attribute(_MEETING)):
                self._receives[computation.name, meeting] = i.name
            if i.opcode.endswith("-update") and len(i.operands) > 1:
                started = self._source(computation, i.operands[0])
                self._updates[computation.name, started] = self._steps[computation.name][i.name]
            if i.opcode.endswith("-done"):
                started = self._source(computation, i.operands[0])
                self._dones[computation.name, started] = self._steps[computation.name][i.name]

    def at(self, computation: str, step: int) -> Instruction:
        """Returns the instruction of a step."""
        return list(self._computations[computation].instructions.values())[step]

    def outside(self, computation: str, name: str) -> tuple[str, int]:
        """Returns the computation and step at which an instruction runs: that of its fusion."""
        while computation in self._callers:
            computation, name = self._callers[computation]
        return computation, self._steps[computation][name]

    def until_done(self, computation: str, start: int) -> tuple[int, ...]:
        """Returns the steps from a start until it is done; for a send, until its recv is."""
        instructions = list(self._computations[computation].instructions.values())
        name = instructions[start].name
        start = self._updates.get((computation, name), start)
        if meeting := instructions[start].attribute(_MEETING):
            name = self._receives.get((computation, meeting), name)
        if (end := self._dones.get((computation, name))) is not None:
            return tuple(range(start, end + 1))
        root = self._computations[computation].instructions[self._computations[computation].root]
        if root.opcode == "tuple":
            for index, operand in enumerate(root.operands):
                end = self._dones.get((computation, index))
                carried = self._source(self._computations[computation], operand) == name
                if carried and end is not None:
                    return (*range(start, len(instructions)), *range(end + 1))
        states = {i.name for i in instructions if i.opcode == "tuple" and name in i.operands}
        for step, i in enumerate(instructions):
            if i.opcode == "while" and i.operands[0] in states:
                return tuple(range(start, step))
        return (start,)

    def _source(self, computation: Computation, name: str) -> str | int:
        """Returns the start that a value stands for, or the element of a loop's state."""
        elements: list[int] = []  # of tuples around it, the innermost first
        while True:
            i = computation.instructions[name]
            if i.opcode == "get-tuple-element":
                elements.append(int(i.attribute("index") or 0))
            elif i.opcode == "parameter" and elements:
                return elements[-1]
            elif i.opcode == "tuple" and elements:
                name = i.operands[elements.pop()]
                continue
            elif i.opcode not in _SAME and not i.opcode.endswith("-update"):
                return i.name
            name = i.operands[0]


def _chain(i: Instruction) -> tuple[str, ...] | None:
    """Returns what the steps of one collective have in common that libtpu prints several times."""
    found = _CHAIN.search(i.attributes)
    return (i.opcode, i.attribute("channel_id") or "", found[1]) if found else None
