"""Bytes that a compiled program sends, and over which mesh axes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from xcoll.hlo.reader import Collective, collectives

_SLICE = 100_000  # libtpu numbers the devices of slice s from 100000 * (s + 1)


def axes_of(collective: Collective, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that a collective acts over, in the mesh's order.

    An axis counts if two devices of one group, or of one pair, differ in it.

    Args:
      collective: a row of `collectives`.
      mesh: the mesh that its program was compiled for.

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> axes_of(collectives(PROGRAM)[0], mesh)  # doctest: +SKIP
      ('data',)
    """
    differ = np.zeros(mesh.devices.ndim, bool)
    for group in _groups(collective, mesh):
        places = np.array(np.unravel_index(group, mesh.devices.shape))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)


def sends(
    collective: Collective, mesh: jax.sharding.Mesh
) -> Iterator[tuple[int, int, int | Fraction]]:
    """Yields ``(source, destination, bytes)`` for one execution of a collective.

    For permutes these are the pairs of the program. What a backend does inside another collective
    is not in its text; by convention each group is one ring, in the order of its ranks (row-major
    over the axes for jax.lax's collectives). With n ranks and an operand of B bytes, each rank
    sends to the next

    * all-reduce: 2 (n - 1) / n · B
    * reduce-scatter: (n - 1) / n · B
    * all-gather: (n - 1) · B
    * collective-broadcast: B, the last rank nothing

    and in an all-to-all B / n to each other rank: exact, as a fraction of bytes. A recv between
    slices is the other end of its send and yields nothing; nor does a transfer to the host.

    Args:
      collective: a row of `collectives`.
      mesh: the mesh that its program was compiled for.
    """
    num_bytes, kind = collective.operand_bytes, collective.transfer or collective.kind
    if collective.kind == "recv":
        return
    for group in _groups(collective, mesh):
        n = len(group)
        if collective.pairs is not None:
            if group[0] != group[1]:
                yield group[0], group[1], num_bytes
        elif "all-to-all" in kind:
            share = Fraction(num_bytes, n)
            yield from ((a, b, share) for a in group for b in group if a != b)
        elif n > 1:
            each: int | Fraction = {
                "all-reduce": Fraction(2 * (n - 1) * num_bytes, n),
                "reduce-scatter": Fraction((n - 1) * num_bytes, n),
                "all-gather": Fraction((n - 1) * num_bytes),
                "collective-broadcast": Fraction(num_bytes),
            }[kind]
            ring = zip(group, group[1:] + group[:1], strict=True)
            for source, destination in list(ring)[: n - 1 if kind == "collective-broadcast" else n]:
                yield source, destination, each


def wire_bytes(
    program: Any, mesh: jax.sharding.Mesh, *, unknown_trips: int | None = None
) -> dict[str, int]:
    """Counts the bytes that the busiest device sends over each axis in one execution.

    What goes to a device that differs in several axes counts on each of them. See `sends` for what
    is counted; a fraction of a byte is dropped from the sum.

    Args:
      program: a compiled program or its text.
      mesh: the mesh that it was compiled for.
      unknown_trips: trip count to take for a loop whose own the text does not show.

    Returns:
      Bytes for each axis of the mesh, in its order.

    Raises:
      ValueError: a collective runs an unknown number of times and ``unknown_trips`` is None.
    """
    sent = {name: [Fraction(0)] * mesh.devices.size for name in mesh.axis_names}
    for source, axes, num_bytes in _crossings("wire_bytes", program, mesh, unknown_trips):
        for axis in axes:
            sent[axis][source] += num_bytes
    return {name: int(max(per_device)) for name, per_device in sent.items()}


def crossing_bytes(
    program: Any, mesh: jax.sharding.Mesh, axis: str, *, unknown_trips: int | None = None
) -> int:
    """Counts all bytes sent in one execution between devices that differ in ``axis``.

    Args:
      program: a compiled program or its text.
      mesh: the mesh that it was compiled for.
      axis: a mesh axis, for example the one over hosts.
      unknown_trips: as in `wire_bytes`.

    Returns:
      The sum over all devices.

    Raises:
      ValueError: as `wire_bytes`, or the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"crossing_bytes: the mesh has no axis {axis!r}, only {mesh.axis_names}")
    found = _crossings("crossing_bytes", program, mesh, unknown_trips)
    return int(sum(num_bytes for _, axes, num_bytes in found if axis in axes))


def _crossings(
    call: str, program: Any, mesh: jax.sharding.Mesh, unknown_trips: int | None
) -> Iterator[tuple[int, tuple[str, ...], int | Fraction]]:
    places = np.array(np.unravel_index(np.arange(mesh.devices.size), mesh.devices.shape))
    for collective in collectives(program):
        times = collective.executions if collective.executions is not None else unknown_trips
        if times is None:
            raise ValueError(
                f"{call}: {collective.name} ({collective.kind}) runs in a loop of unknown trip"
                " count; say how often with unknown_trips="
            )
        for source, destination, num_bytes in sends(collective, mesh):
            differ = places[:, source] != places[:, destination]
            axes = tuple(n for n, d in zip(mesh.axis_names, differ, strict=True) if d)
            yield source, axes, num_bytes * times


def _groups(collective: Collective, mesh: jax.sharding.Mesh) -> list[tuple[int, ...]]:
    """Returns groups or pairs as positions in the whole mesh."""
    found = collective.pairs if collective.pairs is not None else collective.groups or ()
    devices = list(mesh.devices.flat)
    if collective.transfer is not None:
        position = {device.id: i for i, device in enumerate(devices)}
        return [tuple(position[i] for i in group) for group in found]
    if collective.num_devices in (1, len(devices)):
        return [tuple(group) for group in found]
    slices: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        slices.setdefault(device.id // _SLICE - 1, []).append(i)
    if any(len(s) != collective.num_devices for s in slices.values()):
        raise ValueError(
            f"hlo: {collective.name} numbers {collective.num_devices} devices, but the mesh has"
            f" {len(devices)}; pass the mesh that the program was compiled for"
        )
    run = slices if collective.slices is None else collective.slices
    return [tuple(slices[s][i] for i in group) for s in run for group in found]
