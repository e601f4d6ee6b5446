"""The audit of one compiled program, as data: rows, totals, JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Self

from xcoll import records
from xcoll.hlo.rows import Advice, Event, Row, total_s
from xcoll.memory import Memory

_JSON_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an audit found: every collective of a compiled program, and totals.

    Attributes:
      rows: one a collective operation, in program order.
      axis_sizes: the mesh's axes and their sizes, in its order.
      topology: what the mesh lies on, in words; its first line is the name.
      wire_bytes: bytes that the busiest device sends over each mesh axis in one execution of the
        program; collectives in loops of unknown length count once.
      level_bytes: the same by physical dimension; empty where the topology is not known.
      compute_s: predicted time that a device computes in one execution; None where unknown.
      compute_source: where ``compute_s`` comes from, in words.
      memory: what the program uses of a device's memory; None where XLA does not say.
      advice: what the author is likely to want to change.
      events: the program in time.
    """

    rows: tuple[Row, ...]
    axis_sizes: dict[str, int]
    topology: str
    wire_bytes: dict[str, int]
    level_bytes: dict[str, int]
    compute_s: float | None
    compute_source: str
    memory: Memory | None
    advice: tuple[Advice, ...]
    events: tuple[Event, ...]

    @property
    def communication_s(self) -> float | None:
        """Predicted time of all collectives, one after another; None where not all is known."""
        return total_s((row.time_s, row.runs) for row in self.rows)

    @property
    def exposed_s(self) -> float | None:
        """The part of it that the device waits; None where not all is known."""
        return total_s((row.exposed_s, row.runs) for row in self.rows)

    @property
    def step_s(self) -> float | None:
        """Predicted time of the program: computation and exposed communication."""
        if self.compute_s is None or self.exposed_s is None:
            return None
        return self.compute_s + self.exposed_s

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication as a fraction of ``step_s``."""
        if self.exposed_s is None or not self.step_s:
            return None
        return self.exposed_s / self.step_s

    @property
    def is_complete(self) -> bool:
        """Whether every row was read, and runs a known number of times."""
        return all(not row.unread and row.executions is not None for row in self.rows)

    def counts(self) -> dict[str, int]:
        """Returns the number of collective operations in the program by kind, in rows."""
        return dict(Counter(row.kind for row in self.rows))

    def row(self, name: str) -> Row:
        """Returns the row of an instruction.

        Raises:
          KeyError: there is none of that name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no collective {name!r}; there are {[row.name for row in self.rows]}")

    def to_json(self) -> str:
        """Returns the audit as JSON text; `from_json` reads it back, equal."""
        totals = {
            "communication_s": self.communication_s,
            "exposed_s": self.exposed_s,
            "step_s": self.step_s,
            "exposed_share": self.exposed_share,
            "counts": self.counts(),
        }
        return json.dumps({"version": _JSON_VERSION, "totals": totals, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the audit that `to_json` wrote.

        Raises:
          ValueError: the text is not such an audit: no JSON, another version, a field that is
            missing, unknown, or has a wrong value.
        """

        def make(data: dict[str, Any]) -> Any:
            data.pop("totals", None)
            made = records.read(cls, data, "audit")
            if not made.topology.strip():
                raise ValueError("audit.topology: a name is expected, not an empty text")
            if made.wire_bytes.keys() != made.axis_sizes.keys():
                axes = ", ".join(made.axis_sizes)
                raise ValueError(f"audit.wire_bytes: bytes over each axis are expected: {axes}")
            return made

        what = "an audit written by to_json"
        found: Self = records.decode("Audit.from_json", what, text, _JSON_VERSION, make)
        return found
