"""Reads topologies from the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

Found = tuple[Device, tuple[AxisLinks, ...], str]


def read_mesh(devices: np.ndarray[Any, Any], axes: Mapping[str, int]) -> Found | str:
    """Returns the device, the axes and a name; or why nothing is known, as text."""
    flat = list(devices.flat)
    kinds = sorted({str(d.device_kind) for d in flat})
    if len(kinds) > 1:
        return f"the mesh mixes kinds of devices: {', '.join(kinds)}"
    kind = kind_of_device(kinds[0])
    if kind is None:
        return f"there is no hardware table for device kind {kinds[0]!r}"
    platform = load(kind)["platform"]
    coordinates: np.ndarray[Any, Any]
    if platform == "tpu":
        coordinates, dimensions, count = _tpu(kind, flat)
    else:
        hosts = [_host(d, platform) for d in flat]
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
    levels = _levels(coordinates.reshape(*devices.shape, -1), dimensions, tuple(axes))
    if levels is None:
        return "its devices lie in an order that no product of axes describes"
    sizes = "x".join(str(d.size) for d in dimensions if d.name not in ("slice", "host", "core"))
    name = f"{count}*{kind}:{sizes}" if count > 1 else f"{kind}:{sizes}"
    return Device.named(kind, count), levels, name


def _tpu(kind: str, flat: Sequence[Any]) -> tuple[np.ndarray[Any, Any], list[Dimension], int]:
    slices = sorted({getattr(d, "slice_index", 0) or 0 for d in flat})
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


def _host(device: Any, platform: str) -> int:
    # On GPU, jax numbers NVLink domains as slices; a node may run one process for each GPU.
    slice_index = getattr(device, "slice_index", None) if platform == "gpu" else None
    return int(device.process_index if slice_index is None else slice_index)


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


def _levels(
    coordinates: np.ndarray[Any, Any], dimensions: Sequence[Dimension], names: Sequence[str]
) -> tuple[AxisLinks, ...] | None:
    """Finds each axis's levels, and checks that they give every device its coordinates."""
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
            return _cycle(line, dimensions) if not levels else None
        k = int(moved[0])
        stride = int(line[done][k])
        count = 1
        while (
            (count + 1) * done <= size
            and line[count * done][k] == count * stride
            and np.count_nonzero(line[count * done]) == 1
        ):
            count += 1
        while size % (done * count):
            count -= 1
        if count == 1:
            return _cycle(line, dimensions)
        # The digit repeats: position i is that of its high part plus that of its low part.
        high, low = np.divmod(np.arange(done * count), done)
        if not (line[: done * count] == line[low] + line[high * done]).all():
            return _cycle(line, dimensions)
        levels.append(dimensions[k].level(count, abs(stride)))
        done *= count
    high_done = math.prod(level.size for level in levels)
    assert high_done == size
    if not _is_mixed_radix(line, levels):
        return _cycle(line, dimensions)
    return tuple(levels)


def _is_mixed_radix(line: np.ndarray[Any, Any], levels: Sequence[Level]) -> bool:
    total = np.zeros_like(line)
    done = 1
    for level in levels:
        digit = (np.arange(len(line)) // done) % level.size
        total += line[digit * done]
        done *= level.size
    return bool((total == line).all())


def _cycle(line: np.ndarray[Any, Any], dimensions: Sequence[Dimension]) -> tuple[Level, ...] | None:
    """An axis that winds through a torus, as jax lays out small TPU slices."""
    steps = np.abs(np.diff(line, axis=0, append=line[:1]))
    used = [dimensions[int(k)] for k in np.flatnonzero(steps.any(axis=0))]
    links = {dimension.link for dimension in used}
    if len(links) != 1 or next(iter(links)).network != "torus":
        return None
    if (steps[:-1].sum(axis=1) != 1).any():
        return None
    closed = bool(steps[-1].sum() == 1)
    winding = Dimension(
        name="winding",
        size=len(line),
        link=used[0].link,
        shared_by=used[0].shared_by,
        wrap=closed,
    )
    return (winding.level(len(line), 1),)
