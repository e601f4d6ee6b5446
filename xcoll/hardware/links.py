"""Links, the levels of a mesh axis that lie on them, and the device between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from xcoll.hardware.tables import figure, load


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of link.

    Attributes:
      kind: ``"ici"``, ``"dcn"``, ``"core"``, ``"nvlink"``, ``"network"`` or ``"memory"``; any other
        word is allowed and only read by people.
      network: ``"torus"``: neighbours along a dimension are wired to each other. ``"switch"``:
        every port reaches every other. ``"memory"``: no wire; transfers cost only the device's
        work.
      bandwidth_bytes_per_s: of payload, one way, of one link or port. The other way has the same,
        at the same time.
      latency_ps: of one hop.
    """

    kind: str
    network: Literal["torus", "switch", "memory"]
    bandwidth_bytes_per_s: int
    latency_ps: int = 0

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s < 1 or self.latency_ps < 0:
            raise ValueError(
                f"Link(bandwidth_bytes_per_s={self.bandwidth_bytes_per_s},"
                f" latency_ps={self.latency_ps}): the bandwidth must be positive and the latency"
                " not negative"
            )


@dataclass(frozen=True, kw_only=True)
class Level:
    """The part of a mesh axis that lies on one physical dimension.

    Attributes:
      size: positions.
      link: what connects them.
      dimension: the physical dimension's name; levels of several axes that name the same one
        share its links.
      extent: positions of the whole dimension; 0 stands for ``size * stride``.
      stride: neighbouring positions of the level are this many apart along the dimension.
      shared_by: devices behind one link or port, all of which use it at the same time (the
        devices of a host behind its network card).
      wrap: the dimension closes to a ring.
      rates_bytes_per_s: one way, of each position's port where they are unequal; else empty. The
        slowest bounds a collective.
    """

    size: int
    link: Link
    dimension: str
    extent: int = 0
    stride: int = 1
    shared_by: int = 1
    wrap: bool = False
    rates_bytes_per_s: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1 or self.shared_by < 1:
            raise ValueError(f"{self}: size, stride and shared_by must be at least 1")
        if self.extent == 0:
            object.__setattr__(self, "extent", self.size * self.stride)
        if self.extent < (self.size - 1) * self.stride + 1:
            raise ValueError(
                f"Level(size={self.size}, stride={self.stride}, extent={self.extent}): does not"
                " fit the dimension"
            )
        if self.rates_bytes_per_s and min(self.rates_bytes_per_s) < 1:
            raise ValueError(f"Level(rates_bytes_per_s={self.rates_bytes_per_s}): must be positive")

    @property
    def is_ring(self) -> bool:
        """Whether the level's own ends are neighbours: it wraps, and spans the dimension."""
        return self.wrap and self.size * self.stride == self.extent

    @property
    def bandwidth_bytes_per_s(self) -> int:
        """What the slowest port offers."""
        return min((self.link.bandwidth_bytes_per_s, *self.rates_bytes_per_s))


@dataclass(frozen=True, kw_only=True)
class AxisLinks:
    """What a mesh axis lies on.

    Attributes:
      name: the mesh axis.
      levels: innermost (fastest varying along the axis) first; their sizes multiply to
        the axis's.
    """

    name: str
    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        """Size of the mesh axis."""
        return math.prod(level.size for level in self.levels)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device does by itself.

    Attributes:
      kind: name of a hardware table, e.g. ``"v5e"``, or any word.
      platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
      memory_bytes_per_s: bytes that the local part of a transfer passes (CPU), or that memory
        reads and writes (TPU, GPU).
      copy_bytes_per_s: bytes of payload that a local pass (pack, fold) works through.
      step_ps: time to start one operation.
      num_hosts: processes (CPU), slices (TPU) or NVLink domains (GPU) in the topology.
      version: of the table the figures come from.
    """

    kind: str
    platform: Literal["cpu", "tpu", "gpu"]
    memory_bytes_per_s: int
    copy_bytes_per_s: int
    step_ps: int
    num_hosts: int = 1
    version: str = ""

    @classmethod
    def named(cls, kind: str, num_hosts: int = 1) -> Device:
        """Returns the device of a hardware table."""
        table = load(kind)
        memory = int(figure(kind, "memory_bandwidth"))
        # A pass over data in device memory reads it and writes it.
        copy = int(figure(kind, "copy_bandwidth")) if table["platform"] == "cpu" else memory // 2
        return cls(
            kind=kind,
            platform=table["platform"],
            memory_bytes_per_s=memory,
            copy_bytes_per_s=copy,
            step_ps=int(figure(kind, "step_latency")) * 1000,
            num_hosts=num_hosts,
            version=str(table["version"]),
        )
