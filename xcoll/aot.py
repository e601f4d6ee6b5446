"""Compile-only meshes: the real TPU and GPU compilers on a machine that has neither.

The devices of such a mesh cannot hold arrays. They can be lowered and compiled for, so that
what a program will do on the hardware can be read from its compiled text (`xcoll.hlo`).

The variables that libtpu reads are set while it is loaded, and then as before; those that the user
has set stay as they are. Several processes compile at once.

Needs the extra ``aot``: ``pip install 'jax-xcoll[aot]'``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from xcoll import _compat
from xcoll.axis_shapes import check_axes, does_not_fit
from xcoll.device_order import make_mesh
from xcoll.hardware.tables import load
from xcoll.memory import Memory, memory_of
from xcoll.topology import Topology

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


def mesh(
    topology: str, axis_shapes: Sequence[int], axis_names: Sequence[str] | str
) -> jax.sharding.Mesh:
    """Makes a mesh of compile-only devices.

    On a machine with TPUs of its own, touch them first (``jax.devices()``): libtpu is initialised
    once a process.

    Args:
      topology: a TPU slice ``"v5e:4x4"``, ``"v5p:4x4x4"``, ``"v6e:4x4"``, ``"tpu7x:2x2x1"`` (two
        devices a chip, as on v3 and v4), several slices ``"2*v5e:2x2"``, one GPU host ``"h100:8"``,
        or several ``"4*h100:8"``; the same with ``"h200"``.
      axis_shapes: size of each mesh axis; together as many as there are devices. Slices
        (hosts) are laid out over the first axes whose sizes divide them. Within them the order is
        that of `jax.make_mesh`, or, where that puts no axis on links of its own, of
        `xcoll.make_mesh`.
      axis_names: a name for each.

    Returns:
      A mesh with Auto axes. The devices are those of every other mesh of this topology.

    Raises:
      TypeError: ``topology`` is no text, or ``axis_shapes`` are no integers.
      ValueError: ``topology`` is malformed, of a kind or shape that the compiler does not know, or
        its number of devices is not the product of ``axis_shapes``: with the nearest that fit.
      ImportError: the compiler's package is not installed.
      RuntimeError: another process has loaded libtpu, and the environment forbids a second.

    Example:
      >>> mesh("v5e:4x4", (2, 8), ("data", "model")).devices.shape
      (2, 8)
    """
    shape, names = check_axes("aot.mesh", axis_shapes, axis_names)
    granules = devices(topology)
    num_devices = sum(map(len, granules))
    if math.prod(shape) != num_devices:
        raise ValueError(
            does_not_fit(f"aot.mesh({topology!r}, {shape}, {names})", shape, num_devices)
        )
    outer, remaining = [], len(granules)
    for size in shape:
        outer.append(math.gcd(remaining, size))
        remaining //= outer[-1]
    inner = [size // n for size, n in zip(shape, outer, strict=True)]
    array = np.empty(shape, object)
    for granule, index in zip(granules, np.ndindex(*outer), strict=True):
        where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, inner, strict=True))
        if granule[0].device_kind == "TPU v4":  # mesh_utils wants one device a chip there
            array[where] = np.array(granule).reshape(inner)
        else:
            array[where] = mesh_utils.create_device_mesh(
                inner, list(granule), allow_split_physical_axes=True
            )
    made = jax.sharding.Mesh(array, names)
    if Topology.from_mesh(made).is_known:
        return made
    # jax orders eight chips of v5e as one ring, and cores of tpu7x apart, so that no axis lies on
    # links of its own, and nothing could be said of its bandwidth.
    return make_mesh(
        shape,
        names,
        made.axis_types,
        devices=[device for granule in granules for device in granule],
        traffic={name: 4**place for place, name in enumerate(names)},
    )


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
        made = _compat.compile_only_gpu_devices(GPU_TARGETS[kind], f"1x{count}x{layout}")
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


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program and the memory it uses. `xcoll.hlo` and `xcoll.audit` read it.

    Attributes:
      compiled: the program.
      memory: what it uses of each device's memory; None where the compiler does not say.
    """

    compiled: jax.stages.Compiled
    memory: Memory | None

    def as_text(self) -> str | None:
        """Returns the program as XLA prints it."""
        return self.compiled.as_text()

    def cost_analysis(self) -> Any | None:
        """Returns XLA's own estimates (`jax.stages.Compiled.cost_analysis`); on GPU, None."""
        return self.compiled.cost_analysis()


def compile(
    fn: Callable[..., Any],
    *args: Any,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    check_vma: bool = True,
    **kwargs: Any,
) -> Program:
    """Compiles a function for the devices of a mesh.

    Arguments say by their shardings which devices the program is for and how they lie there. With
    ``in_specs`` and ``out_specs``, ``fn`` is what each device does, as for `jax.shard_map`.

    Args:
      fn: a function, jitted (with its own options) or not.
      *args: trees of `jax.ShapeDtypeStruct`, or of arrays. Shapes are global.
      mesh: made by `mesh`, or any other; by default that of the arguments' shardings. If given,
        ``fn`` is traced under `jax.set_mesh`.
      in_specs: for ``fn`` per shard, a partition spec (or a pytree prefix of them) for each
        argument, or one for all.
      out_specs: for ``fn`` per shard, as `jax.shard_map`; so ``check_vma``.
      check_vma: whether varying axes are checked.
      **kwargs: as ``args``; not for ``fn`` per shard.

    Returns:
      The compiled program and its memory use per device.

    Raises:
      ValueError: only some of what a function per shard needs; or not a spec for each argument.
      jax.errors.JaxRuntimeError: the compiler refuses, for example what does not fit the memory of
        a TPU. GPU's does not check that: see ``Program.memory``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> sharding = NamedSharding(mesh("v5e:2x2", (4,), ("data",)), P("data"))
      >>> x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=sharding)
      >>> compile(lambda x: (x * x).sum(), x).memory.arguments
      4194304
    """
    if in_specs is None and out_specs is None:
        jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return _program(jitted.lower(*args, **kwargs))
    call = f"aot.compile({getattr(fn, '__name__', fn)})"
    if mesh is None or in_specs is None or out_specs is None or kwargs:
        raise ValueError(
            f"{call}: a function per shard needs each of mesh=, in_specs= and out_specs=, and takes"
            f" no keyword arguments (here {sorted(kwargs)}); for a function of whole arrays leave"
            " in_specs and out_specs out, and give the arguments shardings"
        )
    is_one = not isinstance(in_specs, tuple) or isinstance(in_specs, jax.sharding.PartitionSpec)
    specs = (in_specs,) * len(args) if is_one else in_specs
    if len(specs) != len(args):
        raise ValueError(f"{call}: {len(specs)} in_specs for {len(args)} arguments")

    def placed(spec: Any, part: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    return _program(jax.jit(mapped).lower(*jax.tree.map(placed, specs, args)))


def _program(lowered: jax.stages.Lowered) -> Program:
    compiled = lowered.compile()
    return Program(compiled=compiled, memory=memory_of(compiled))


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
