"""What the collectives of a compiled program take on a topology, and could take at best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jax.sharding import Mesh

from xcoll.costmodel import native_as
from xcoll.hardware import kinds, load
from xcoll.hardware.mesh import read_levels
from xcoll.hardware.placement import Dimension
from xcoll.hlo.bounds import bound_s_per_byte
from xcoll.hlo.link_loads import Traffic, pair_traffic, ring_traffic
from xcoll.hlo.reader import Collective
from xcoll.hlo.wires import (
    Ends,
    Sent,
    Wires,
    busiest,
    bytes_of_run,
    carried,
    sent_along,
)
from xcoll.natives import PS, native_ps
from xcoll.routes import Ints, Routes
from xcoll.topology import Device, Digit, Topology


class Network(Wires):
    """The mesh and the topology of a program, and what its collectives send and take there.

    Made once for a program. Bytes are exact by the convention of `xcoll.hlo.wires`, on any
    topology; what they take is None on an unknown one.

    Args:
      mesh: the mesh that the program was compiled for.
      topology: of the mesh's axes.

    Raises:
      ValueError: the topology is that of another mesh.
    """

    def __init__(self, mesh: Mesh, topology: Topology):
        super().__init__(mesh)
        topology.check("audit", dict(mesh.shape))
        self.topology = topology
        self.routes = Routes(topology) if topology.device is not None else None
        dimensions = self.routes.dimensions if self.routes is not None else ()
        self.dimensions: tuple[str, ...] = tuple(d.name for d in dimensions)
        positions = [d.position for d in dimensions]
        # On one device there is no dimension, but a position in each of none.
        self._positions_on = np.array(positions, np.int64).reshape(-1, mesh.devices.size)
        self._levels_sent: dict[object, Sent] = {}
        self._prices: dict[object, _Price] = {}

    def level_bytes(self, collective: Collective) -> dict[str, int]:
        """Returns the bytes of the busiest device along each physical dimension, in one execution.

        What goes to a device that is elsewhere on several dimensions counts on each of them.
        """
        return self._busiest_along([(collective, collective.operand_bytes)])

    def total_level_bytes(self, collectives: Iterable[Collective]) -> dict[str, int]:
        """Returns the same for one run of the program; unknown executions count as one."""
        return self._busiest_along([(c, bytes_of_run(c)) for c in collectives])

    def time_ps(self, collective: Collective) -> int | None:
        """Returns the predicted time of one execution.

        Groups that are a product of levels (whole axes, several, parts of one, in any order) are
        priced as XLA's own collective; others by what the ring of their ranks, or the exchange,
        puts on the busiest link; permutes by what their pairs do. A recv between slices takes
        nothing: the time is its send's.

        Returns:
          Picoseconds; None where the topology is not known, or not what the collective connects.
        """
        price = self._price(collective)
        if price is None or self.topology.device is None:
            return None
        if collective.kind == "recv":
            return 0
        return price.time_ps(self.topology.device, collective.operand_bytes)

    def bound_ps(self, collective: Collective) -> int | None:
        """Returns a time that no algorithm can beat, by `xcoll.hlo.bounds`.

        A permute has only one: each pair's message, the shortest way.

        Returns:
          Picoseconds; None as for `time_ps`.
        """
        price = self._price(collective)
        if price is None:
            return None
        if collective.kind == "recv":
            return 0
        return int(price.bound_s_per_byte * collective.operand_bytes * PS)

    def _busiest_along(self, counted: list[tuple[Collective, int]]) -> dict[str, int]:
        sent = []
        for collective, num_bytes in counted if self.dimensions else ():
            key = self.key(collective)
            if key not in self._levels_sent:
                self._levels_sent[key] = sent_along(
                    self._positions_on, carried(collective), self.sending(collective)
                )
            sent.append((self._levels_sent[key], num_bytes))
        return busiest(self.dimensions, sent)

    def _price(self, collective: Collective) -> _Price | None:
        ends = self.ends(collective)
        if self.routes is None or (ends.pairs is None and not ends.groups):
            return None
        key = self.key(collective)
        if key not in self._prices:
            self._prices[key] = self._find_price(carried(collective), ends, self.routes)
        return self._prices[key]

    def _find_price(self, kind: str, ends: Ends, routes: Routes) -> _Price:
        assert self.topology.device is not None
        if ends.pairs is not None:
            traffic = pair_traffic(routes, ends.pairs)
            return _Price(natives=(), traffic=(traffic,), bound_s_per_byte=traffic.s_per_byte)
        native = native_as(_NATIVE[kind], self.topology.platform)
        natives: list[tuple[str, tuple[Digit, ...]]] = []
        rings: list[Traffic] = []
        for groups in ends.groups:
            digits = self._digits(groups)
            if digits is None:
                rings.append(ring_traffic(routes, kind, groups))
            else:
                natives += [(native, each) for each in digits]
        adding = _adding(self.topology.device, routes)
        bounds = [bound_s_per_byte(kind, g, routes.dimensions, adding) for g in ends.groups]
        return _Price(
            natives=tuple(dict.fromkeys(natives)),
            traffic=tuple(rings),
            bound_s_per_byte=max(bounds),
        )

    def _digits(self, groups: Ints) -> list[tuple[Digit, ...]] | None:
        """Returns the levels of each group, each once; None if one is no product of levels."""
        at = self._positions_on[:, groups]
        apart = (at - at[..., :1]).transpose(1, 2, 0)
        shapes = np.unique(apart.reshape(len(groups), -1), axis=0)
        found = []
        for shape in shapes.reshape(len(shapes), *apart.shape[1:]):
            digits = self._digits_of(shape)
            if digits is None:
                return None
            found.append(digits)
        return found

    def _digits_of(self, line: Ints) -> tuple[Digit, ...] | None:
        """Reads the levels from the positions [rank, dimension] of one group."""
        assert self.routes is not None
        line = line.copy()
        dimensions = []
        for i, dimension in enumerate(self.routes.dimensions):
            level = dimension.level
            if level.link.network != "torus":
                # To a switch, it is all the same which of its ports these are.
                line[:, i] = np.unique(line[:, i], return_inverse=True)[1].reshape(-1)
            dimensions.append(
                Dimension(
                    name=dimension.name,
                    size=level.extent,
                    link=level.link,
                    shared_by=level.shared_by,
                    wrap=level.wrap,
                    rates_bytes_per_s=level.rates_bytes_per_s,
                )
            )
        axes = read_levels(line, dimensions, ("group",))
        if axes is None:
            # Ranks in an order of their own: XLA's collectives go by the place, not by the number.
            axes = read_levels(line[np.lexsort(line.T[::-1])], dimensions, ("group",))
        return None if axes is None else replace(self.topology, axes=axes).digits(("group",))


_NATIVE = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
}


@dataclass(frozen=True, kw_only=True)
class _Price:
    """What a collective takes, whatever the size of its operand: the slowest of its groups."""

    natives: tuple[tuple[str, tuple[Digit, ...]], ...]
    traffic: tuple[Traffic, ...]
    bound_s_per_byte: Fraction

    def time_ps(self, device: Device, num_bytes: int) -> int:
        times = [native_ps(device, digits, kind, num_bytes) for kind, digits in self.natives]
        times += [each.time_ps(device, num_bytes) for each in self.traffic]
        return max(times)


def _adding(device: Device, routes: Routes) -> frozenset[str]:
    """Returns the dimensions whose switches reduce and copy (NVLink SHARP)."""
    if device.kind not in kinds() or "nvls_busbw" not in load(device.kind)["figures"]:
        return frozenset()
    return frozenset(d.name for d in routes.dimensions if d.level.link.kind == "nvlink")
