"""Meshes on hardware that is named on the command line, and need not be there."""

from __future__ import annotations

import contextlib
import math

import jax
import numpy as np

from xcoll import aot
from xcoll.commands.usage import UsageError
from xcoll.hardware.tables import load
from xcoll.hardware.text import take_apart
from xcoll.topology import Topology

MOST_CPUS = 1024
"""Virtual CPU devices that an audit may ask for."""


def prepare(text: str) -> int:
    """Sets jax up for a topology, before it looks for devices; returns the number of CPU devices.

    The audit needs no accelerator, so none is looked for: the process's own devices are CPUs, as
    many as a CPU topology has. TPUs and GPUs are compiled for by name.

    Raises:
      UsageError: more CPU devices than a process should make.
      ValueError: a malformed topology.
    """
    parsed = take_apart(text)
    is_cpu = load(parsed.kind)["platform"] == "cpu"
    jax.config.update("jax_platforms", "cpu")
    count = parsed.count * math.prod(parsed.sizes) if is_cpu else 0
    if count > MOST_CPUS:
        raise UsageError(
            f"--topology {text}: {count} virtual CPU devices; a process makes {MOST_CPUS} at most,"
            " since each takes threads and memory"
        )
    if is_cpu:
        # Where devices are there already, their number stays; it is checked with the mesh.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    return count


def mesh_on(
    text: str, axes: dict[str, int], num_cpus: int
) -> tuple[jax.sharding.Mesh, Topology | None]:
    """Makes the mesh of a topology, with Auto axes.

    Args:
      text: the topology.
      axes: of the mesh.
      num_cpus: what `prepare` returned.

    Returns:
      The mesh; and the topology, or None where it is to be read off the mesh's devices.

    Raises:
      UsageError: a compiler is not installed, or there are too few CPU devices.
      ValueError: a topology that cannot be compiled for, or whose devices the axes do not make.
    """
    shape = tuple(axes.values())
    if num_cpus:
        topology = Topology.parse(text, axes=axes)
        there = jax.devices("cpu")
        if len(there) < num_cpus:
            raise UsageError(
                f"--topology {text}: needs {num_cpus} CPU devices, and this process was set up with"
                f" {len(there)} before; leave jax_num_cpu_devices to xcoll, or set it to {num_cpus}"
            )
        return jax.sharding.Mesh(np.array(there[:num_cpus]).reshape(shape), tuple(axes)), topology
    # The rate of an uplink prices the program; it changes nothing of how it is compiled.
    layout, _, rates = text.partition("@")
    try:
        mesh = aot.mesh(layout, shape, tuple(axes))
    except (ImportError, RuntimeError) as err:
        raise UsageError(str(err)) from err
    return mesh, Topology.parse(text, axes=axes) if rates else None
