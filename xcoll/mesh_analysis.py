"""Reads a mesh: where its axes lie, and how that compares with other orders."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from xcoll.device_order import DEFAULT_BYTES, Audited, check_traffic
from xcoll.hardware.links import AxisLinks, Level
from xcoll.hardware.mesh import Places, read_levels
from xcoll.layouts import System, choose, search, slowest
from xcoll.mesh_report import MeshAxis, MeshReport
from xcoll.plan import Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.systems import locate
from xcoll.topology import Topology


def explain_mesh(
    mesh: Mesh,
    topology: Topology | str | None = None,
    *,
    traffic: Mapping[str, int] | Audited | None = None,
) -> MeshReport:
    """Says where each axis of a mesh lies, how fast it is, and what a worse order would cost.

    Args:
      mesh: a `jax.sharding.Mesh`, made by `xcoll.make_mesh` or otherwise.
      topology: what the devices lie on, where they do not say, as in `xcoll.make_mesh`.
      traffic: bytes that each device all-reduces over an axis, or an `xcoll.audit`, as in
        `xcoll.make_mesh`; by default 64 MiB over each.

    Returns:
      The report. Where nothing is known about the devices it says why.

    Raises:
      TypeError: ``mesh`` has no devices, or an argument has the wrong type.
      ValueError: the topology does not fit the mesh; an axis of ``traffic`` is not there,
        or an audit has other axes.

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((2, 4), ("host", "device"))
      >>> report = explain_mesh(mesh, "2*cpu:4@200Mbit")
      >>> [(axis.name, axis.hosts, axis.bandwidth_bytes_per_s) for axis in report.axes]
      [('host', 2, 5977542), ('device', 1, None)]
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
        slow = search(system, shape, loads, worst=True)
        assert slow is not None
        best = min(total, choose(system, shape, loads).time_ps)
        worst = max(total, slow.time_ps)
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
    slow = system.levels(slowest(system, links.size, num_bytes))
    return MeshAxis(
        name=links.name,
        size=links.size,
        levels=links.levels,
        hosts=max(_crossed(links.levels, "host"), _processes(mesh, position)),
        slices=_crossed(links.levels, "slice"),
        num_bytes=num_bytes,
        time_ps=time,
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
