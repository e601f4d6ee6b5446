"""The levels that the axes of a mesh lie on, before anything is known of the links."""

from __future__ import annotations

import jax
import numpy as np

from xcoll.hardware.mesh import read_levels
from xcoll.systems import locate
from xcoll.topology import Topology

_ANY_RATE = "1Gbit"


def skeleton(mesh: jax.sharding.Mesh) -> Topology:
    """Returns the topology of a mesh, with figures of the hardware tables.

    Between CPU processes, each of which is taken for a host, any rate stands for the one that is
    not known.

    Raises:
      ValueError: the devices are of an unknown kind, or lie in an order that no product of axes
        describes.
    """
    found = Topology.from_mesh(mesh)
    if found.is_known:
        return found
    devices = list(mesh.devices.flat)
    counts = [
        sum(d.process_index == process for d in devices)
        for process in sorted({d.process_index for d in devices})
    ]
    why = found.why_unknown
    if {d.platform for d in devices} == {"cpu"} and len(set(counts)) == 1:
        text = f"{len(counts)}*cpu:{counts[0]}@{_ANY_RATE}"
        places = locate("tune", devices, text)
        assert not isinstance(places, str)
        coordinates = np.asarray(places.coordinates).reshape(*mesh.devices.shape, -1)
        axes = read_levels(coordinates, places.dimensions, tuple(mesh.axis_names))
        if axes is not None:
            return Topology(axes=axes, device=places.device, name=text)
        why = "its devices lie in an order that no product of axes describes"
    raise ValueError(
        f"tune: nothing can be fitted to this mesh: {why}; order its devices by process, as"
        " np.array(jax.devices()).reshape(...) does"
    )
