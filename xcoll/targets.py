"""Hardware that can be compiled for without being there: its devices, by the text that names it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from xcoll import _compat
from xcoll.hardware.tables import load

TPU_KINDS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
"""TPU generations whose topologies can be named."""

# From XLA's target configurations, which describe a GPU to the compiler in place of one.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  l2_cache_size: 52428800
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 }}
  memory_bandwidth: {memory_bandwidth}
  device_memory_size: {memory_size}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""

GPU_TARGETS = {
    "h100": _HOPPER.format(
        memory_bandwidth=3352320000000, memory_size=84929347584, name="NVIDIA H100 80GB HBM3"
    ),
    "h200": _HOPPER.format(
        memory_bandwidth=4800000000000, memory_size=151397597184, name="NVIDIA H200 141GB HBM3e"
    ),
}
"""GPU kinds that can be compiled for, each with its description as XLA's text proto."""

_FORM = re.compile(r"(?:(?P<count>\d+)\*)?(?P<kind>[A-Za-z]\w*):(?P<layout>\d+(?:x\d+)*)")

_ALLOW_TWO = "ALLOW_MULTIPLE_LIBTPU_LOAD"
# Without these, libtpu asks a cloud metadata server what it runs on, and refuses to be loaded
# by two processes at once. Only the layout that is asked for by name matters to the compiler.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    _ALLOW_TWO: "1",
}


@functools.cache
def devices(topology: str) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the compile-only devices of a topology, by slice (TPU) or host (GPU).

    Made once a process: the compiler does not mix devices of two descriptions.

    Args:
      topology: as in `mesh`.

    Raises:
      TypeError, ValueError, ImportError, RuntimeError: as `mesh`.
    """
    call = f"aot.mesh({topology!r})"
    if not isinstance(topology, str):
        raise TypeError(f"{call}: must be text, for example 'v5e:4x4'")
    form = _FORM.fullmatch(topology)
    if form is None:
        raise ValueError(
            f"{call}: malformed topology; write [slices*]kind:layout, for example 'v5e:4x4',"
            f" '2*v5e:2x2', 'h100:8' or '4*h100:8'"
        )
    count, kind, layout = int(form["count"] or 1), form["kind"].lower(), form["layout"]
    if 0 in (count, *map(int, layout.split("x"))):
        raise ValueError(f"{call}: malformed topology; sizes are at least 1")
    if kind in GPU_TARGETS:
        if "x" in layout:
            raise ValueError(f"{call}: a GPU host has a number of devices, for example '{kind}:8'")
        if int(layout) > (most := load(kind)["largest"]["value"]):
            raise ValueError(
                f"{call}: a host has at most {most}; write several as 'COUNT*{kind}:{most}'"
            )
        _require(call, "jax-cuda13-plugin", "jax_plugins.xla_cuda13")
        _require(call, "jax-cuda13-pjrt", "jax_plugins.xla_cuda13")
        try:
            made = _compat.compile_only_gpu_devices(GPU_TARGETS[kind], f"1x{count}x{layout}")
        except NotImplementedError as error:
            raise RuntimeError(
                f"{call}: the CUDA plug-in did not start; where JAX_PLATFORMS is not set it wants"
                " a driver and cuDNN: set JAX_PLATFORMS=cpu before jax is imported"
            ) from error
        return _grouped(made, lambda device: device.process_index)
    if kind in TPU_KINDS:
        _require(call, "libtpu", "libtpu")
        if layout.count("x") >= (rank := load(kind)["dimensions"]["value"]):
            # libtpu makes devices of it, though there are no such chips.
            raise ValueError(f"{call}: a slice of {kind} has {rank} dimensions")
        options = {"num_slices": count} if count > 1 else {}
        with _environment(_LIBTPU_ENVIRONMENT):
            try:
                description = topologies.get_topology_desc(
                    platform="tpu", topology_name=f"{kind}:{layout}", **options
                )
            except jax.errors.JaxRuntimeError as error:
                if "lockfile" in str(error):
                    raise RuntimeError(
                        f"{call}: another process has loaded libtpu, and"
                        f" {_ALLOW_TWO}={os.environ[_ALLOW_TWO]!r} forbids a second;"
                        " leave the variable unset, or set it to 1 before libtpu is loaded"
                    ) from error
                raise ValueError(f"{call}: libtpu does not accept it: {error}") from error
        return _grouped(description.devices, lambda device: getattr(device, "slice_index", 0) or 0)
    raise ValueError(
        f"{call}: nothing here compiles for {kind!r}; valid kinds:"
        f" {', '.join((*TPU_KINDS, *GPU_TARGETS))}"
    )


def _require(call: str, package: str, module: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ImportError(
            f"{call}: the package {package} is not installed; pip install 'jax-xcoll[aot]'"
        )


def _grouped(made: Sequence[Any], key: Callable[[Any], int]) -> tuple[tuple[Any, ...], ...]:
    groups: dict[int, list[Any]] = {}
    for device in made:
        groups.setdefault(key(device), []).append(device)
    return tuple(tuple(groups[k]) for k in sorted(groups))


@contextlib.contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Sets what is unset of ``defaults``, for the time of the block."""
    missing = {k: v for k, v in defaults.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for k in missing:
            os.environ.pop(k, None)
