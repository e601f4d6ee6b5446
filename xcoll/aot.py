"""Compile-only meshes: the real TPU and GPU compilers on a machine that has neither.

The devices of such a mesh cannot hold arrays. They can be lowered and compiled for, so that
what a program will do on the hardware can be read from its compiled text
(`xcoll.hlo`).

Needs the extra ``aot``: ``pip install 'jax-xcoll[aot]'``.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from xcoll import _compat

TPU_KINDS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
"""TPU generations whose topologies can be named."""

GPU_TARGETS = {
    # From XLA's target configurations, which describe a GPU to the compiler in place of one.
    "h100": """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
}
"""GPU kinds that can be compiled for, each with its description as XLA's text proto."""

_FORM = re.compile(r"(?:(?P<count>\d+)\*)?(?P<kind>[A-Za-z]\w*):(?P<layout>\d+(?:x\d+)*)")

# Without these, libtpu asks a cloud metadata server what it runs on, and refuses to be loaded
# by two processes at once. Only the layout that is asked for by name matters to the compiler.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def mesh(topology: str, axis_shapes: Sequence[int], axis_names: Sequence[str]) -> jax.sharding.Mesh:
    """Makes a mesh of compile-only devices.

    On a machine with TPUs of its own, touch them first (``jax.devices()``): libtpu is initialised
    once a process.

    Args:
      topology: a TPU slice ``"v5e:4x4"``, ``"v5p:4x4x4"``, ``"v6e:4x4"``, ``"tpu7x:2x2x1"`` (two
        devices a chip, as on v3 and v4), several slices ``"2*v5e:2x2"``, one GPU host ``"h100:8"``,
        or several ``"4*h100:8"``.
      axis_shapes: size of each mesh axis; together as many as there are devices. Slices
        (hosts) are laid out over the first axes whose sizes divide them.
      axis_names: a name for each.

    Returns:
      A mesh with Auto axes. The devices are those of every other mesh of this topology.

    Raises:
      ValueError: ``topology`` is malformed, of a kind or shape that the compiler does not know, or
        its number of devices is not the product of ``axis_shapes``.
      ImportError: the compiler's package is not installed.

    Example:
      >>> mesh("v5e:4x4", (2, 8), ("data", "model")).devices.shape
      (2, 8)
    """
    call = f"aot.mesh({topology!r}, {tuple(axis_shapes)}, {tuple(axis_names)})"
    if len(axis_shapes) != len(axis_names):
        raise ValueError(f"{call}: {len(axis_shapes)} sizes for {len(axis_names)} axis names")
    granules = devices(topology)
    num_devices = sum(map(len, granules))
    if math.prod(axis_shapes) != num_devices:
        raise ValueError(
            f"{call}: the axes make {math.prod(axis_shapes)} devices, but {topology} has"
            f" {num_devices}"
        )
    outer, remaining = [], len(granules)
    for size in axis_shapes:
        outer.append(math.gcd(remaining, size))
        remaining //= outer[-1]
    inner = [size // n for size, n in zip(axis_shapes, outer, strict=True)]
    array = np.empty(tuple(axis_shapes), object)
    for granule, index in zip(granules, np.ndindex(*outer), strict=True):
        where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, inner, strict=True))
        if granule[0].device_kind == "TPU v4":  # mesh_utils wants one device a chip there
            array[where] = np.array(granule).reshape(inner)
        else:
            array[where] = mesh_utils.create_device_mesh(
                inner, list(granule), allow_split_physical_axes=True
            )
    return jax.sharding.Mesh(array, tuple(axis_names))


@functools.cache
def devices(topology: str) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the compile-only devices of a topology, by slice (TPU) or host (GPU).

    Made once a process: the compiler does not mix devices of two descriptions.

    Args:
      topology: as in `mesh`.

    Raises:
      ValueError: as `mesh`.
      ImportError: as `mesh`.
    """
    call = f"aot.mesh({topology!r})"
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
        _require(call, "jax-cuda13-plugin", "jax_plugins.xla_cuda13")
        _require(call, "jax-cuda13-pjrt", "jax_plugins.xla_cuda13")
        made = _compat.compile_only_gpu_devices(GPU_TARGETS[kind], f"1x{count}x{layout}")
        return _grouped(made, lambda device: device.process_index)
    if kind in TPU_KINDS:
        _require(call, "libtpu", "libtpu")
        options = {"num_slices": count} if count > 1 else {}
        with _environment(_LIBTPU_ENVIRONMENT):
            try:
                description = topologies.get_topology_desc(
                    platform="tpu", topology_name=f"{kind}:{layout}", **options
                )
            except jax.errors.JaxRuntimeError as error:
                raise ValueError(f"{call}: libtpu does not accept it: {error}") from error
        return _grouped(description.devices, lambda device: getattr(device, "slice_index", 0) or 0)
    raise ValueError(
        f"{call}: nothing here compiles for {kind!r}; valid kinds:"
        f" {', '.join((*TPU_KINDS, *GPU_TARGETS))}"
    )


def compile(
    fn: Callable[..., Any],
    *args: jax.ShapeDtypeStruct,
    mesh: jax.sharding.Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
) -> jax.stages.Compiled:
    """Compiles a per-shard function for a mesh, as `jax.shard_map` under `jax.jit` would.

    Args:
      fn: what each device does; sees shards and may call collectives over the mesh's axes.
      *args: global shapes and dtypes of its arguments, one array each.
      mesh: made by `mesh`, or any other.
      in_specs: a partition spec for each argument, or one for all.
      out_specs: as `jax.shard_map`.
      check_vma: as `jax.shard_map`.

    Returns:
      The compiled program, which `xcoll.hlo` reads.
    """
    specs = in_specs if isinstance(in_specs, tuple) and len(args) == len(in_specs) else None
    specs = (in_specs,) * len(args) if specs is None else specs
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for a, spec in zip(args, specs, strict=True)
    ]
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped).lower(*placed).compile()


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


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Sets what is unset of ``defaults``, for the time of the block."""
    missing = {k: v for k, v in defaults.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for k in missing:
            os.environ.pop(k, None)
