"""What messages by the convention of `xcoll.hlo.wires`, or by a permute's pairs, put on links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from xcoll.hlo.bounds import port_rates
from xcoll.hlo.wires import is_exchange, messages
from xcoll.natives import PS, transfer_ps
from xcoll.routes import Ints, Routes
from xcoll.topology import Device

_AT_ONCE = 2**18
"""Messages of an all-to-all that are routed in one go."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What messages put on a physical dimension.

    Attributes:
      s_per_byte: of the busiest link or port, for each byte of the operand.
      latency_ps: of the farthest message's hops.
    """

    s_per_byte: Fraction
    latency_ps: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages in steps that follow each other; all steps together make the loads."""

    steps: int
    loads: tuple[Load, ...]

    @property
    def s_per_byte(self) -> Fraction:
        """Returns the time on the busiest link, for each byte of the operand."""
        return max((load.s_per_byte for load in self.loads), default=Fraction(0))

    def time_ps(self, device: Device, num_bytes: int) -> int:
        """Returns the predicted time for an operand of so many bytes."""
        wire = max(
            (
                math.ceil(load.s_per_byte * num_bytes * PS) + self.steps * load.latency_ps
                for load in self.loads
            ),
            default=0,
        )
        return device.step_ps + transfer_ps(num_bytes, device.memory_bytes_per_s) + wire


def pair_traffic(routes: Routes, pairs: Ints) -> Traffic:
    """Returns what a permute puts on the links: array [pair, 2], each its shortest way."""
    return Traffic(steps=1, loads=tuple(_loads(routes, [(pairs[:, 0], pairs[:, 1], 1)], 1)))


def ring_traffic(routes: Routes, kind: str, groups: Ints) -> Traffic:
    """Returns what the rings of groups, array [group, rank], put on the links; or the exchange."""
    num_ranks = groups.shape[1]
    if is_exchange(kind):
        loads = tuple(_loads(routes, _exchange(groups), num_ranks))
        return Traffic(steps=1, loads=loads)
    loads = tuple(_loads(routes, [messages(kind, groups)], num_ranks))
    return Traffic(steps=(2 if kind == "all-reduce" else 1) * (num_ranks - 1), loads=loads)


def _exchange(groups: Ints) -> Iterator[tuple[Ints, Ints, int]]:
    """Yields every message of an all-to-all, a part of them at a time."""
    num_ranks = groups.shape[1]
    ranks = np.arange(num_ranks)
    count = max(1, _AT_ONCE // groups.size)
    for first in range(1, num_ranks, count):
        distances = np.arange(first, min(first + count, num_ranks))[:, None]
        destinations = groups[:, (ranks + distances) % num_ranks]
        sources = np.broadcast_to(groups[:, None], destinations.shape)
        yield sources.ravel(), destinations.ravel(), 1


def _loads(
    routes: Routes, sent: Iterable[tuple[Ints, Ints, int]], per_operand: int
) -> Iterator[Load]:
    """Yields what messages put on each dimension.

    Args:
      routes: where they go.
      sent: sources, destinations and units of each.
      per_operand: units that make the bytes of the operand.
    """
    traffic: dict[str, Ints] = {}
    farthest: dict[str, int] = {}
    for sources, destinations, units in sent:
        for name, hops in routes.put(sources, destinations, units, traffic).items():
            farthest[name] = max(farthest.get(name, 0), int(hops.max()))
    for dimension in routes.dimensions:
        if dimension.name not in traffic:
            continue
        level, busy = dimension.level, traffic[dimension.name]
        if level.link.network == "switch":
            rates = np.tile(port_rates(dimension), 2)
            on_ports = zip(busy.tolist(), rates.tolist(), strict=True)
            each = {Fraction(a, b * per_operand) for a, b in set(on_ports)}
        else:
            each = {Fraction(int(busy.max()), level.bandwidth_bytes_per_s * per_operand)}
        yield Load(
            s_per_byte=max(each), latency_ps=farthest[dimension.name] * level.link.latency_ps
        )
