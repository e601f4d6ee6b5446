"""What the meshes of a program lie on: from a lowering's context to a topology."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from xcoll.hardware import profiles
from xcoll.topology import Topology


def check_topology(call: str, topology: Any) -> None:
    """Complains of what is no topology, and of malformed text, before anything is lowered.

    Raises:
      TypeError: it is neither a topology, nor text, nor None.
      FileNotFoundError: it names a profile that is not there.
      ValueError: the text is malformed, or the profile corrupt.
    """
    if topology is not None and not isinstance(topology, Topology | str):
        raise TypeError(
            f"{call}(topology={topology!r}): must be an xcoll.Topology, its text such as"
            f" 'v5e:4x4', or None, not {type(topology).__name__}"
        )
    if isinstance(topology, str):
        path = profiles.path_in(topology)
        if path is None:
            Topology.parse(topology)
        else:
            profiles.load(call, path)


def topology_of(call: str, given: Topology | str | None, mesh: Mesh | None, sizes: Any) -> Any:
    """Returns what a mesh lies on: as the user said, or else read off its devices.

    Args:
      call: the public function, for messages.
      given: a topology, its text, a profile's file (``"profile:FILE"``, or what ends in ``.json``),
        or None.
      mesh: the mesh, or None where its devices are not known.
      sizes: its axes and their sizes, in its order.

    Returns:
      The topology; None where nothing is said and there are no devices.

    Raises:
      FileNotFoundError: there is no such profile.
      ValueError: the given topology does not match the mesh; both are shown. A profile of another
        mesh, or one for a mesh whose devices are not known.
    """
    path = profiles.path_in(given) if isinstance(given, str) else None
    if path is not None:
        if mesh is None:
            raise ValueError(
                f"{call}(topology={given!r}): a profile holds for the devices it was measured on,"
                " and those of this mesh are not known here; give Topology.load(path, mesh)"
            )
        return Topology.load(path, mesh)
    if isinstance(given, str):
        return Topology.parse(given, axes=sizes)
    if given is not None:
        given.check(call, sizes)
        return given
    return None if mesh is None else Topology.from_mesh(mesh)


@dataclass
class Hardware:
    """The topologies of the meshes in one program.

    Attributes:
      given: what the user said: a topology, its text, or None to read it off the devices.
      platform: the platform that is lowered for.
      devices: the devices of the program, if it has any.
    """

    given: Topology | str | None
    platform: str
    devices: tuple[Any, ...] | None = None
    _seen: dict[Any, Topology | None] = field(default_factory=dict)

    def topology(self, mesh: Any) -> Topology | None:
        """Returns the topology of a mesh, or None where nothing is known of it.

        Raises:
          ValueError: the given topology does not match the mesh; both are shown.
        """
        if mesh not in self._seen:
            self._seen[mesh] = self._find(mesh)
        return self._seen[mesh]

    def concrete(self, mesh: Any) -> Mesh | None:
        """Returns ``mesh`` with its devices, or None where they are not known."""
        if isinstance(mesh, Mesh):
            return mesh
        if mesh is None or not self.devices or len(self.devices) != mesh.size:
            return None
        return Mesh(np.array(self.devices).reshape(mesh.axis_sizes), mesh.axis_names)

    def meshes(self) -> tuple[Mesh, ...]:
        """Returns the meshes that were planned for, those with known devices."""
        return tuple(m for m in map(self.concrete, self._seen) if m is not None)

    def describe(self) -> str:
        """Returns what was planned for, in words."""
        known = dict.fromkeys(str(t) for t in self._seen.values() if t is not None)
        return "; ".join(known) or "unknown (every plan is native)"

    def _find(self, mesh: Any) -> Topology | None:
        found: Topology | None = topology_of(
            "optimize", self.given, self.concrete(mesh), dict(mesh.shape)
        )
        return found
