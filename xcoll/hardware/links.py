"""Links, the levels of a mesh axis that lie on them, and the device between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from xcoll.errors import unknown
from xcoll.hardware.curves import CodecRate, Points, rising_points
from xcoll.hardware.fields import many, one_of, whole, word
from xcoll.hardware.tables import figure, kinds, load

Network = Literal["torus", "switch", "memory"]
Platform = Literal["cpu", "tpu", "gpu"]


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
      swap_percent: time of a permute in which two ends send to each other over one connection, in
        percent of what ``bandwidth_bytes_per_s`` says. 100 where both ways are free at once; near
        200 over Gloo, which uses a connection one way at a time.
      unlike_percent: the same for a permute that uses both ways of the link, but between pairs that
        are not each other's reverse, so that each connection carries one way only.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: an unknown network; a number that has a fraction or is out of range.

    Example:
      >>> Link(kind="lan", network="switch", bandwidth_bytes_per_s=25e6).bandwidth_bytes_per_s
      25000000
    """

    kind: str
    network: Network
    bandwidth_bytes_per_s: int
    latency_ps: int = 0
    swap_percent: int = 100
    unlike_percent: int = 100

    def __post_init__(self) -> None:
        word("Link", "kind", self.kind)
        one_of("Link", "network", self.network, get_args(Network))
        _set_whole(self, bandwidth_bytes_per_s=1, latency_ps=0, swap_percent=1, unlike_percent=1)


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
      rates_bytes_per_s: one way, of the port of each position of the whole dimension where they
        are unequal; else empty. The slowest bounds a collective.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a number has a fraction or is out of range, the level does not fit its dimension,
        or there is another number of rates than of positions.
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
        _set_whole(self, size=1, extent=0, stride=1, shared_by=1)
        many("Level", "link", (self.link,), Link)
        word("Level", "dimension", self.dimension)
        if not isinstance(self.wrap, bool):
            raise TypeError(f"Level(wrap={self.wrap!r}): must be True or False")
        if self.extent == 0:
            _set(self, "extent", self.size * self.stride)
        if self.extent < (self.size - 1) * self.stride + 1:
            raise ValueError(
                f"Level(size={self.size}, stride={self.stride}, extent={self.extent}): does not"
                " fit the dimension"
            )
        rates = many("Level", "rates_bytes_per_s", self.rates_bytes_per_s)
        _set(
            self,
            "rates_bytes_per_s",
            tuple(whole("Level", "rates_bytes_per_s", r, 1) for r in rates),
        )
        if rates and len(rates) != self.extent:
            raise ValueError(
                f"Level(rates_bytes_per_s={rates!r}): give one rate for each of the {self.extent}"
                f" positions of dimension {self.dimension!r}, not {len(rates)}; or none"
            )

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

    def __post_init__(self) -> None:
        word("AxisLinks", "name", self.name)
        _set(self, "levels", many("AxisLinks", "levels", self.levels, Level))

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
      lone_step_ps: the same of a step in which one device alone sends, as near the root of a tree:
        less where devices share a host's cores; 0 where nothing is known, and ``step_ps`` holds.
      num_hosts: processes (CPU), slices (TPU) or NVLink domains (GPU) in the topology.
      version: of the table the figures come from.
      codec_rates: how fast codecs were measured to encode and decode; one that is not among them is
        priced by its passes at ``copy_bytes_per_s`` (`xcoll.local_work`).
      permute_points: ``(bytes, time_ps)`` that the local part of a transfer was measured to take
        beside ``step_ps``; empty where ``memory_bytes_per_s`` says it for all sizes.
      fresh_points: ``(bytes, time_ps)`` that a result was measured to take beyond what the rates
        say, by its size: the memory of large ones is asked of the system each time. Empty where
        nothing is known.
      overlap_percent: of local work (copies, codecs) that hides behind a transfer between hosts
        that runs at the same time and lasts as long; 0 where nothing is known to.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: an unknown platform, or another than that of the hardware table of this kind; a
        number that has a fraction or is out of range.
    """

    kind: str
    platform: Platform
    memory_bytes_per_s: int
    copy_bytes_per_s: int
    step_ps: int
    num_hosts: int = 1
    version: str = ""
    codec_rates: tuple[CodecRate, ...] = ()
    permute_points: Points = ()
    fresh_points: Points = ()
    overlap_percent: int = 0
    lone_step_ps: int = 0

    def __post_init__(self) -> None:
        word("Device", "kind", self.kind)
        one_of("Device", "platform", self.platform, get_args(Platform))
        word("Device", "version", self.version, empty=True)
        _set_whole(
            self,
            memory_bytes_per_s=1,
            copy_bytes_per_s=1,
            step_ps=0,
            lone_step_ps=0,
            num_hosts=1,
        )
        _set(
            self,
            "overlap_percent",
            whole("Device", "overlap_percent", self.overlap_percent, 0, 100),
        )
        for name in ("permute_points", "fresh_points"):
            points = many("Device", name, getattr(self, name))
            _set(self, name, rising_points("Device", name, points) if points else ())
        _set(self, "codec_rates", many("Device", "codec_rates", self.codec_rates, CodecRate))
        if self.kind in kinds() and self.platform != load(self.kind)["platform"]:
            raise ValueError(
                f"Device(kind={self.kind!r}, platform={self.platform!r}): {self.kind} is of"
                f" platform {load(self.kind)['platform']!r}; give a device of your own another kind"
            )

    @classmethod
    def named(cls, kind: str, num_hosts: int = 1) -> Device:
        """Returns the device of a hardware table.

        Raises:
          ValueError: there is none; the valid ones and the nearest are named.
        """
        if kind not in kinds():
            raise ValueError(unknown("Device.named", "hardware", kind, kinds()))
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
            overlap_percent=int(figure(kind, "overlap")) if "overlap" in table["figures"] else 0,
            num_hosts=num_hosts,
            version=str(table["version"]),
        )


def _set(record: Any, name: str, value: Any) -> None:
    object.__setattr__(record, name, value)


def _set_whole(record: Any, **least: int) -> None:
    """Makes fields integers, of at least the values that are given."""
    for name, bound in least.items():
        _set(record, name, whole(type(record).__name__, name, getattr(record, name), bound))
