"""Which devices the example runs on: virtual ones, those of several processes, and their mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import xcoll


def parse_mesh(text: str) -> dict[str, int]:
    """Reads mesh axes from text such as ``host=2,device=4``.

    Raises:
      ValueError: the text has another form, a size below one, or an axis twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"{part!r} in {text!r} is not AXIS=SIZE with a size of at least 1; write for"
                " example host=2,device=4"
            )
        if name in axes:
            raise ValueError(f"axis {name!r} is given twice in {text!r}")
        axes[name] = int(size)
    return axes


def parse_process(text: str) -> tuple[str, int, int]:
    """Reads ``ADDRESS,COUNT,INDEX``: where the first process is, how many, and which one this is.

    Raises:
      ValueError: the text has another form, or there is no such process.
    """
    address, *numbers = text.split(",")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and len(numbers) == 2 and all(map(str.isdecimal, numbers))):
        raise ValueError(
            f"{text!r} is not ADDRESS,COUNT,INDEX; write for example 10.0.0.1:1234,2,0"
        )
    count, index = map(int, numbers)
    if index >= count:
        raise ValueError(f"{text!r}: {count} processes have the indices 0 to {count - 1}")
    return address, count, index


def use_virtual_devices(count: int) -> None:
    """Splits the CPU into devices; before jax looks at what there is."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def initialize_processes(process: tuple[str, int, int] | tuple[()]) -> xcoll.Hosts:
    """Joins the other processes: those of the cluster's manager, or as `parse_process` says.

    Raises:
      StartError: they don't come together.
      ValueError: there is no manager that says which process this is.
    """
    try:
        return xcoll.initialize(*process)
    except ValueError as err:
        raise ValueError(
            f"no TPU pod and no cluster manager found ({err}); say which process this is:"
            " --distributed ADDRESS,COUNT,INDEX"
        ) from err


def make_mesh(axes: Mapping[str, int] | None) -> Mesh:
    """Makes a mesh of all devices, or of the first ones that axes such as host=2, device=4 need.

    Without axes: one over all devices, and one more in front over slices of a TPU
    or, on other platforms, over processes.

    Raises:
      ValueError: there are too few devices, or some process would have none in the mesh.
    """
    devices = jax.devices()
    # Devices of a slice (process) stay together along the leading axis.
    granule = "slice_index" if devices[0].platform == "tpu" else "process_index"
    devices = sorted(devices, key=lambda d: (getattr(d, granule, 0), d.id))
    num_granules = len({getattr(d, granule, 0) for d in devices})
    if axes is None and num_granules > 1:
        axes = {"host": num_granules, "device": len(devices) // num_granules}
    axes = axes or {"device": len(devices)}
    shown = ",".join(f"{name}={size}" for name, size in axes.items())
    num_devices = math.prod(axes.values())
    if num_devices > len(devices):
        raise ValueError(
            f"--mesh {shown}: needs {num_devices} devices, and there are {len(devices)}; see"
            " --virtual-devices"
        )
    if num_devices < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"--mesh {shown}: takes {num_devices} of {len(devices)} devices; with several"
            " processes it must take all"
        )
    chosen = devices[:num_devices]
    if num_granules == 1:
        auto = (AxisType.Auto,) * len(axes)
        return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=chosen, axis_types=auto)
    return Mesh(np.array(chosen).reshape(tuple(axes.values())), tuple(axes))
