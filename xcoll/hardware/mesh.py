"""Reads topologies from the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xcoll.hardware.links import AxisLinks, Device, Level
from xcoll.hardware.placement import (
    Dimension,
    cpu_dimensions,
    gpu_dimensions,
    tpu_dimensions,
)
from xcoll.hardware.tables import kind_of_device, load
from xcoll.hardware.text import take_apart

Found = tuple[Device, tuple[AxisLinks, ...], str]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where devices lie in a system.

    Attributes:
      device: what they are.
      dimensions: of the system, outermost first; some may have one position.
      coordinates: a row a device, a column a dimension.
      name: of the system.
    """

    device: Device
    dimensions: tuple[Dimension, ...]
    coordinates: np.ndarray[Any, Any]
    name: str

    @property
    def is_whole(self) -> bool:
        """Whether there is one device at each place."""
        places = math.prod(d.size for d in self.dimensions)
        count = len(self.coordinates)
        return count == places and len(np.unique(self.coordinates, axis=0)) == count


def read_mesh(devices: np.ndarray[Any, Any], axes: Mapping[str, int]) -> Found | str:
    """Returns the device, the axes and a name; or why nothing is known, as text."""
    places = read_places(list(devices.flat))
    if isinstance(places, str):
        return places
    coordinates = places.coordinates.reshape(*devices.shape, -1)
    levels = read_levels(coordinates, places.dimensions, tuple(axes))
    if levels is None:
        return "its devices lie in an order that no product of axes describes"
    return places.device, levels, places.name


def read_places(flat: Sequence[Any]) -> Places | str:
    """Returns where devices lie; or why that is not known, as text."""
    kinds = sorted({str(d.device_kind) for d in flat})
    if len(kinds) > 1:
        return f"the mesh mixes kinds of devices: {', '.join(kinds)}"
    kind = kind_of_device(kinds[0])
    if kind is None:
        return f"there is no hardware table for device kind {kinds[0]!r}"
    platform = load(kind)["platform"]
    coordinates: np.ndarray[Any, Any]
    if platform == "tpu":
        several = len(_slices(flat)) > 1
        if several and "dcn_bandwidth" not in load(kind)["figures"]:
            return f"the rate between {kind} slices is not known; give it as text, with '@RATE'"
        coordinates, dimensions, count = _tpu(kind, flat)
    else:
        hosts = _hosts(kind, flat)
        names = sorted(set(hosts))
        per_host = max(hosts.count(h) for h in names)
        if len(set(map(hosts.count, names))) > 1:
            return "its hosts have unequal numbers of devices"
        count = len(names)
        if platform == "cpu" and count > 1:
            return (
                f"the rate between its {count} CPU processes is not known; give it as text, for"
                f" example topology='{count}*cpu:{per_host}@10Gbit'"
            )
        coordinates = np.array(
            [(names.index(h), i) for h, i in zip(hosts, _local(hosts), strict=True)]
        )
        make = cpu_dimensions if platform == "cpu" else None
        found = make(per_host, 1) if make else gpu_dimensions(kind, per_host, count)
        dimensions = found if len(found) == 2 else [_single("host"), *found]
    sizes = "x".join(str(d.size) for d in dimensions if d.name not in ("slice", "host", "core"))
    return Places(
        device=Device.named(kind, count),
        dimensions=tuple(dimensions),
        coordinates=coordinates,
        name=_name(kind, count, sizes),
    )


def _name(kind: str, count: int, sizes: str) -> str:
    """Returns the text that describes such devices; plain words where none does."""
    text = f"{count}*{kind}:{sizes}" if count > 1 else f"{kind}:{sizes}"
    try:
        take_apart(text)
    except ValueError:
        return f"a mesh of {count} x {sizes} {kind}" if count > 1 else f"a mesh of {sizes} {kind}"
    return text


def _tpu(kind: str, flat: Sequence[Any]) -> tuple[np.ndarray[Any, Any], list[Dimension], int]:
    slices = _slices(flat)
    cores = max(getattr(d, "core_on_chip", 0) or 0 for d in flat) + 1
    rank = load(kind)["dimensions"]["value"]
    chips = np.array([tuple(d.coords)[:rank] for d in flat])
    chips = chips - chips.min(axis=0)
    torus = tuple(int(s) for s in chips.max(axis=0) + 1)
    coordinates = np.array(
        [
            (
                slices.index(getattr(d, "slice_index", 0) or 0),
                *c,
                getattr(d, "core_on_chip", 0) or 0,
            )
            for d, c in zip(flat, chips, strict=True)
        ]
    )
    found = {d.name: d for d in tpu_dimensions(kind, torus, len(slices), cores)}
    names = ["slice", *"xyz"[:rank], "core"]
    return coordinates, [found.get(n) or _single(n) for n in names], len(slices)


