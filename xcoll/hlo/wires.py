"""What each device sends in a collective of a compiled program, and over which mesh axes.

What a backend does inside a collective is not in its text; by convention each group is one ring,
in the order of its ranks (row-major over the axes for jax.lax's collectives). With n ranks and an
operand of B bytes, each rank sends to the next

* all-reduce: 2 (n - 1) / n · B
* reduce-scatter: (n - 1) / n · B
* all-gather: (n - 1) · B
* collective-broadcast: B, the last rank nothing

and in an all-to-all B / n to each other rank. Permutes send to what the program says. A recv
between slices is the other end of its send and sends nothing; nor does a transfer to the host.
All of this is a multiple of B / n, and counted in such units: exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from xcoll.hlo.reader import Collective
from xcoll.routes import Ints

_SLICE = 100_000  # libtpu numbers the devices of slice s from 100000 * (s + 1)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Who takes part in a collective, as positions in ``mesh.devices.flat``.

    Attributes:
      groups: an array [group, rank] for each size of group that occurs: almost always one.
      pairs: array [pair, 2] of source and destination, for permutes; else None.
    """

    groups: tuple[Ints, ...] = ()
    pairs: Ints | None = None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What each device sends in one execution, whatever the size of the operand.

    Attributes:
      units: array [axis, device] of int64.
      per_operand: units that make the bytes of the operand.
    """

    units: Ints
    per_operand: int


def carried(collective: Collective) -> str:
    """Returns the kind of what is carried out: for a send or recv between slices, its transfer."""
    return collective.transfer or collective.kind


def ring_units(kind: str, num_ranks: int) -> int:
    """Returns what a rank sends to the next one on the ring, in ``num_ranks``-ths of its operand.

    >>> ring_units("all-reduce", 4)  # 2 · 3/4 of the operand
    6
    """
    return {
        "all-reduce": 2 * (num_ranks - 1),
        "reduce-scatter": num_ranks - 1,
        "all-gather": (num_ranks - 1) * num_ranks,
        "collective-broadcast": num_ranks,
    }[kind]


def is_exchange(kind: str) -> bool:
    """Whether every rank sends to every other one, rather than around a ring."""
    return "all-to-all" in kind


def messages(kind: str, groups: Ints) -> tuple[Ints, Ints, int]:
    """Returns sources, destinations and the units of each message on the rings of equal groups."""
    num_ranks = groups.shape[1]
    last = -1 if kind == "collective-broadcast" else None
    sources, destinations = groups[:, :last], np.roll(groups, -1, axis=1)[:, :last]
    return sources.ravel(), destinations.ravel(), ring_units(kind, num_ranks)


class Wires:
    """The mesh of a program, and what its collectives send over the mesh's axes.

    Made once for a program: what is read of groups that occur again is kept.

    Args:
      mesh: the mesh that the program was compiled for.
    """

    def __init__(self, mesh: Mesh):
        self.names: tuple[str, ...] = tuple(mesh.axis_names)
        self.num_devices = int(mesh.devices.size)
        places = np.indices(mesh.devices.shape).reshape(-1, self.num_devices)
        self.places: Ints = places.astype(np.int64)
        """Array [axis, device]: where each device lies in the mesh."""
        self._ids = np.array([device.id for device in mesh.devices.flat], np.int64)
        self._ends: dict[object, Ends] = {}
        self._sent: dict[object, Sent] = {}

    def ends(self, collective: Collective) -> Ends:
        """Returns who takes part.

        Raises:
          ValueError: the program numbers other devices than the mesh has.
        """
        key = self.key(collective)
        if key not in self._ends:
            self._ends[key] = self._find_ends(collective)
        return self._ends[key]

    def axes_of(self, collective: Collective) -> tuple[str, ...]:
        """Returns the mesh axes in which two devices of a group, or of a pair, differ."""
        differ = np.zeros(len(self.names), bool)
        ends = self.ends(collective)
        for rows in ends.groups if ends.pairs is None else (ends.pairs,):
            at = self.places[:, rows]
            differ |= (at != at[..., :1]).any(axis=(1, 2))
        return tuple(name for name, d in zip(self.names, differ, strict=True) if d)

    def sent(self, collective: Collective) -> Sent:
        """Returns what each device sends over each axis.

        What goes to a device that differs in several axes counts on each of them.
        """
        key = self.key(collective)
        if key not in self._sent:
            self._sent[key] = sent_along(self.places, carried(collective), self.sending(collective))
        return self._sent[key]

    def sending(self, collective: Collective) -> Ends:
        """Returns who sends: nobody in a recv, which is the other end of a send."""
        return Ends() if collective.kind == "recv" else self.ends(collective)

    def wire_bytes(self, collective: Collective) -> dict[str, int]:
        """Returns the bytes of the busiest device over each axis, in one execution."""
        return busiest(self.names, [(self.sent(collective), collective.operand_bytes)])

    def total_wire_bytes(self, collectives: Iterable[Collective]) -> dict[str, int]:
        """Returns the bytes of the busiest device over each axis, in one run of the program.

        A collective of unknown executions is counted once.
        """
        return busiest(self.names, [(self.sent(c), bytes_of_run(c)) for c in collectives])

    @staticmethod
    def key(collective: Collective) -> object:
        """Returns what all that is read here depends on, except the operand's size."""
        c = collective
        return c.kind, c.transfer, c.groups, c.pairs, c.slices, c.num_devices

    def _find_ends(self, collective: Collective) -> Ends:
        is_pairs = collective.pairs is not None
        found = (collective.pairs if is_pairs else collective.groups) or ()
        sizes = sorted({len(row) for row in found})
        rows = [
            self._positions(collective, np.array([r for r in found if len(r) == size], np.int64))
            for size in sizes
        ]
        if is_pairs:
            return Ends(pairs=rows[0] if rows else np.zeros((0, 2), np.int64))
        return Ends(groups=tuple(rows))

    def _positions(self, collective: Collective, rows: Ints) -> Ints:
        """Returns the positions in the whole mesh of the devices that a program numbers."""
        if collective.transfer is not None:
            order = np.argsort(self._ids)
            found = order[np.searchsorted(self._ids[order], rows) % self.num_devices]
            if (self._ids[found] != rows).any():
                raise ValueError(
                    f"hlo: {collective.name} names devices that are not in the mesh; pass the mesh"
                    " that the program was compiled for"
                )
            return found
        if collective.num_devices in (1, self.num_devices):
            return rows
        slice_of = self._ids // _SLICE - 1
        slices = {int(s): np.flatnonzero(slice_of == s) for s in dict.fromkeys(slice_of.tolist())}
        if any(len(s) != collective.num_devices for s in slices.values()):
            raise ValueError(
                f"hlo: {collective.name} numbers {collective.num_devices} devices, but the mesh has"
                f" {self.num_devices}; pass the mesh that the program was compiled for"
            )
        run = slices if collective.slices is None else collective.slices
        return np.concatenate([slices[s][rows] for s in run])


