"""Topologies: what the hardware offers to each mesh axis, as frozen, hashable data."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from xcoll.errors import unknown
from xcoll.hardware import profiles
from xcoll.hardware.curves import CodecRate as CodecRate
from xcoll.hardware.curves import Curve as Curve
from xcoll.hardware.fields import axis_sizes, many, word
from xcoll.hardware.links import AxisLinks as AxisLinks
from xcoll.hardware.links import Device as Device
from xcoll.hardware.links import Level as Level
from xcoll.hardware.links import Link as Link
from xcoll.hardware.mesh import read_mesh
from xcoll.hardware.stored import read_axes, read_curves, read_device, read_fields
from xcoll.hardware.text import read
from xcoll.records import decode
from xcoll.units import readable_rate, readable_time

_JSON_VERSION = 2

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Digit:
    """One level of some axes, seen from the ranks over them.

    With ``r`` the row-major rank over the axes, the position on the level is
    ``(r // stride) % level.size``.

    Attributes:
      axis: the mesh axis.
      stride: difference of rank between neighbouring positions.
      axis_stride: the same for positions along the axis.
      level: what it lies on.
    """

    axis: str
    stride: int
    axis_stride: int
    level: Level


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What each mesh axis lies on.

    Write one out, take it from a mesh with `from_mesh`, or from text with `parse`.

    Attributes:
      axes: the mesh axes, in the mesh's order.
      device: the devices; None where nothing is known about them. Every collective is
        then kept as it is.
      name: how messages call it.
      why_unknown: why ``device`` is None.
      measured: what XLA's own collectives took on this mesh, where that was measured
        (`xcoll.tune`). They are priced by it; what is not in it, by the links.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: two axes have the same name; something is measured twice, or over other axes.

    Example:
      >>> topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
      >>> print(topology)
      2*cpu:4@200Mbit
        host=2: network of 2, 23.9 MB/s one way, shared by 4, 60 µs
        device=4: memory of 4
      >>> Topology.from_json(topology.to_json()) == topology
      True
    """

    axes: tuple[AxisLinks, ...]
    device: Device | None = None
    name: str = "custom"
    why_unknown: str = ""
    measured: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", many("Topology", "axes", self.axes, AxisLinks))
        if self.device is not None and not isinstance(self.device, Device):
            raise TypeError(f"Topology(device={self.device!r}): must be a Device, or None")
        word("Topology", "name", self.name, empty=True)
        word("Topology", "why_unknown", self.why_unknown, empty=True)
        names = [axis.name for axis in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"Topology(axes=...): axis {name!r} is there twice; name each once"
                )
        object.__setattr__(self, "measured", many("Topology", "measured", self.measured, Curve))
        self._curves  # noqa: B018 - checked here, kept for later

    @classmethod
    def parse(cls, text: str, axes: Mapping[str, int] | None = None) -> Topology:
        """Reads a topology from text: ``[COUNT*]KIND:SIZE[xSIZE...][@RATE[,RATE...]]``.

        ``v5p:4x4x4`` is a slice of 4 x 4 x 4 chips, ``2*v5e:16x16`` two such slices over the
        data-centre network, ``h100:8`` a node of 8 GPUs, ``4*h100:8`` four, ``gb200:72`` an NVLink
        domain of 72, ``cpu:8`` one process with 8 devices, and ``2*cpu:4@200Mbit`` two processes on
        two hosts that are connected at that rate.

        A rate (``Mbit``, ``Gbit``, ``MB``, ``GB``, per second, one way) is that of each host's or
        slice's uplink, which its devices share; several, separated by commas, are those of each
        host. Without one, the hardware table's rate for each device holds; CPU hosts need one.

        Args:
          text: the topology.
          axes: mesh axes and sizes, in the mesh's order, laid out row-major: the last axis on the
            innermost links. None names them after the physical dimensions: ``slice``, ``x``, ``y``,
            ``z``, ``core`` on TPU, ``host`` and ``device`` elsewhere.

        Raises:
          TypeError: ``text`` is no string, or ``axes`` no mapping from strings to integers.
          ValueError: malformed text, with the place marked; a profile's path; unknown hardware; a
            size the hardware does not have; an axis of less than one; axes that make another number
            of devices, or that do not line up with the physical dimensions.
        """
        if isinstance(text, str) and profiles.path_in(text) is not None:
            raise ValueError(
                f"Topology.parse({text!r}): this names a profile, which holds for the devices it"
                " was measured on; read it with Topology.load(path, mesh)"
            )
        device, placed = read(text, axes)
        return cls(axes=placed, device=device, name=text)

    @classmethod
    def from_mesh(cls, mesh: Mesh) -> Topology:
        """Reads a topology from the devices of a mesh, and asks nothing else.

        TPU: ``coords``, ``core_on_chip`` and ``slice_index``. GPU: NVLink domains by
        ``slice_index``, else processes. CPU: one process; between processes the rate is not known,
        so the topology is unknown. Write it as text then.

        Args:
          mesh: a `jax.sharding.Mesh`.

        Returns:
          The topology; an `unknown` one where the devices are of an unknown kind, or lie in
          an order that no product of axes describes.

        Raises:
          TypeError: ``mesh`` has no devices, or an axis name is no string.
          ValueError: the mesh is empty.
        """
        if getattr(mesh, "devices", None) is None:
            raise TypeError(f"Topology.from_mesh({mesh!r}): must be a jax.sharding.Mesh")
        if not mesh.devices.size:
            raise ValueError(
                f"Topology.from_mesh({mesh!r}): the mesh has no devices; make one with"
                " jax.make_mesh"
            )
        sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        found = read_mesh(mesh.devices, sizes)
        if isinstance(found, str):
            return cls.unknown(sizes, found)
        device, placed, name = found
        return cls(axes=placed, device=device, name=name)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mesh: Mesh) -> Topology:
        """Reads the topology of a profile that `xcoll.tune`, or ``xcoll tune``, has written.

        Its name is that of the file, and so reports say which profile planned.

        Args:
          path: of the profile.
          mesh: the mesh to plan for. The profile has to be of the same axes, in the same order, the
            same devices in the same processes, and measured by this version of jax.

        Raises:
          TypeError: ``mesh`` has no devices.
          FileNotFoundError: there is no such file.
          ValueError: it is no profile, or a corrupt one; it is of another mesh, or older than this
            jax or this format. The message says what differs.
        """
        from jax.sharding import Mesh

        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"Topology.load(mesh={mesh!r}): must be a jax.sharding.Mesh, with its devices"
            )
        content, system = profiles.load("Topology.load", path)
        profiles.check("Topology.load", path, system, mesh)
        try:
            found = cls.from_json(json.dumps(content.get("topology")))
            found.check("topology", dict(zip(system.axes, system.axis_sizes, strict=True)))
        except ValueError as err:
            where = f"Topology.load: {os.fspath(path)}"
            raise ValueError(f"{where} is no profile: {err}; {profiles.FIX}") from None
        name = f"profile {os.path.basename(path)} {found.fingerprint}"
        return replace(found, name=name)

    @classmethod
    def unknown(cls, axes: Mapping[str, int], why: str = "the hardware is not known") -> Topology:
        """Returns a topology about which nothing is known: every plan for it is native.

        Raises:
          TypeError: ``axes`` is no mapping from strings to integers.
          ValueError: an axis of less than one.
        """
        return cls(
            axes=tuple(
                AxisLinks(name=n, levels=(_nothing(n, s),) if s > 1 else ())
                for n, s in axis_sizes("Topology.unknown", axes).items()
            ),
            name="unknown",
            why_unknown=why,
        )

    @property
    def is_known(self) -> bool:
        """Whether collectives can be priced."""
        return self.device is not None

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"tpu"``, ``"gpu"`` or ``"unknown"``."""
        return self.device.platform if self.device else "unknown"

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes and their sizes."""
        return {axis.name: axis.size for axis in self.axes}

    @functools.cached_property
    def _curves(self) -> dict[tuple[str, frozenset[str]], Curve]:
        """The curves by collective and axes, those of one position left out."""
        sizes = self.axis_sizes
        found: dict[tuple[str, frozenset[str]], Curve] = {}
        for curve in self.measured:
            over = f"{curve.collective} over {curve.axes}"
            for axis in curve.axes:
                if axis not in sizes:
                    raise ValueError(unknown("Topology(measured=...)", "axis", axis, sizes))
            key = curve.collective, frozenset(a for a in curve.axes if sizes[a] > 1)
            if key in found:
                raise ValueError(f"Topology(measured=...): {over} is there twice; keep one curve")
            found[key] = curve
        return found

    def curve(self, collective: str, axes: Iterable[str]) -> Curve | None:
        """Returns what a collective over all of some axes was measured to take, or None.

        Args:
          collective: one of `Curve`'s.
          axes: mesh axes in any order; those of one position do not count.
        """
        over = frozenset(axis for axis in axes if self.axis_sizes[axis] > 1)
        return self._curves.get((collective, over))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits; equal where topologies are, whatever they are called."""
        values = {name: value for name, value in asdict(self).items() if name != "name"}
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def check(self, call: str, axis_sizes: Mapping[str, int]) -> None:
        """Checks that the topology describes a mesh with these axes, in their order.

        The same axes in another order lie on other links: the last one on the innermost.

        Raises:
          ValueError: it describes another; both are shown.
        """
        if tuple(self.axis_sizes.items()) != tuple(axis_sizes.items()):
            is_order = self.axis_sizes == dict(axis_sizes)
            raise ValueError(
                f"{call}: the topology does not match the mesh: topology {self.name!r} has axes"
                f" {_sizes(self.axis_sizes)}, the mesh has {_sizes(axis_sizes)}"
                + (", in another order" if is_order else "")
                + "; give the topology the mesh's axes, in its order, for example"
                " Topology.parse(text, axes=dict(mesh.shape))"
            )

    def digits(self, axes: Iterable[str]) -> tuple[Digit, ...]:
        """Returns the levels that ranks over ``axes`` lie on, innermost (fastest varying) first."""
        by_name = {axis.name: axis for axis in self.axes}
        out: list[Digit] = []
        stride = 1
        for name in reversed(tuple(axes)):
            axis_stride = 1
            for level in by_name[name].levels:
                if level.size > 1:
                    out.append(Digit(name, stride, axis_stride, level))
                stride *= level.size
                axis_stride *= level.size
        return tuple(out)

    def to_json(self) -> str:
        """Returns the topology as JSON text; `from_json` reads it back, equal."""
        return json.dumps({"version": _JSON_VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Returns the topology that `to_json` wrote, or that was written by hand in its form.

        Raises:
          ValueError: the text is not such a topology: no JSON, another version, a field that is
            missing, unknown, or has a wrong value.
        """

        def make(data: dict[str, Any]) -> Topology:
            values = read_fields(cls, data)
            values["axes"] = read_axes(values["axes"])
            values["device"] = read_device(values.get("device"))
            values["measured"] = read_curves(values.get("measured", ()))
            return cls(**values)

        return decode("Topology.from_json", "a topology by to_json", text, _JSON_VERSION, make)

    def __hash__(self) -> int:
        # Topologies are keys of caches, and this hash is computed once.
        return hash(self.fingerprint)

    def __str__(self) -> str:
        lines = [self.name + (f": {self.why_unknown}" if self.why_unknown else "")]
        for axis in self.axes:
            levels = "; ".join(_describe(level) for level in axis.levels) or "one device"
            lines.append(f"  {axis.name}={axis.size}: {levels}")
        if self.measured:
            over = dict.fromkeys(" and ".join(curve.axes) for curve in self.measured)
            lines.append(f"  measured: XLA's own collectives over {'; '.join(over)}")
        return "\n".join(lines)


def _nothing(axis: str, size: int) -> Level:
    link = Link(kind="unknown", network="memory", bandwidth_bytes_per_s=1)
    return Level(size=size, link=link, dimension=axis)


def _sizes(axes: Mapping[str, int]) -> str:
    return (
        "("
        + ", ".join(f"{k}={v}" for k, v in axes.items())
        + f", {math.prod(axes.values())} devices)"
    )


def _describe(level: Level) -> str:
    parts = [f"{level.link.kind} of {level.size}"]
    if level.stride > 1 or level.extent != level.size:
        parts[0] += f" (every {level.stride} of {level.dimension}={level.extent})"
    if level.link.network != "memory" and level.link.kind != "unknown":
        parts.append(f"{readable_rate(level.bandwidth_bytes_per_s)} one way")
        if len(set(level.rates_bytes_per_s)) > 1:
            parts.append(f"unequal hosts (fastest {readable_rate(max(level.rates_bytes_per_s))})")
        if level.link.network == "torus":
            parts.append("ring" if level.is_ring else "line")
        if level.shared_by > 1:
            parts.append(f"shared by {level.shared_by}")
        if level.link.latency_ps:
            parts.append(readable_time(level.link.latency_ps))
    return ", ".join(parts)
