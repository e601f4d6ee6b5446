"""What a calibration found: samples, fitted terms with their errors, and the topology."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from xcoll.hardware.profiles import System, encode
from xcoll.printing import as_text, plain_table
from xcoll.topology import Topology
from xcoll.units import readable_rate, readable_seconds


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measurements of one operation at one size.

    Attributes:
      kind: the operation (`xcoll.calibration.families.Family`).
      axes: mesh axes it goes over.
      of: the physical dimension of a permute, or the codec.
      num_bytes: of the operand, on each rank.
      median_s: of the times, each that of the process that took longest.
      spread_s: 1.4826 times the median distance from the median: the standard deviation, where
        times are normal.
      count: measurements.
    """

    kind: str
    axes: tuple[str, ...]
    of: str
    num_bytes: int
    median_s: float
    spread_s: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Term:
    """One fitted term of the cost model.

    Attributes:
      name: of the field that it fills, ``"host: latency_ps"`` or ``"all_reduce over host"``.
      value: in the unit of that field; of a curve, the rate at its end in bytes per second.
      unit: ``"s"``, ``"bytes/s"`` or ``"%"``.
      error: median over the points it was fitted to of ``|fitted / measured - 1|``; of a curve,
        which passes through its points, of the points' spread over their median.
      worst: the largest.
      points: how many.
    """

    name: str
    value: float
    unit: str
    error: float
    worst: float
    points: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `xcoll.tune` measured and fitted.

    Attributes:
      system: the mesh that was measured.
      made: when, in UTC, as ISO 8601.
      took_s: seconds that it took.
      samples: what was measured.
      terms: what was fitted, with the errors of the fit.
      topology: to plan with: links, device and curves as fitted.
      path: of the profile that was written; `Topology.load` reads it.
    """

    system: System
    made: str
    took_s: float
    samples: tuple[Sample, ...]
    terms: tuple[Term, ...]
    topology: Topology
    path: str = ""

    def to_json(self) -> str:
        """Returns the text of the profile, as it is written to a file."""
        values: dict[str, Any] = {
            "system": asdict(self.system),
            "made": self.made,
            "took_s": self.took_s,
            "samples": [asdict(sample) for sample in self.samples],
            "terms": [asdict(term) for term in self.terms],
            # `Topology.load` calls it by the file's name.
            "topology": json.loads(replace(self.topology, name="measured").to_json()),
        }
        return encode(values)

    def __rich__(self) -> Any:
        from rich.console import Group

        sizes = zip(self.system.axes, self.system.axis_sizes, strict=True)
        axes = ", ".join(f"{axis}={size}" for axis, size in sizes)
        table = plain_table(
            f"xcoll tune: {axes} of {self.system.device_kind}, {len(self.samples)} cases in"
            f" {self.took_s:.1f} s"
        )
        table.add_column("term")
        for name in ("value", "error", "worst", "points"):
            table.add_column(name, justify="right", no_wrap=True)
        for term in self.terms:
            table.add_row(
                term.name,
                _readable(term),
                f"{term.error:.1%}",
                f"{term.worst:.1%}",
                str(term.points),
            )
        notes = [
            "error: |fitted / measured - 1|, median and worst over the points; of curves, the"
            " spread of a point over its median",
            f"profile: {self.path}" if self.path else "profile: not written",
        ]
        return Group(table, "", *notes)

    def __str__(self) -> str:
        return as_text(self)


_FASTEST_BYTES_PER_S = 10**14
"""No memory is as fast; a curve is, whose last two sizes took the same time."""


def _readable(term: Term) -> str:
    """Writes a value with its unit.

    Example:
      >>> rate = Term(name="sum", value=4.8e9, unit="bytes/s", error=0.1, worst=0.1, points=1)
      >>> _readable(rate), _readable(replace(rate, value=2.6e17))
      ('4.8 GB/s', 'flat')
    """
    if term.unit == "s":
        return readable_seconds(term.value)
    if term.unit == "bytes/s" and term.value > _FASTEST_BYTES_PER_S:
        return "flat"
    if term.unit == "bytes/s":
        return readable_rate(round(term.value))
    return f"{term.value:.0f} {term.unit}"
