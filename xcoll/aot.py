"""Compile-only meshes: the real TPU and GPU compilers on a machine that has neither.

The devices of such a mesh cannot hold arrays. They can be lowered and compiled for, so that
what a program will do on the hardware can be read from its compiled text (`xcoll.hlo`).

The variables that libtpu reads are set while it is loaded, and then as before; those that the user
has set stay as they are. Several processes compile at once.

Needs the extra ``aot``: ``pip install 'jax-xcoll[aot]'``.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from xcoll.axis_shapes import check_axes, does_not_fit
from xcoll.device_order import make_mesh
from xcoll.memory import Memory, memory_of
from xcoll.targets import devices as devices
from xcoll.topology import Topology


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
      RuntimeError: another process has loaded libtpu, and the environment forbids a second; or the
        CUDA plug-in did not start, for want of a driver and of ``JAX_PLATFORMS=cpu``.

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
        return _program(lower(fn, args, kwargs, mesh))
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


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: jax.sharding.Mesh | None = None,
) -> jax.stages.Lowered:
    """Lowers a function for arguments, with its own options where it is jitted.

    Args:
      fn: a function, jitted or not, or a method.
      args: its arguments.
      kwargs: its keyword arguments.
      mesh: a mesh to trace it under (`jax.set_mesh`), or None.
    """
    # A jitted method hands on the attributes of its function, which knows no object.
    bound = (fn.__self__,) if inspect.ismethod(fn) and hasattr(fn, "lower") else ()
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        lowered: jax.stages.Lowered = jitted.lower(*bound, *args, **kwargs)
    return lowered


def _program(lowered: jax.stages.Lowered) -> Program:
    compiled = lowered.compile()
    return Program(compiled=compiled, memory=memory_of(compiled))
