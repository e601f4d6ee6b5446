"""Reports of meshes: where each axis lies, how fast it is, what a worse order would cost."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from xcoll.device_order import DEFAULT_BYTES, check_traffic
from xcoll.hardware.links import AxisLinks, Level
from xcoll.hardware.mesh import Places, read_levels
from xcoll.layouts import System, extremes, search
from xcoll.plan import Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.systems import locate
from xcoll.topology import Topology
from xcoll.units import readable_bytes, readable_rate, readable_time


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh.

    Attributes:
      name: of the axis.
      size: of the axis.
      levels: what it lies on, innermost first; empty where that is not known, or of size one.
      hosts: hosts (processes, or NVLink domains) that one line along the axis touches.
      slices: TPU slices that it touches.
      num_bytes: payload of the all-reduce that is timed, on each device.
      time_ps: predicted time of XLA's all-reduce of it over this axis; None where unknown.
      best_time_ps: the same for the fastest that an axis of this size could lie on here.
      worst_time_ps: the same for the slowest.
      worst_levels: the slowest, innermost first.
    """

    name: str
    size: int
    levels: tuple[Level, ...] = ()
    hosts: int = 1
    slices: int = 1
    num_bytes: int = DEFAULT_BYTES
    time_ps: int | None = None
    best_time_ps: int | None = None
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
      best_time_ps: the same for the best order of the devices.
      worst_time_ps: the same for the worst.
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
        from rich import box
        from rich.console import Group
        from rich.table import Table

        table = Table(
            title=f"xcoll: mesh on {self.topology.name}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
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
        best, worst = self.best_time_ps or 0, self.worst_time_ps or 0
        text = f"all axes: {readable_time(self.time_ps)} in this order"
        if best < self.time_ps:
            text += f", {readable_time(best)} in the best (xcoll.make_mesh(..., traffic=...))"
        if worst > self.time_ps:
            text += f", {readable_time(worst)} in the worst ({worst / self.time_ps:.1f} x)"
        yield text + ("; no other is faster" if best >= self.time_ps else "")

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=120).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def explain_mesh(
    mesh: Mesh,
    topology: Topology | str | None = None,
    *,
    traffic: Mapping[str, int] | None = None,
) -> MeshReport:
    """Says where each axis of a mesh lies, how fast it is, and what a worse order would cost.

    Args:
      mesh: a `jax.sharding.Mesh`, made by `xcoll.make_mesh` or otherwise.
      topology: what the devices lie on, where they do not say, as in `xcoll.make_mesh`.
      traffic: bytes that each device all-reduces over an axis; by default 64 MiB over each.

    Returns:
      The report. Where nothing is known about the devices it says why.

    Raises:
      TypeError: ``mesh`` has no devices, or an argument has the wrong type.
      ValueError: the topology does not fit the mesh; an axis of ``traffic`` is not there.

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((2, 4), ("host", "device"))
      >>> report = explain_mesh(mesh, "2*cpu:4@200Mbit")
      >>> [(axis.name, axis.hosts, axis.bandwidth_bytes_per_s) for axis in report.axes]
      [('host', 2, 5977377), ('device', 1, None)]
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"explain_mesh({mesh!r}): must be a jax.sharding.Mesh")
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    names = tuple(sizes)
    call = f"explain_mesh({', '.join(f'{k}={v}' for k, v in sizes.items())})"
    axis_bytes = dict.fromkeys(names, DEFAULT_BYTES)
    if traffic is not None:
        axis_bytes = dict(zip(names, check_traffic(call, names, traffic), strict=True))
    # Summed in whole float32.
    axis_bytes = {name: -(-count // 4) * 4 for name, count in axis_bytes.items()}
    places = locate(call, list(mesh.devices.flat), topology)
    found = _read(places, mesh)
    if isinstance(found, str):
        axes = [
            MeshAxis(name=name, size=size, hosts=_processes(mesh, i), num_bytes=axis_bytes[name])
            for i, (name, size) in enumerate(sizes.items())
        ]
        return MeshReport(axes=tuple(axes), topology=Topology.unknown(sizes, found))
    assert isinstance(places, Places)
    described = Topology(axes=found, device=places.device, name=places.name)
    system = System(device=places.device, dimensions=places.dimensions)
    axes = [_axis(mesh, i, described, system, axis_bytes[name]) for i, name in enumerate(sizes)]
    best: int | None = None
    worst: int | None = None
    total = sum(axis.time_ps or 0 for axis in axes)
    if places.is_whole:
        shape, loads = tuple(sizes.values()), tuple(axis_bytes.values())
        best = min(total, search(system, shape, loads).time_ps)
        worst = max(total, search(system, shape, loads, worst=True).time_ps)
    return MeshReport(
        axes=tuple(axes),
        topology=described,
        time_ps=total,
        best_time_ps=best,
        worst_time_ps=worst,
    )


def _read(places: Places | str, mesh: Mesh) -> tuple[AxisLinks, ...] | str:
    if isinstance(places, str):
        return places
    coordinates = places.coordinates.reshape(*mesh.devices.shape, -1)
    found = read_levels(coordinates, places.dimensions, tuple(mesh.axis_names))
    return (
        "its devices lie in an order that no product of axes describes" if found is None else found
    )


def _axis(
    mesh: Mesh, position: int, topology: Topology, system: System, num_bytes: int
) -> MeshAxis:
    links = topology.axes[position]
    fastest, slowest = extremes(system, links.size, num_bytes)
    request = Request(
        collective="all_reduce",
        op="sum",
        axes=(links.name,),
        axis_sizes=(links.size,),
        dtype="float32",
        itemsize=4,
        shapes=((num_bytes // 4,),),
        platform=topology.platform,
    )
    time = plan(request, topology, Policy(algorithm="native")).native_time_ps if num_bytes else 0
    slow = system.levels(slowest)
    return MeshAxis(
        name=links.name,
        size=links.size,
        levels=links.levels,
        hosts=max(_crossed(links.levels, "host"), _processes(mesh, position)),
        slices=_crossed(links.levels, "slice"),
        num_bytes=num_bytes,
        time_ps=time,
        best_time_ps=system.time_ps(system.levels(fastest), num_bytes),
        worst_time_ps=system.time_ps(slow, num_bytes),
        worst_levels=slow,
    )


def _crossed(levels: tuple[Level, ...], dimension: str) -> int:
    return math.prod(level.size for level in levels if level.dimension == dimension)


def _processes(mesh: Mesh, position: int) -> int:
    """Returns the most processes on a line along the axis."""
    shape = mesh.devices.shape
    processes = np.array([d.process_index for d in mesh.devices.flat]).reshape(shape)
    lines = np.sort(np.moveaxis(processes, position, -1).reshape(-1, shape[position]), axis=-1)
    return int((np.diff(lines, axis=-1) != 0).sum(axis=-1).max()) + 1


def _bandwidth(levels: tuple[Level, ...]) -> int | None:
    wires = [level for level in levels if level.size > 1 and level.link.network != "memory"]
    return min((level.bandwidth_bytes_per_s // _sharers(level) for level in wires), default=None)


def _sharers(level: Level) -> int:
    return level.shared_by * (level.stride if level.link.network == "torus" else 1)


_COLUMNS = (
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