def sent_along(places: Ints, kind: str, ends: Ends) -> Sent:
    """Returns what each device sends to devices that differ from it along each coordinate.

    Args:
      places: array [coordinate, device].
      kind: what is carried out.
      ends: who takes part.
    """
    units = np.zeros_like(places)
    if ends.pairs is not None:
        sources, destinations = ends.pairs.T
        _add(units, places, sources, destinations, 1)
        return Sent(units=units, per_operand=1)
    whole = math.lcm(*(groups.shape[1] for groups in ends.groups))
    for groups in ends.groups:
        scale = whole // groups.shape[1]
        if is_exchange(kind):
            for row, place in zip(units, places, strict=True):
                row[groups] += _unlike(place[groups]) * scale
        elif groups.shape[1] > 1:
            sources, destinations, count = messages(kind, groups)
            _add(units, places, sources, destinations, count * scale)
    return Sent(units=units, per_operand=whole)


def busiest(names: Iterable[str], sent: Iterable[tuple[Sent, int]]) -> dict[str, int]:
    """Returns the bytes of the busiest device for each coordinate; a fraction of one is dropped.

    Args:
      names: of the coordinates.
      sent: what is sent, and the bytes of the operand.
    """
    operand_bytes: dict[int, int] = {}
    kept: dict[int, Sent] = {}
    for each, num_bytes in sent:
        # The same object stands for all collectives over the same groups.
        kept[id(each)] = each
        operand_bytes[id(each)] = operand_bytes.get(id(each), 0) + num_bytes
    names = tuple(names)
    if not kept:
        return dict.fromkeys(names, 0)
    whole = math.lcm(*(each.per_operand for each in kept.values()))
    if len(kept) == 1:
        ((k, each),) = kept.items()
        most = each.units.max(axis=1).tolist()
        return {
            n: m * operand_bytes[k] // each.per_operand for n, m in zip(names, most, strict=True)
        }
    # Python's integers: bytes of a long run times a common multiple may pass 64 bits.
    total = np.zeros_like(next(iter(kept.values())).units, object)
    for k, each in kept.items():
        total += each.units.astype(object) * (operand_bytes[k] * (whole // each.per_operand))
    return {name: int(row.max()) // whole for name, row in zip(names, total, strict=True)}


def bytes_of_run(collective: Collective) -> int:
    """Returns the operand's bytes times the executions in a run, one where that is not known."""
    times = 1 if collective.executions is None else collective.executions
    return collective.operand_bytes * times


def _add(units: Ints, places: Ints, sources: Ints, destinations: Ints, count: int) -> None:
    apart = places[:, sources] != places[:, destinations]
    for row, counts in zip(units, apart, strict=True):
        np.add.at(row, sources[counts], count)


def _unlike(place: Ints) -> Ints:
    """Returns how many others of its group differ from each rank: [group, rank] to the same."""
    num_groups, num_ranks = place.shape
    size = int(place.max()) + 1
    cell = np.arange(num_groups)[:, None] * size + place
    return num_ranks - np.bincount(cell.ravel(), minlength=num_groups * size)[cell]
