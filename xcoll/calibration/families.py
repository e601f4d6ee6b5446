"""What is measured on a mesh: one operation over some axes, at several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from xcoll.hardware.curves import MEASURABLE
from xcoll.topology import Digit, Topology

KIB, MIB = 2**10, 2**20

SIZES = (KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Bytes of the operand on each rank, smallest first."""

BETWEEN = (16 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 32 * MIB)
"""Sizes that are measured besides, where time is left."""

MOVED_SIZES = (64 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
"""Sizes of permutes inside a host, which are measured early: caches end somewhere."""

LOCAL_SIZES = (256 * KIB, 4 * MIB)
"""Sizes at which what a device does by itself is measured."""

COPIED_SIZES = (*LOCAL_SIZES, 16 * MIB, 64 * MIB)
"""Those of copies: beyond some size, memory that is freed goes back to the system."""

CODECS = ("int8", "int4", "bfloat16")
"""Codecs that are measured, by name."""

OVERLAP = ("wire", "work", "both")
"""A transfer, work beside it, and both in one program."""

SHARED = ("copy", "sum", "encode", "decode", *OVERLAP)
"""What all devices of the machine work on at once, each by itself."""

STARTS = ("launch", "chain", "lone")
"""What starting a program and a step takes: every price has some of it."""

CHAIN = 8
"""Small permutes in a row, by which the start of a step is measured: single ones vary."""

_FEW_SIZES = {
    **dict.fromkeys(STARTS, (KIB,)),
    **dict.fromkeys(SHARED, LOCAL_SIZES),
    **dict.fromkeys(OVERLAP, LOCAL_SIZES[-1:]),
    "copy": COPIED_SIZES,
}
"""Sizes of what is not measured at all of `SIZES`."""

_MOST_RESULT_BYTES = 128 * MIB
_MOST_LINK_BYTES = 4 * MIB  # beyond, a link's rate decides alone

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One operation.

    Attributes:
      kind: one of XLA's collectives (`xcoll.topology.Curve`); of permutes, ``"one_way"`` from even
        positions to odd ones (where their number is odd, from odd to even ones, too), ``"swap"``
        between the two, ``"unlike"`` both ways between pairs that are not each other's reverse,
        ``"shift"`` to the next position, ``"chain"`` `CHAIN` of them, each on what the last one
        brought, ``"lone"`` such a chain in which one device sends to another, and that one back; of
        local work, ``"launch"`` (nearly nothing), ``"copy"``, ``"sum"``, ``"encode"``,
        ``"decode"``; and ``"wire"``, a permute one way, ``"work"``, several encodings, and
        ``"both"`` at once.
      axes: mesh axes it goes over; of local work, all of them.
      of: the physical dimension of a permute, or the codec.
      pairs: of a permute, by rank over all axes of the mesh.
      messages: of a permute: those on the busiest port, one way.
      is_needed: measured however little time there is.
    """

    kind: str
    axes: tuple[str, ...]
    of: str = ""
    pairs: Pairs = ()
    messages: int = 1
    is_needed: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is about what a device does by itself, or beside a transfer."""
        return self.kind in ("launch", *SHARED)

    def __str__(self) -> str:
        if self.is_local:
            return f"{self.kind} {self.of}".rstrip()
        return f"{self.kind} over {', '.join(self.axes)}"

    def operand_bytes(self, num_bytes: int, topology: Topology) -> int:
        """Returns the operand's bytes on each rank for one of the sizes; 0 where it is left out.

        What is cut into shares has the next size that makes shares of whole elements.
        """
        if self.kind in _FEW_SIZES:
            return num_bytes if num_bytes in _FEW_SIZES[self.kind] else 0
        if self.kind in ("one_way", "swap", "unlike") and num_bytes > _MOST_LINK_BYTES:
            return 0
        ranks = math.prod(topology.axis_sizes[axis] for axis in self.axes)
        if self.kind in ("reduce_scatter", "all_to_all"):
            return -(-num_bytes // (4 * ranks)) * 4 * ranks
        result = num_bytes * (ranks if self.kind == "all_gather" else 1)
        return num_bytes if result <= _MOST_RESULT_BYTES else 0


def families(topology: Topology) -> tuple[Family, ...]:
    """Returns all that is measured on a mesh, what matters most first."""
    names = tuple(axis.name for axis in topology.axes)
    used = tuple(axis.name for axis in topology.axes if axis.size > 1)
    permutes = list(_permutes(topology))
    found = [Family(kind="launch", axes=names, is_needed=True)]
    # Between hosts, where there are several: inside one, ranks of a chain wait for each other.
    across = [family for family in permutes if family.kind == "swap"]
    for family in (across or permutes)[:1]:
        found.append(replace(family, kind="chain", is_needed=True))
        found.append(replace(family, kind="lone", pairs=family.pairs[:1], is_needed=True))
    found += permutes
    over = [(name,) for name in used] + ([used] if len(used) > 1 else [])
    for axes in reversed(over):
        found.append(Family(kind="all_reduce", axes=axes, is_needed=axes == over[-1]))
    found.append(Family(kind="copy", axes=names))
    found.append(Family(kind="sum", axes=names))
    for kind in MEASURABLE[1:]:
        found += [Family(kind=kind, axes=axes) for axes in over]
    for kind in ("encode", "decode"):
        found += [Family(kind=kind, axes=names, of=codec) for codec in CODECS]
    one_way = next((f for f in found if f.kind == "one_way"), None)
    if one_way is not None:
        found += [replace(one_way, kind=kind, of="", is_needed=False) for kind in OVERLAP]
    return tuple(found)


def _permutes(topology: Topology) -> Iterator[Family]:
    names = tuple(axis.name for axis in topology.axes)
    for digit in topology.digits(names):
        level = digit.level
        kinds = ("shift",) if level.link.network == "memory" else ("one_way", "swap", "unlike")
        # Of an odd number of positions one is left over, which may be the slowest.
        is_odd = level.size % 2 == 1
        for kind, start in product(kinds, (0, 1)):
            if start and not (is_odd and kind in ("one_way", "swap")):
                continue
            pairs, messages = _pairs(kind, digit, math.prod(topology.axis_sizes.values()), start)
            if pairs:
                yield Family(
                    kind=kind,
                    axes=(digit.axis,),
                    of=level.dimension,
                    pairs=pairs,
                    messages=messages,
                    is_needed=kind in ("shift", "one_way"),
                )


def _pairs(kind: str, digit: Digit, num_ranks: int, start: int) -> tuple[Pairs, int]:
    """Returns the pairs of a permute along a level, and the messages on its busiest port.

    Args:
      kind: of the permute.
      digit: the level.
      num_ranks: of the mesh.
      start: the first position of which the next one is the partner.
    """
    size, stride, behind = digit.level.size, digit.stride, digit.level.shared_by
    ranks = np.arange(num_ranks)
    at = ranks // stride % size
    following = ranks + (np.where(at == size - 1, 1 - size, 1)) * stride
    if kind == "shift" or (kind == "unlike" and size > 2):
        return tuple(zip(ranks.tolist(), following.tolist(), strict=True)), behind
    forth = (at % 2 == start) & (at + 1 < size)
    back = (at % 2 != start) & (at > 0)
    before = ranks - stride
    if kind == "unlike":
        if behind % 2:
            return (), 0
        # Half of the devices behind each port send one way, the other half the other way.
        number = np.zeros(num_ranks, int)
        for position in range(size):
            inside = np.flatnonzero(at == position)
            number[inside] = np.arange(len(inside)) % behind
        forth &= number < behind // 2
        back &= number >= behind // 2
        behind //= 2
    pairs = [*zip(ranks[forth].tolist(), following[forth].tolist(), strict=True)]
    if kind != "one_way":
        pairs += zip(ranks[back].tolist(), before[back].tolist(), strict=True)
    return tuple(sorted(pairs)), behind
