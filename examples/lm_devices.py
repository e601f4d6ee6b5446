"""Which devices the example runs on: virtual ones, those of several processes, and their mesh."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def use_virtual_devices(count: int) -> None:
    """Splits the CPU into devices; before jax looks at what there is."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def initialize_processes(text: str) -> None:
    """Joins the other processes: those of the cluster's manager, or "ADDRESS,COUNT,INDEX"."""
    if not text:
        jax.distributed.initialize()
        return
    address, count, index = text.split(",")
    jax.distributed.initialize(address, int(count), int(index))


def make_mesh(text: str | None) -> Mesh:
    """Makes a mesh of all devices, or of the first ones that ``host=2,device=4`` needs.

    Without a text: one axis over all devices, and one more in front over slices of a TPU
    or, on other platforms, over processes.
    """
    devices = jax.devices()
    # Devices of a slice (process) stay together along the leading axis.
    granule = "slice_index" if devices[0].platform == "tpu" else "process_index"
    devices = sorted(devices, key=lambda d: (getattr(d, granule, 0), d.id))
    num_granules = len({getattr(d, granule, 0) for d in devices})
    if text is not None:
        axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    elif num_granules > 1:
        axes = {"host": num_granules, "device": len(devices) // num_granules}
    else:
        axes = {"device": len(devices)}
    if math.prod(axes.values()) > len(devices):
        raise SystemExit(f"--mesh {text}: only {len(devices)} devices; see --virtual-devices")
    chosen = devices[: math.prod(axes.values())]
    if num_granules == 1:
        auto = (AxisType.Auto,) * len(axes)
        return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=chosen, axis_types=auto)
    return Mesh(np.array(chosen).reshape(tuple(axes.values())), tuple(axes))
