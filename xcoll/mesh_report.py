"""Reports of meshes: where each axis lies, how fast it is, what a worse order would cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from xcoll.hardware.links import Level
from xcoll.printing import as_text, plain_table
from xcoll.topology import Topology
from xcoll.units import readable_bytes, readable_rate, readable_time


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh.

    Attributes:
      name: of the axis.
      size: of the axis.
      num_bytes: payload of the all-reduce that is timed, on each device.
      levels: what it lies on, innermost first; empty where that is not known, or of size one.
      hosts: hosts (processes, or NVLink domains) that one line along the axis touches.
      slices: TPU slices that it touches.
      time_ps: predicted time of XLA's all-reduce of it over this axis; None where unknown.
      worst_time_ps: the same for the slowest that an axis of this size could lie on here.
      worst_levels: that, innermost first.
    """

    name: str
    size: int
    num_bytes: int
    levels: tuple[Level, ...] = ()
    hosts: int = 1
    slices: int = 1
    time_ps: int | None = None
    worst_time_ps: int | None = None
    worst_levels: tuple[Level, ...] = ()

    @property
    def bandwidth_bytes_per_s(self) -> int | None:
        """One way, of the slowest link on the axis: one device's share where several use it.

        Devices of a chip or host share a port, and parts of a torus dimension its links: of
        positions ``stride`` apart, as many lines pass one link. A ring has it both ways round.
        """
        return _bandwidth(self.levels)

    @property
    def is_ring(self) -> bool:
        """Whether the axis lies on a torus, and its ends are neighbours on each dimension."""
        torus = [level for level in self.levels if level.link.network == "torus"]
        return bool(torus) and all(level.is_ring for level in torus)


@dataclass(frozen=True, kw_only=True)
class MeshReport:
    """Where the axes of a mesh lie.

    Attributes:
      axes: in the mesh's order.
      topology: of this mesh, for ``xcoll.optimize(topology=...)``: it holds for the order of
        the devices in the mesh. Unknown where that is not known, with the reason.
      time_ps: sum of the axes' times; None where unknown.
      best_time_ps: the same for the order that `xcoll.make_mesh` would choose for this traffic, if
        that is better; None where the mesh has only some of a system's devices.
      worst_time_ps: the same for the worst order.
    """

    axes: tuple[MeshAxis, ...]
    topology: Topology
    time_ps: int | None = None
    best_time_ps: int | None = None
    worst_time_ps: int | None = None

    def axis(self, name: str) -> MeshAxis:
        """Returns the axis of that name.

        Raises:
          KeyError: there is none.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(f"no axis {name!r}; there are {[axis.name for axis in self.axes]}")

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        rows = [
            asdict(axis)
            | {"bandwidth_bytes_per_s": axis.bandwidth_bytes_per_s, "is_ring": axis.is_ring}
            for axis in self.axes
        ]
        return json.dumps(
            {
                "topology": self.topology.name,
                "why_unknown": self.topology.why_unknown,
                "time_ps": self.time_ps,
                "best_time_ps": self.best_time_ps,
                "worst_time_ps": self.worst_time_ps,
                "axes": rows,
            },
            indent=1,
        )

    def __rich__(self) -> Any:
        from rich.console import Group

        table = plain_table(f"xcoll: mesh on {self.topology.name}")
        for name, justify in _COLUMNS:
            table.add_column(name, justify=justify, overflow="fold")
        for axis in self.axes:
            table.add_row(*_row(axis))
        return Group(table, "", *self._notes())

    def _notes(self) -> Iterator[str]:
        yield "time: XLA's all-reduce of these bytes on each device, predicted"
        if self.time_ps is None:
            yield f"unknown: {self.topology.why_unknown}"
            return
        text = f"all axes: {readable_time(self.time_ps)} in this order"
        best, worst = self.best_time_ps, self.worst_time_ps
        if best is not None and best < self.time_ps:
            text += f", {readable_time(best)} in that of xcoll.make_mesh(..., traffic=...)"
        elif best is not None:
            text += ", and xcoll.make_mesh finds none better"
        if worst is not None and worst > self.time_ps:
            text += f"; {readable_time(worst)} in the worst, {worst / self.time_ps:.1f} x as long"
        elif best is not None and best < self.time_ps:
            text += "; this is the worst"
        yield text

    def __str__(self) -> str:
        return as_text(self, least_width=120)


def _bandwidth(levels: tuple[Level, ...]) -> int | None:
    wires = [level for level in levels if level.size > 1 and level.link.network != "memory"]
    return min((level.bandwidth_bytes_per_s // _sharers(level) for level in wires), default=None)


def _sharers(level: Level) -> int:
    return level.shared_by * (level.stride if level.link.network == "torus" else 1)


_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("axis", "left"),
    ("lies on", "left"),
    ("one way", "right"),
    ("ring", "left"),
    ("hosts", "right"),
    ("slices", "right"),
    ("all-reduce", "right"),
    ("time", "right"),
    ("at worst", "right"),
)


def _row(axis: MeshAxis) -> tuple[str, ...]:
    rate = axis.bandwidth_bytes_per_s
    has_torus = any(level.link.network == "torus" for level in axis.levels)
    worst = "-"
    if axis.worst_time_ps is not None and axis.time_ps is not None:
        is_worse = axis.worst_time_ps > axis.time_ps
        worst = readable_time(axis.worst_time_ps) + f"\non {_places(axis.worst_levels)}"
        worst = worst if is_worse else "the same"
    return (
        f"{axis.name}={axis.size}",
        _places(axis.levels) if axis.levels else ("?" if axis.time_ps is None else "one device"),
        "-" if rate is None else readable_rate(rate),
        ("yes" if axis.is_ring else "no") if has_torus else "-",
        str(axis.hosts),
        str(axis.slices),
        readable_bytes(axis.num_bytes),
        readable_time(axis.time_ps),
        worst,
    )


def _places(levels: tuple[Level, ...]) -> str:
    """Returns the levels in words, outermost first."""
    return " x ".join(
        f"{level.dimension} {level.size}"
        + ("" if level.size == level.extent else f" of {level.extent}, every {level.stride}")
        + f" ({level.link.kind})"
        for level in reversed(levels)
    )
