"""Where the devices of a mesh lie: from what they say of themselves, or from a topology."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xcoll.hardware.links import Level
from xcoll.hardware.mesh import Places, read_places
from xcoll.hardware.placement import Dimension
from xcoll.topology import Topology


def locate(call: str, devices: Sequence[Any], topology: Topology | str | None) -> Places | str:
    """Returns where devices lie; or why that is not known, as text.

    A topology's dimensions hold whatever order its axes are in. Devices that say where they lie
    are believed; others (virtual devices, CPU processes) are numbered row-major over the
    dimensions, in the order of their processes and then of their ids.

    Raises:
      TypeError: ``topology`` is neither a topology nor text.
      ValueError: the topology is malformed, or another number of devices, or of places along a
        dimension of a TPU.
    """
    own = read_places(devices)
    if topology is None:
        return own
    given = read_topology(call, topology, len(devices))
    if given.device is None:
        return given.why_unknown or "the topology is unknown"
    dimensions = _dimensions(given)
    count = math.prod(d.size for d in dimensions)
    if count != len(devices):
        raise ValueError(
            f"{call}: topology {given.name!r} describes {count} devices, the mesh has"
            f" {len(devices)}; give the topology of all of the mesh's devices"
        )
    if isinstance(own, Places) and own.device.kind == given.device.kind:
        found = {d.name: d for d in dimensions if d.size > 1}
        theirs = {d.name: d.size for d in own.dimensions if d.size > 1}
        if theirs == {name: d.size for name, d in found.items()}:
            known = tuple(found.get(d.name, d) for d in own.dimensions)
            return Places(
                device=given.device,
                dimensions=known,
                coordinates=own.coordinates,
                name=given.name,
            )
        if own.device.platform == "tpu":
            raise ValueError(
                f"{call}: topology {given.name!r} does not match the devices, which are"
                f" {own.name!r}; leave topology out, or give theirs"
            )
    order = sorted(range(count), key=lambda i: (devices[i].process_index, devices[i].id))
    coordinates = np.empty((count, len(dimensions)), int)
    if dimensions:
        sizes = [d.size for d in dimensions]
        coordinates[order] = np.indices(sizes).reshape(len(sizes), -1).T
    return Places(
        device=given.device,
        dimensions=dimensions,
        coordinates=coordinates,
        name=given.name,
    )


def read_topology(call: str, topology: Topology | str, num_devices: int) -> Topology:
    """Returns a topology, its text read for so many devices.

    Raises:
      TypeError: it is neither a topology nor text.
      ValueError: malformed text, or of another number of devices.
    """
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str):
        raise TypeError(f"{call}: topology={topology!r} must be a Topology, or text as 'v5e:4x4'")
    whole = Topology.parse(topology)
    try:
        # One axis over everything; some kinds have one or two devices a chip, as the number says.
        return Topology.parse(topology, axes={"all": num_devices})
    except ValueError:
        count = math.prod(whole.axis_sizes.values())
        raise ValueError(
            f"{call}: topology {topology!r} describes {count} devices, the mesh has"
            f" {num_devices}; give the topology of all of the mesh's devices"
        ) from None


def _dimensions(topology: Topology) -> tuple[Dimension, ...]:
    """Returns the dimensions that a topology's axes lie on, the slowest outermost."""
    levels: dict[str, Level] = {}
    for axis in topology.axes:
        for level in reversed(axis.levels):
            levels.setdefault(level.dimension, level)
    made = [
        Dimension(
            name=name,
            size=level.extent,
            link=level.link,
            shared_by=level.shared_by,
            wrap=level.wrap,
            rates_bytes_per_s=level.rates_bytes_per_s,
        )
        for name, level in levels.items()
    ]
    return tuple(sorted(made, key=_how_far_in))


def _how_far_in(dimension: Dimension) -> tuple[int, int, str]:
    """Outermost first, whatever the order of a mesh's axes: ports, torus, inside a chip or host."""
    link = dimension.link
    is_inside = link.kind == "core" or link.network == "memory"
    place = 2 if is_inside else ("switch", "torus").index(link.network)
    rate = 0 if link.network == "torus" else link.bandwidth_bytes_per_s // dimension.shared_by
    return place, rate, dimension.name
