"""Lays mesh axes over physical dimensions, row-major."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xcoll.hardware.links import AxisLinks, Level, Link
from xcoll.hardware.tables import figure, load


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One physical dimension of a system: the hosts, a torus axis, the GPUs of a node."""

    name: str
    size: int
    link: Link
    shared_by: int = 1
    wrap: bool = False
    rates_bytes_per_s: tuple[int, ...] = ()

    def level(self, size: int, stride: int) -> Level:
        """Returns the level of ``size`` positions that are ``stride`` apart."""
        return Level(
            size=size,
            link=self.link,
            dimension=self.name,
            extent=self.size,
            stride=stride,
            shared_by=self.shared_by,
            wrap=self.wrap,
            rates_bytes_per_s=self.rates_bytes_per_s,
        )


def place(dimensions: Sequence[Dimension], axes: Mapping[str, int]) -> tuple[AxisLinks, ...]:
    """Returns what each axis lies on when both are numbered row-major.

    Args:
      dimensions: outermost first.
      axes: mesh axes in the mesh's order; as many devices as the dimensions.

    Raises:
      ValueError: an axis starts or ends inside a dimension at a point that does not divide it.
    """
    free = [(d, d.size) for d in dimensions if d.size > 1]
    placed: list[AxisLinks] = []
    for name, size in reversed(list(axes.items())):
        levels: list[Level] = []
        todo = size
        while todo > 1:
            dimension, left = free.pop()
            part = math.gcd(todo, left)
            if part == 1 or (part < todo and part < left):
                raise ValueError(
                    f"axis {name!r} of {size} does not line up with dimension {dimension.name!r} of"
                    f" {dimension.size}: choose axis sizes whose products, from the last axis on,"
                    f" divide or are multiples of {dimension.size}"
                )
            levels.append(dimension.level(part, dimension.size // left))
            if part < left:
                free.append((dimension, left // part))
            todo //= part
        placed.append(AxisLinks(name=name, levels=tuple(levels)))
    return tuple(reversed(placed))


def tpu_dimensions(
    kind: str, torus: Sequence[int], slices: int, devices_per_chip: int, rates: tuple[int, ...] = ()
) -> list[Dimension]:
    """Returns the dimensions of TPU slices, outermost first."""
    table = load(kind)
    ici = Link(
        kind="ici",
        network="torus",
        bandwidth_bytes_per_s=int(figure(kind, "ici_bandwidth")),
        latency_ps=int(figure(kind, "ici_latency")) * 1000,
    )
    multiple, least = table["wrap_multiple"]["value"], table["wrap_at_least"]["value"]
    out = []
    if slices > 1:
        out.append(
            Dimension(
                name="slice",
                size=slices,
                link=_link(kind, "dcn", rates),
                # The table has the rate of each chip; a rate that is given is the whole slice's.
                shared_by=devices_per_chip * (math.prod(torus) if rates else 1),
                rates_bytes_per_s=rates if len(rates) > 1 else (),
            )
        )
    out += [
        Dimension(
            name=name,
            size=size,
            link=ici,
            shared_by=devices_per_chip,
            wrap=size >= least and size % multiple == 0,
        )
        for name, size in zip("xyz", torus, strict=False)
    ]
    if devices_per_chip > 1:
        out.append(Dimension(name="core", size=devices_per_chip, link=_link(kind, "core", ())))
    return out


def gpu_dimensions(
    kind: str, gpus: int, hosts: int, rates: tuple[int, ...] = ()
) -> list[Dimension]:
    """Returns the dimensions of GPU nodes (NVLink domains), outermost first."""
    nvlink = Link(
        kind="nvlink",
        network="switch",
        bandwidth_bytes_per_s=int(figure(kind, "nvlink_reached")),
        latency_ps=int(figure(kind, "nvlink_latency")) * 1000,
    )
    out = [Dimension(name="device", size=gpus, link=nvlink)]
    if hosts > 1:
        each = rates if len(rates) > 1 else ()
        link = _link(kind, "network", rates)
        # The table has one port a GPU; a rate that is given is the whole node's.
        shared_by = gpus if rates else 1
        out.insert(
            0,
            Dimension(
                name="host", size=hosts, link=link, shared_by=shared_by, rates_bytes_per_s=each
            ),
        )
    return out


def cpu_dimensions(
    devices: int, hosts: int, rates_bytes_per_s: tuple[int, ...] = ()
) -> list[Dimension]:
    """Returns the dimensions of CPU hosts; ``rates_bytes_per_s`` are those of the wire."""
    memory = Link(
        kind="memory",
        network="memory",
        bandwidth_bytes_per_s=int(figure("cpu", "memory_bandwidth")),
    )
    out = [Dimension(name="device", size=devices, link=memory)]
    if hosts > 1:
        payload, wire = figure("cpu", "goodput")
        goodput = tuple(max(1, rate * payload // wire) for rate in rates_bytes_per_s)
        link = _link("cpu", "network", goodput)
        each = goodput if len(goodput) > 1 else ()
        out.insert(
            0,
            Dimension(
                name="host", size=hosts, link=link, shared_by=devices, rates_bytes_per_s=each
            ),
        )
    return out


def _link(kind: str, name: str, rates: tuple[int, ...]) -> Link:
    figures = load(kind)["figures"]
    latency = f"{name}_latency"
    return Link(
        kind=name,
        network="switch",
        bandwidth_bytes_per_s=max(rates) if rates else int(figure(kind, f"{name}_bandwidth")),
        latency_ps=int(figure(kind, latency)) * 1000 if latency in figures else 0,
        swap_percent=int(figure(kind, "duplex_swap")) if "duplex_swap" in figures else 100,
        unlike_percent=int(figure(kind, "duplex_ring")) if "duplex_ring" in figures else 100,
    )
