"""The collectives as compiled programs: jax.lax's own, and xcoll's by policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xcoll
from bench.wire.jobs import AXES
from xcoll.codecs import Codec
from xcoll.plan import Plan

_PER_RANK = PartitionSpec(AXES)

BODIES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "psum": lambda x: lax.psum(x, AXES),
    "psum_scatter": lambda x: lax.psum_scatter(x, AXES, tiled=True),
    "all_gather": lambda x: lax.all_gather(x, AXES, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXES, 0, 0, tiled=True),
}
"""Over all ranks, on ``(elements,)`` of each."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One variant of a collective, compiled.

    Attributes:
      run: runs it; takes the array that `place` made.
      plan: xcoll's plan; None for jax.lax itself.
    """

    run: Callable[[jax.Array], jax.Array]
    plan: Plan | None = None

    @property
    def predicted_s(self) -> float | None:
        """Seconds that the plan is predicted to take."""
        return _seconds(self.plan.predicted_time_ps) if self.plan else None

    @property
    def native_s(self) -> float | None:
        """Seconds that jax.lax's own is predicted to take."""
        return _seconds(self.plan.native_time_ps) if self.plan else None


def codec_of(plan: Plan) -> Codec | None:
    """Returns the codec that a plan sends with between hosts, or None."""
    return next((stage.codec for stage in plan.stages if stage.codec is not None), None)


def mesh_of(hosts: int, devices: int) -> Mesh:
    """Returns the mesh over all hosts' devices."""
    return Mesh(np.array(jax.devices()).reshape(hosts, devices), AXES)


def ranks_here(mesh: Mesh) -> dict[Any, int]:
    """Returns this process's devices and their ranks."""
    here = jax.process_index()
    return {d: r for r, d in enumerate(mesh.devices.flat) if d.process_index == here}


def place(mesh: Mesh, inputs: list[np.ndarray]) -> jax.Array:
    """Returns the ranks' inputs as one array; each process puts its own ranks' there."""
    shape = (sum(x.size for x in inputs),)
    shards = [jax.device_put(inputs[rank], device) for device, rank in ranks_here(mesh).items()]
    sharding = NamedSharding(mesh, _PER_RANK)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def mapped(mesh: Mesh, body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of one rank's array as one of all ranks', with a result of each rank."""
    return jax.shard_map(body, mesh=mesh, in_specs=_PER_RANK, out_specs=_PER_RANK, check_vma=False)


def compiled(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[..., jax.Array]:
    """Compiles a function, so that no call does."""
    program: Callable[..., jax.Array] = jax.jit(fn).lower(x).compile()
    return program


def program(
    variant: str, collective: str, mesh: Mesh, topology: xcoll.Topology, x: jax.Array
) -> Program:
    """Compiles a variant.

    Args:
      variant: ``"lax"``, ``"exact"``, or the name of the codec between hosts.
      collective: a key of `BODIES`.
      mesh: of all hosts.
      topology: what to plan for.
      x: the operand, as `place` made it.
    """
    fn = mapped(mesh, BODIES[collective])
    if variant == "lax":
        return Program(run=compiled(fn, x))
    policy = xcoll.Policy(codec=None if variant == "exact" else {AXES[0]: variant})
    report = xcoll.explain(fn, x, policy=policy, topology=topology)
    optimized = xcoll.optimize(fn, policy=policy, topology=topology)
    return Program(run=compiled(optimized, x), plan=report.sites[0].plan)


def _seconds(time_ps: int | None) -> float | None:
    return None if time_ps is None else time_ps / 1e12
