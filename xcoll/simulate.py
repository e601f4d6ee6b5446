"""Runs schedules on the links of a topology, message by message, to check the closed forms.

Every span of the mesh runs the schedule at the same time, each message on its route
(`xcoll.routes`). A step takes as long as its busiest link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xcoll.loads import span_digits
from xcoll.natives import native_on, passed_ps, transfer_ps
from xcoll.plan import Span
from xcoll.routes import Ints, Routes
from xcoll.runs import start_ps
from xcoll.schedule import (
    FoldStep,
    Lane,
    NativeStep,
    PermuteStep,
    Repeat,
    Schedule,
    ShuffleStep,
    swaps,
)
from xcoll.topology import Topology


@dataclass(frozen=True)
class Simulated:
    """What running a schedule took.

    Attributes:
      time_ps: picoseconds.
      link_bytes: bytes over the busiest link of each physical dimension, in its busier direction.
    """

    time_ps: int
    link_bytes: tuple[tuple[str, int], ...]


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
            time += count * native_on(topology, span, network.digits, step.collective, num_bytes)
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
        self.routes = Routes(topology)
        self.members = _members(topology, span)
        self.busiest: dict[str, int] = {d.name: 0 for d in self.routes.dimensions}
        self._totals: dict[str, Ints] = {}

    def run(self, step: PermuteStep, slot_bytes: int, count: int) -> int:
        """Returns the time of one execution, and counts the traffic of ``count``."""
        traffic: dict[str, Ints] = {}
        latency = 0
        swapped = any(swaps(lane.pairs) for lane in step.lanes)
        sent = np.zeros(len(self.members.ravel()), np.int64)
        for lane in step.lanes:
            sources, destinations = self._ends(lane)
            num_bytes = lane.send.count * slot_bytes
            np.add.at(sent, sources, num_bytes)
            latency = max(latency, self._route(sources, destinations, num_bytes, traffic))
        wire = 0
        for dimension in self.routes.dimensions:
            name, level = dimension.name, dimension.level
            if name not in traffic:
                continue
            self._totals[name] = self._totals.get(name, np.int64(0)) + count * traffic[name]
            self.busiest[name] = int(self._totals[name].max())
            time = transfer_ps(int(traffic[name].max()), level.bandwidth_bytes_per_s)
            link = level.link
            percent = link.swap_percent if swapped else link.unlike_percent
            wire = max(wire, time * percent // 100)
        host = self.device.platform == "cpu"
        reduces = any(lane.reduce for lane in step.lanes)
        passes = 1 if host else 3 if reduces else 2
        starts = len(step.lanes) if host else 1
        work = passed_ps(self.device, int(sent.max()) * passes)
        return starts * self.device.step_ps + start_ps(self.device) + latency + wire + work

    def _ends(self, lane: Lane) -> tuple[Ints, Ints]:
        pairs = np.array(lane.pairs, np.int64).reshape(-1, 2)
        return self.members[:, pairs[:, 0]].ravel(), self.members[:, pairs[:, 1]].ravel()

    def _route(
        self, sources: Ints, destinations: Ints, num_bytes: int, traffic: dict[str, Ints]
    ) -> int:
        """Puts messages on links; returns the largest latency of one."""
        hops = self.routes.put(sources, destinations, num_bytes, traffic)
        latency = np.zeros(len(sources), np.int64)
        for dimension in self.routes.dimensions:
            if dimension.name in hops:
                latency += hops[dimension.name] * dimension.level.link.latency_ps
        return int(latency.max(initial=0))


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
