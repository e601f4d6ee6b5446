"""What an audit holds: a row for each collective, advice, events in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MADE_BY = ("user", "differentiation", "partitioner", "xcoll", "unknown")
"""Who puts collectives into a program."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One collective operation of a compiled program.

    All sizes and times are those of one execution on one device.

    Attributes:
      name: the instruction's.
      kind: one of `xcoll.hlo.KINDS`.
      dtypes: of the operands, as HLO writes them (``"f32"``), each once.
      num_bytes: bytes of all operands together, per device; of a recv, what arrives.
      operands: dtype and dimensions of each; several where operations were combined.
      axes: mesh axes it acts over, in the mesh's order; None where that could not be read.
      num_ranks: devices of one group; for permutes, and transfers between TPU slices by pairs,
        devices that take part.
      executions: how often it runs in one execution of the program; None where that depends on a
        loop whose trip count the program does not show.
      conditional: it runs only if a branch is taken; ``executions`` counts it as taken.
      transfer: for a send or recv between TPU slices, the kind of collective it carries out.
      wire_bytes: bytes that the busiest device sends, by mesh axis (`xcoll.hlo.sends`).
      level_bytes: the same by physical dimension of the topology (``"slice"``, ``"x"``, ``"host"``,
        ``"device"``); empty where the topology is not known.
      time_s: predicted time; None where the topology is not known.
      bound_s: no algorithm can be faster over these links; None where the topology is not known.
      is_async: the device can compute while it runs.
      hidden_s: the part of ``time_s`` for which the schedule has computation between its start and
        its done.
      exposed_s: the rest: what the device waits.
      source: ``file:line`` of the user's code; None where the compiler has kept none.
      is_near: ``source`` is that of the nearest operation: for this one the compiler has kept none.
      made_by: one of `MADE_BY`.
      computation: the computation it stands in.
      op_name: the path of JAX's name stack; empty where the compiler has kept none.
      unread: what could not be read of it, and why; empty where all was.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    num_bytes: int
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    axes: tuple[str, ...] | None
    num_ranks: int
    executions: int | None
    conditional: bool
    transfer: str | None
    wire_bytes: dict[str, int]
    level_bytes: dict[str, int]
    time_s: float | None
    bound_s: float | None
    is_async: bool
    hidden_s: float | None
    exposed_s: float | None
    source: str | None
    is_near: bool
    made_by: str
    computation: str
    op_name: str
    unread: str

    @property
    def runs(self) -> int:
        """Executions that totals count: once, where the number is not known."""
        return 1 if self.executions is None else self.executions


def total_s(times: Iterable[tuple[float | None, int]]) -> float | None:
    """Returns the sum of times, each so many times; None where one that counts is not known."""
    total = 0.0
    for time_s, runs in times:
        if time_s is None and runs:
            return None
        total += (time_s or 0.0) * runs
    return total


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Something that its author is likely not to want, where that is certain.

    Attributes:
      kind: what it is, in one word of `xcoll.hlo.advice.KINDS`.
      text: what was found and what to do.
      rows: names of the rows that it is about.
      saves_s: predicted time saved in one execution of the program; None where it is not predicted.
    """

    kind: str
    text: str
    rows: tuple[str, ...]
    saves_s: float | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A stretch of time in one execution of the program on one device, as predicted.

    Attributes:
      track: ``"compute"``, or the link level that a collective is on.
      name: what is done.
      start_s: when it starts, from the start of the program.
      duration_s: how long it takes.
      row: name of its row, for a collective; else None.
      note: what else is to be said, for example how often a loop repeats it.
    """

    track: str
    name: str
    start_s: float
    duration_s: float
    row: str | None
    note: str
