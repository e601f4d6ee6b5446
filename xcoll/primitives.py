"""The region primitive: code whose collectives are planned when it is lowered.

A region is a call equation that carries the policy and the topology. Differentiation, batching,
rematerialisation and dead-code elimination go through it as through any call, and what they
leave is edited at lowering: the derivative's collectives are planned as what they are.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

from xcoll import _compat, agreement, marks
from xcoll.lockstep import UNKNOWN, Lockstep
from xcoll.meshes import Hardware
from xcoll.policy import Policy
from xcoll.report import Report
from xcoll.rewrite import Rewriter
from xcoll.sites import REGION, Scope, scope_of_mesh
from xcoll.topology import Topology


@dataclass(frozen=True)
class Region:
    """What a region was marked with.

    Attributes:
      policy: what is permitted.
      topology: what the user said of the hardware; None takes what the region around says.
      strict: the collective (the schedules' name) for which it is an error that the policy's
        algorithm cannot do it.
      lockstep: of the devices where the region stands; a region around it knows.
      sink: receives the report of each lowering; compared by identity.
    """

    policy: Policy
    topology: Topology | str | None = None
    strict: str | None = None
    lockstep: Lockstep = UNKNOWN
    sink: Callable[[Report], None] | None = None


region_p = core.Primitive(REGION)
core.register_call_primitive_rules(region_p, name=REGION)
_compat.register_in_checkify(region_p)


@region_p.def_impl
def _eager(*args: Any, **params: Any) -> Sequence[Any]:
    if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        # jax is looking for the operation that made a NaN, one by one: let it look inside.
        return core.jaxpr_as_fun(params["call_jaxpr"])(*args)
    # Evaluated equation by equation, the collectives would run natively.
    with jax.disable_jit(False):
        return jax.jit(partial(region_p.bind, **params))(*args)


def _lower(ctx: Any, *args: Any, call_jaxpr: core.Jaxpr, region: Region) -> Any:
    edited = _plan(ctx, call_jaxpr, region, args)
    return mlir.core_call_lowering(ctx, *args, name=REGION, call_jaxpr=edited)


def _plan(ctx: Any, jaxpr: core.Jaxpr, region: Region, operands: Sequence[Any]) -> core.Jaxpr:
    mesh, manual, devices = _compat.manual_context(ctx)
    hardware = Hardware(region.topology, _compat.lowering_platform(ctx), devices)
    scope = Scope(source=_compat.lowering_source(ctx), lockstep=region.lockstep)
    if mesh is not None and not mesh.empty:
        scope = scope_of_mesh(mesh, manual, scope)
    rewriter = Rewriter(region.policy, hardware, region.strict)
    cuts = [_compat.lowered_cut(v) for v in operands] if scope.auto_axes else ()
    edited = rewriter.run(jaxpr, scope, cuts)
    report = rewriter.report()
    _agree(report, hardware)
    if region.sink is not None:
        region.sink(report)
    return edited


def _agree(report: Report, hardware: Hardware) -> None:
    """Compares the plans with those of the other processes of the meshes, if there are any."""
    sites = [(s.collective, s.axes, s.dtype, s.num_bytes, s.count) for s in report.sites]
    plans = [(s.group, s.plan.to_json() if s.plan else None, s.kept_reason) for s in report.sites]
    for mesh in hardware.meshes():
        processes = agreement.participants(mesh)
        where = [tuple(mesh.shape.items()), [d.id for d in mesh.devices.flat]]
        if processes:
            agreement.agree(_digest(where, sites), _digest(plans), str(report), processes)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


mlir.register_lowering(region_p, _lower, cacheable=False)


def bind(fn: Callable[..., Any], region: Region, *args: Any) -> Any:
    """Calls ``fn`` on arrays (a pytree each) inside a region.

    Args:
      fn: a function of pytrees of arrays.
      region: its marks.
      *args: the arguments.

    Returns:
      What ``fn`` returns.
    """
    flat, tree = jax.tree.flatten(args)

    def flat_fn(*leaves: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, leaves))

    jaxpr, out_shape = jax.make_jaxpr(flat_fn, return_shape=True)(*flat)
    # Tracers that fn closes over are constants of the jaxpr: they become operands.
    consts, opened = jaxpr.consts, jaxpr.with_consts(())
    if region.policy.is_lossy:
        opened = marks.insert(opened)
    out = region_p.bind(*consts, *flat, call_jaxpr=opened, region=region)
    return jax.tree.unflatten(jax.tree.structure(out_shape), out)


_disabled = jax.make_user_context(False)


def disable() -> contextlib.AbstractContextManager[None]:
    """Switches xcoll off while in the context: programs traced in it are the plain ones.

    The state is part of jit's cache key, so that a function compiled outside is traced anew
    inside, and the other way round.

    Example:
      >>> with disable():
      ...     is_disabled()
      True
      >>> is_disabled()
      False
    """
    return _disabled(True)


def is_disabled() -> bool:
    """Returns whether xcoll is switched off here (see `disable`)."""
    return bool(_disabled.value)
