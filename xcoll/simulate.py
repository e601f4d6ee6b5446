"""Runs schedules on the links of a topology, message by message, to check the closed forms.

Every span of the mesh runs the schedule at the same time. A message goes over the outermost
links that its two ends are apart on: between hosts or slices over their ports only, inside a
torus along each dimension the shorter way. A step takes as long as its busiest link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from xcoll.hardware import figure
from xcoll.loads import span_digits
from xcoll.natives import native_ps, transfer_ps
from xcoll.plan import Span
from xcoll.runs import start_ps
from xcoll.schedule import FoldStep, Lane, NativeStep, PermuteStep, Repeat, Schedule, ShuffleStep
from xcoll.topology import Level, Topology

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Simulated:
    """What running a schedule took.

    Attributes:
      time_ps: picoseconds.
      link_bytes: bytes over the busiest link of each physical dimension, in its busier direction.
    """

    time_ps: int
    link_bytes: tuple[tuple[str, int], ...]


@dataclass
class _Dimension:
    """A physical dimension: where each device is on it, and which port or chip is its own."""

    level: Level
    position: Ints
    port: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    # Which chip lies at each position of a device's row: for walking along a torus.
    row: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


def simulate(schedule: Schedule, topology: Topology, span: Span, slot_bytes: int) -> Simulated:
    """Runs a schedule over all spans like ``span``.

    Args:
      schedule: for as many ranks as the span has.
      topology: a known topology.
      span: one of its spans.
      slot_bytes: bytes of a slot.

    Returns:
      Time and traffic. XLA's own collectives inside the schedule are taken at their predicted
      price, and put nothing on the links.

    Raises:
      ValueError: the schedule is for another number of ranks, or the topology is unknown.
    """
    if topology.device is None or schedule.num_ranks != span.num_ranks:
        raise ValueError(
            f"simulate: a schedule for {schedule.num_ranks} ranks over a span of {span.num_ranks}"
            f" of topology {topology.name!r}: the numbers must be equal and the topology known"
        )
    network = _Network(topology, span)
    device = topology.device
    time = 0
    for step, count in _steps(schedule):
        if isinstance(step, FoldStep | ShuffleStep):
            whole = schedule.num_slots * slot_bytes
            time += count * transfer_ps(whole, device.copy_bytes_per_s)
        elif isinstance(step, NativeStep):
            own = step.collective == "all_gather"
            num_bytes = (schedule.share if own else schedule.num_slots) * slot_bytes
            time += count * native_ps(device, network.digits, step.collective, num_bytes)
        else:
            time += count * network.run(step, slot_bytes, count)
    return Simulated(time, tuple(sorted(network.busiest.items())))


def _steps(
    schedule: Schedule,
) -> Iterator[tuple[PermuteStep | NativeStep | FoldStep | ShuffleStep, int]]:
    for step in schedule.steps:
        if isinstance(step, Repeat):
            # Iterations differ in the slots, not in who sends to whom.
            yield from ((inner, step.count) for inner in step.body)
        else:
            yield step, 1


class _Network:
    """Devices, their places on each dimension, and the bytes counted so far."""

    def __init__(self, topology: Topology, span: Span):
        assert topology.device is not None
        self.device = topology.device
        self.digits = span_digits(topology, span)
        self.dimensions = _dimensions(topology)
        self.members = _members(topology, span)
        self.busiest: dict[str, int] = {d.level.dimension: 0 for d in self.dimensions}
        self._totals: dict[str, Ints] = {}

    def run(self, step: PermuteStep, slot_bytes: int, count: int) -> int:
        """Returns the time of one execution, and counts the traffic of ``count``."""
        traffic: dict[str, Ints] = {}
        latency = 0
        swapped = any(set(lane.pairs) & {(b, a) for a, b in lane.pairs} for lane in step.lanes)
        sent = np.zeros(len(self.members.ravel()), np.int64)
        for lane in step.lanes:
            sources, destinations = self._ends(lane)
            num_bytes = lane.send.count * slot_bytes
            np.add.at(sent, sources, num_bytes)
            latency = max(latency, self._route(sources, destinations, num_bytes, traffic))
        wire = 0
        for dimension in self.dimensions:
            name, level = dimension.level.dimension, dimension.level
            if name not in traffic:
                continue
            self._totals[name] = self._totals.get(name, np.int64(0)) + count * traffic[name]
            self.busiest[name] = int(self._totals[name].max())
            time = transfer_ps(int(traffic[name].max()), level.bandwidth_bytes_per_s)
            if self.device.platform == "cpu":
                swap = "duplex_swap" if swapped else "duplex_ring"
                time = time * int(figure("cpu", swap)) // 100
            wire = max(wire, time)
        host = self.device.platform == "cpu"
        reduces = any(lane.reduce for lane in step.lanes)
        passes = 1 if host else 3 if reduces else 2
        starts = len(step.lanes) if host else 1
        work = transfer_ps(int(sent.max()) * passes, self.device.memory_bytes_per_s)
        return starts * self.device.step_ps + start_ps(self.device) + latency + wire + work

    def _ends(self, lane: Lane) -> tuple[Ints, Ints]:
        pairs = np.array(lane.pairs, np.int64).reshape(-1, 2)
        return self.members[:, pairs[:, 0]].ravel(), self.members[:, pairs[:, 1]].ravel()

    def _route(
        self, sources: Ints, destinations: Ints, num_bytes: int, traffic: dict[str, Ints]
    ) -> int:
        """Puts messages on links; returns the largest latency of one."""
        todo = np.ones(len(sources), bool)
        latency = np.zeros(len(sources), np.int64)
        # From the outermost: what crosses a switch is delivered by it.
        for dimension in self.dimensions:
            level = dimension.level
            place = dimension.position
            apart = todo & (place[sources] != place[destinations])
            if level.link.network == "memory" or not apart.any():
                continue
            if level.link.network == "switch":
                ports = int(dimension.port.max()) + 1
                load = traffic.setdefault(level.dimension, np.zeros(2 * ports, np.int64))
                np.add.at(load, dimension.port[sources[apart]], num_bytes)
                np.add.at(load, ports + dimension.port[destinations[apart]], num_bytes)
                latency[apart] += level.link.latency_ps
                todo &= ~apart
            else:
                hops = self._walk(
                    dimension, sources[apart], destinations[apart], num_bytes, traffic
                )
                latency[apart] += hops * level.link.latency_ps
        return int(latency.max(initial=0))

    def _walk(
        self,
        dimension: _Dimension,
        sources: Ints,
        destinations: Ints,
        num_bytes: int,
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
        load = traffic.setdefault(level.dimension, np.zeros(2 * rows * extent, np.int64))
        for hop in range(int(hops.max(initial=0))):
            going = hop < hops
            at = (start + sign * hop) % extent
            # A link is named by its lower end and direction.
            lower = np.where(sign > 0, at, (at - 1) % extent)
            index = (row * extent + lower) * 2 + (sign < 0)
            np.add.at(load, index[going], num_bytes)
        return hops


def _dimensions(topology: Topology) -> list[_Dimension]:
    """Returns the physical dimensions, outermost first, with every device's place."""
    sizes = tuple(axis.size for axis in topology.axes)
    index = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    found: dict[str, _Dimension] = {}
    for axis, at in zip(topology.axes, index, strict=True):
        done = 1
        for level in axis.levels:
            digit = (at // done) % level.size
            done *= level.size
            known = found.setdefault(level.dimension, _Dimension(level, np.zeros_like(at)))
            known.position = known.position + digit * level.stride
    # The slower lie outside the faster; memory is innermost.
    ordered = sorted(
        found.values(),
        key=lambda d: (d.level.link.network == "memory", d.level.bandwidth_bytes_per_s),
    )
    for dimension in ordered:
        behind: list[_Dimension] = []
        product = 1
        for inner in reversed(ordered):
            if inner is not dimension and product < dimension.level.shared_by:
                behind.append(inner)
                product *= inner.level.extent
        others = [d for d in ordered if d not in behind and d is not dimension]
        row = [d.position for d in others]
        dimension.row = _numbered(row, len(dimension.position))
        dimension.port = _numbered([*row, dimension.position], len(dimension.position))
    return ordered


def _numbered(columns: list[Ints], length: int) -> Ints:
    if not columns:
        return np.zeros(length, np.int64)
    _, numbers = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64)


def _members(topology: Topology, span: Span) -> Ints:
    """Returns devices in mesh order: one row a span, in the order of its ranks."""
    names = [axis.name for axis in topology.axes]
    sizes = tuple(axis.size for axis in topology.axes)
    inside = [names.index(axis) for axis in span.axes]
    outside = [i for i in range(len(names)) if i not in inside]
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(*outside, *inside)
    rows = grid.reshape(-1, math.prod(sizes[i] for i in inside))
    cut = rows.reshape(len(rows), -1, span.num_ranks, span.stride)
    return cut.transpose(0, 1, 3, 2).reshape(-1, span.num_ranks)
