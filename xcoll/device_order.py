"""Meshes whose device order puts the axes with the most traffic on the fastest links."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from xcoll.axis_shapes import check_axes, does_not_fit
from xcoll.errors import XcollWarning, unknown
from xcoll.hardware.mesh import Places, read_levels
from xcoll.layouts import System, choose, total_ps
from xcoll.systems import locate
from xcoll.topology import Topology

DEFAULT_BYTES = 64 * 2**20
"""Payload of an all-reduce, on each device, where nothing is said about traffic."""


class Audited(Protocol):
    """What is needed of an `xcoll.hlo.Audit`, which stands layers above."""

    @property
    def wire_bytes(self) -> Mapping[str, int]:
        """Bytes that the busiest device sends over each axis in a step."""

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """The axes of the mesh that the program was compiled for."""


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str] | str,
    axis_types: tuple[AxisType, ...] | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    topology: Topology | str | None = None,
    traffic: Mapping[str, int] | Audited | None = None,
) -> Mesh:
    """Makes a mesh as `jax.make_mesh` does, with the heavy axes on the fast links.

    Without ``traffic`` and ``topology`` the mesh is that of `jax.make_mesh`, wherever it makes one.
    Where it refuses (several slices, an axis that would split a torus dimension), and where only a
    ``topology`` is given, each axis is taken to carry four times what the one before it carries:
    jax too orders axes by increasing traffic.

    Otherwise the order is the one with the least sum, over the axes, of the predicted time of XLA's
    all-reduce of the axis's traffic: light axes lie between slices and hosts, outermost, and heavy
    ones on whole torus dimensions, which are rings where they wrap around. A ring is divided only
    where the sizes leave no other way, or where that is predicted to be twice as fast. jax's own
    order stays unless another is predicted faster. The result is the same in every process.
    `xcoll.explain_mesh` shows it.

    Args:
      axis_shapes: size of each axis; with a product below the number of devices, the first devices
        are used, as jax does.
      axis_names: a name for each.
      axis_types: as `jax.make_mesh`; Explicit by default.
      devices: by default all of `jax.devices`.
      topology: what the devices lie on, where they do not say (CPU processes, virtual devices,
        rates between slices): a `Topology`, whose axes do not matter, or its text.
      traffic: bytes that each device all-reduces over an axis in a step. Axes that are not named
        carry nothing. Or the `xcoll.audit` of a step for a mesh with the same axis names, in any
        device order: an axis carries the all-reduce that sends as many bytes.

    Returns:
      The mesh. Where nothing is known about the devices, `jax.make_mesh`'s.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the sizes do not fit the devices, with the nearest that do; the topology does not;
        an axis of ``traffic`` is not there; or an audit has other axes.

    Example:
      >>> import jax
      >>> mesh = make_mesh((2, 4), ("model", "data"), topology="4*cpu:2@1Gbit",
      ...                  traffic={"model": 2**28, "data": 2**20})
      >>> [[device.id for device in row] for row in mesh.devices]  # hosts: 0 1, 2 3, 4 5, 6 7
      [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    shape, names = check_axes("make_mesh", axis_shapes, axis_names)
    call = f"make_mesh({shape}, {names})"
    every = list(jax.devices() if devices is None else devices)
    used = every[: math.prod(shape)]
    if math.prod(shape) > len(every):
        raise ValueError(does_not_fit(call, shape, len(every)))
    axis_bytes = check_traffic(call, names, traffic)
    plain = _plain(shape, names, axis_types, used)
    if isinstance(plain, Mesh) and traffic is None and topology is None:
        return plain
    places = locate(call, used, topology)
    if isinstance(places, str):
        if isinstance(plain, Exception):
            raise ValueError(f"{call}: jax.make_mesh refuses, and {places}: {plain}") from plain
        if traffic is not None:
            warnings.warn(
                f"{call}: traffic is not used, the order is jax.make_mesh's: {places}",
                XcollWarning,
                stacklevel=2,
            )
        return plain
    if not places.is_whole:  # holes, or a part that is no box
        if isinstance(plain, Mesh):
            return plain
        raise ValueError(
            does_not_fit(call, shape, len(every), "whose first ones fill no box of the system")
        ) from plain
    return _ordered(shape, names, axis_types, used, places, axis_bytes, plain)


def _ordered(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    axis_types: tuple[AxisType, ...] | None,
    devices: list[Any],
    places: Places,
    axis_bytes: tuple[int, ...],
    plain: Mesh | Exception,
) -> Mesh:
    system = System(device=places.device, dimensions=places.dimensions)
    if isinstance(plain, Mesh) and plain.size == 1:
        return plain
    layout = choose(system, shape, axis_bytes)
    if isinstance(plain, Mesh):
        number = {device: i for i, device in enumerate(devices)}
        order = [number[device] for device in plain.devices.flat]
        found = read_levels(
            places.coordinates[order].reshape(*shape, -1),
            places.dimensions,
            tuple(map(str, range(len(shape)))),
        )
        if found is not None and total_ps(system, found, axis_bytes) <= layout.time_ps:
            return plain
    box = np.empty(system.sizes, object)
    for device, coordinates in zip(devices, places.coordinates, strict=True):
        box[tuple(coordinates)] = device
    at = layout.coordinates(len(system.sizes))
    array = box[tuple(np.moveaxis(at, -1, 0))]
    types = (AxisType.Explicit,) * len(shape) if axis_types is None else axis_types
    return Mesh(array, names, axis_types=types)


def _plain(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    axis_types: tuple[AxisType, ...] | None,
    devices: list[Any],
) -> Mesh | Exception:
    """Returns jax's mesh, or why it makes none."""
    try:
        return jax.make_mesh(shape, names, axis_types, devices=devices)
    except (ValueError, NotImplementedError, AssertionError) as error:
        return error


def check_traffic(
    call: str, names: tuple[str, ...], traffic: Mapping[str, int] | Audited | None
) -> tuple[int, ...]:
    """Returns the bytes of each axis; growing ones where nothing is said.

    Raises:
      TypeError: ``traffic`` is no audit, and does not map to integers.
      ValueError: a name is no axis, or a number negative; an audit has other axes.
    """
    if traffic is None:
        return tuple(DEFAULT_BYTES * 4**i for i in range(len(names)))
    if not isinstance(traffic, Mapping):
        traffic = _audited(call, names, traffic)
    for name, num_bytes in traffic.items():
        if name not in names:
            raise ValueError(unknown(f"{call}: traffic", "axis", name, names))
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int | np.integer):
            raise TypeError(f"{call}: traffic[{name!r}]={num_bytes!r} must be an integer, in bytes")
        if num_bytes < 0:
            raise ValueError(f"{call}: traffic[{name!r}]={num_bytes} must be at least 0 bytes")
    return tuple(int(traffic.get(name, 0)) for name in names)


def _audited(call: str, names: tuple[str, ...], audit: Audited) -> dict[str, int]:
    """Returns the payload of the all-reduce over each axis that sends as much as was audited."""
    sent, sizes = getattr(audit, "wire_bytes", None), getattr(audit, "axis_sizes", None)
    if not isinstance(sent, Mapping) or not isinstance(sizes, Mapping):
        raise TypeError(
            f"{call}: traffic={audit!r} must map axes to bytes, for example"
            f" {{{names[-1] if names else 'data'!r}: {DEFAULT_BYTES}}}, or be what xcoll.audit"
            " returns"
        )
    if set(sizes) != set(names):
        raise ValueError(
            f"{call}: traffic is the audit of a program over the axes {tuple(sizes)}, the mesh has"
            f" {names}; audit the program on a mesh with these axes"
        )
    # Of n devices, each sends 2 (n - 1) / n of what it all-reduces.
    return {name: -(-sent[name] * n // (2 * n - 2)) if n > 1 else 0 for name, n in sizes.items()}