def _slices(flat: Sequence[Any]) -> list[int]:
    return sorted({getattr(d, "slice_index", 0) or 0 for d in flat})


def _hosts(kind: str, flat: Sequence[Any]) -> list[int]:
    """Returns the number of each device's NVLink domain (GPU) or process (CPU)."""
    processes = [int(d.process_index) for d in flat]
    domains = [getattr(d, "slice_index", None) for d in flat]
    if load(kind)["platform"] == "cpu" or any(map(_is_compile_only, flat)):
        return processes
    # On GPU, jax numbers NVLink domains as slices, since a node may run one process for each GPU.
    return processes if None in domains else [int(d) for d in domains if d is not None]


def _is_compile_only(device: Any) -> bool:
    """Whether it is described to a compiler only: such GPUs are all of one slice, nodes apart."""
    client = getattr(device, "client", None)
    return getattr(client, "runtime_type", "") == "compile_only_runtime"


def _local(hosts: Sequence[int]) -> list[int]:
    seen: dict[int, int] = {}
    out = []
    for host in hosts:
        out.append(seen.get(host, 0))
        seen[host] = out[-1] + 1
    return out


def _single(name: str) -> Dimension:
    """A dimension with one position: nothing moves along it."""
    (memory,) = cpu_dimensions(1, 1)
    return Dimension(name=name, size=1, link=memory.link)


def read_levels(
    coordinates: np.ndarray[Any, Any], dimensions: Sequence[Dimension], names: Sequence[str]
) -> tuple[AxisLinks, ...] | None:
    """Returns each axis's levels; None where they do not give every device its coordinates."""
    shape = coordinates.shape[:-1]
    origin = coordinates[(0,) * len(shape)]
    predicted = np.broadcast_to(origin, coordinates.shape).copy()
    out = []
    for position, name in enumerate(names):
        index: list[Any] = [0] * len(shape)
        index[position] = slice(None)
        line = coordinates[tuple(index)] - origin
        found = _axis(line, dimensions)
        if found is None:
            return None
        spread = [1] * len(shape)
        spread[position] = shape[position]
        predicted += line.reshape(*spread, -1)
        out.append(AxisLinks(name=name, levels=found))
    return tuple(out) if (predicted == coordinates).all() else None


def _axis(line: np.ndarray[Any, Any], dimensions: Sequence[Dimension]) -> tuple[Level, ...] | None:
    """Levels of one axis from the coordinates along it, from its start; None if irregular."""
    size = len(line)
    levels: list[Level] = []
    done = 1
    while done < size:
        moved = np.flatnonzero(line[done])
        if len(moved) != 1:
            return _box(line, dimensions)
        k = int(moved[0])
        stride = int(line[done][k])
        count = 1
        while (count + 1) * done <= size and _is_at(line[count * done], k, count * stride):
            count += 1
        while size % (done * count):
            count -= 1
        if count == 1:
            return _box(line, dimensions)
        levels.append(dimensions[k].level(count, abs(stride)))
        done *= count
    return tuple(levels) if _is_mixed_radix(line, levels) else _box(line, dimensions)


def _is_at(place: np.ndarray[Any, Any], k: int, distance: int) -> bool:
    return bool(place[k] == distance and np.count_nonzero(place) == 1)


def _is_mixed_radix(line: np.ndarray[Any, Any], levels: Sequence[Level]) -> bool:
    total = np.zeros_like(line)
    done = 1
    for level in levels:
        digit = (np.arange(len(line)) // done) % level.size
        total += line[digit * done]
        done *= level.size
    return bool((total == line).all())


def _box(line: np.ndarray[Any, Any], dimensions: Sequence[Dimension]) -> tuple[Level, ...] | None:
    """Levels of a torus axis whose devices fill a box in an order of their own, else None.

    jax winds small slices into a ring, or follows the trays of a host. XLA's collectives go by the
    box, whatever the order in it.
    """
    used = [k for k in range(line.shape[1]) if len(np.unique(line[:, k])) > 1]
    sizes = [len(np.unique(line[:, k])) for k in used]
    spans = [int(np.ptp(line[:, k])) for k in used]
    links = {dimensions[k].link for k in used}
    if len(np.unique(line, axis=0)) != len(line) or math.prod(sizes) != len(line):
        return None
    if len(links) != 1 or next(iter(links)).network != "torus":
        return None
    levels = []
    for k, size, span in zip(used, sizes, spans, strict=True):
        stride, rest = divmod(span, size - 1)
        if rest:
            return None
        levels.append(dimensions[k].level(size, stride))
    return tuple(reversed(levels))
