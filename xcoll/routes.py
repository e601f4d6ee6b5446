"""Where messages go between devices: which links and ports they pass, and how many hops.

A message goes over the outermost links that its two ends are apart on: between hosts or slices
over their ports only, inside a torus along each dimension the shorter way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xcoll.topology import Level, Topology

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass
class Dimension:
    """A physical dimension, and where each device is on it.

    Attributes:
      level: one of the levels that lie on it; they share its links.
      position: of each device along it.
      port: which port (on a torus: chip) is each device's; the devices behind one share it.
      row: which of the parallel rows of a torus each device lies in.
    """

    level: Level
    position: Ints
    port: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    row: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def name(self) -> str:
        """The dimension's name."""
        return self.level.dimension


class Routes:
    """The devices of a topology on its physical dimensions.

    Args:
      topology: a known topology.
    """

    def __init__(self, topology: Topology):
        self.dimensions: tuple[Dimension, ...] = tuple(_dimensions(topology))
        """Outermost first."""

    def put(
        self,
        sources: Ints,
        destinations: Ints,
        num_bytes: int | Ints,
        traffic: dict[str, Ints],
    ) -> dict[str, Ints]:
        """Puts messages on links.

        Args:
          sources: device of each message, as a position in the mesh.
          destinations: where it goes.
          num_bytes: of each message, or of all of them alike.
          traffic: bytes on each link and each way, by dimension; the messages' are added. On a
            switch these are what each port sends, then what each receives.

        Returns:
          How many links each message passes, by dimension; dimensions that none passes are left
          out.
        """
        sizes = np.broadcast_to(np.asarray(num_bytes, np.int64), sources.shape)
        todo = np.ones(len(sources), bool)
        hops: dict[str, Ints] = {}
        # From the outermost: what crosses a switch is delivered by it.
        for dimension in self.dimensions:
            level, place = dimension.level, dimension.position
            apart = todo & (place[sources] != place[destinations])
            if level.link.network == "memory" or not apart.any():
                continue
            passed = hops.setdefault(dimension.name, np.zeros(len(sources), np.int64))
            ends = sources[apart], destinations[apart]
            if level.link.network == "switch":
                ports = int(dimension.port.max()) + 1
                load = traffic.setdefault(dimension.name, np.zeros(2 * ports, np.int64))
                np.add.at(load, dimension.port[ends[0]], sizes[apart])
                np.add.at(load, ports + dimension.port[ends[1]], sizes[apart])
                passed[apart] = 1
                todo &= ~apart
            else:
                passed[apart] = _walk(dimension, *ends, sizes[apart], traffic)
        return hops


def _walk(
    dimension: Dimension,
    sources: Ints,
    destinations: Ints,
    num_bytes: Ints,
    traffic: dict[str, Ints],
) -> Ints:
    level, extent = dimension.level, dimension.level.extent
    start, end = dimension.position[sources], dimension.position[destinations]
    ahead = end - start
    if level.wrap:
        # The shorter way; where both are equal, the one that does not pass the ends.
        ahead = np.where(2 * ahead > extent, ahead - extent, ahead)
        ahead = np.where(2 * ahead < -extent, ahead + extent, ahead)
    hops, sign = np.abs(ahead), np.sign(ahead)
    # Each dimension is walked in the row of the source: dimensions are taken one by one, and
    # rows that a message turns into carry as much as those it comes from.
    row = dimension.row[sources]
    rows = int(dimension.row.max()) + 1
    load = traffic.setdefault(dimension.name, np.zeros(2 * rows * extent, np.int64))
    for hop in range(int(hops.max(initial=0))):
        going = hop < hops
        at = (start + sign * hop) % extent
        # A link is named by its lower end and direction.
        lower = np.where(sign > 0, at, (at - 1) % extent)
        index = (row * extent + lower) * 2 + (sign < 0)
        np.add.at(load, index[going], num_bytes[going])
    return hops


def _dimensions(topology: Topology) -> list[Dimension]:
    """Returns the physical dimensions, outermost first, with every device's place."""
    sizes = tuple(axis.size for axis in topology.axes)
    index = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    found: dict[str, Dimension] = {}
    for axis, at in zip(topology.axes, index, strict=True):
        done = 1
        for level in axis.levels:
            digit = (at // done) % level.size
            done *= level.size
            known = found.setdefault(level.dimension, Dimension(level, np.zeros_like(at)))
            known.position = known.position + digit * level.stride
    # The slower lie outside the faster; memory is innermost.
    ordered = sorted(
        found.values(),
        key=lambda d: (d.level.link.network == "memory", d.level.bandwidth_bytes_per_s),
    )
    for dimension in ordered:
        behind: list[Dimension] = []
        product = 1
        for inner in reversed(ordered):
            if inner is not dimension and product < dimension.level.shared_by:
                behind.append(inner)
                product *= inner.level.extent
        others = [d for d in ordered if d not in behind and d is not dimension]
        row = [d.position for d in others]
        dimension.row = numbered(row, len(dimension.position))
        dimension.port = numbered([*row, dimension.position], len(dimension.position))
    return ordered


def numbered(columns: Sequence[Ints], length: int) -> Ints:
    """Returns a number for each place: the same where all columns are equal, counting from 0."""
    if not columns:
        return np.zeros(length, np.int64)
    _, numbers = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64)
