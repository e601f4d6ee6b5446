"""The region primitive: code whose collectives are planned when it is lowered.

A region is a call equation that carries the policy and the topology. Differentiation, batching,
rematerialisation and dead-code elimination go through it as through any call, and what they
leave is edited at lowering: the derivative's collectives are planned as what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

from xcoll import _compat
from xcoll.meshes import Hardware, agree_on_plans
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
      topology: what the user said of the hardware.
      strict: what the policy's algorithm cannot do is an error.
      sink: receives the report of each lowering; compared by identity.
    """

    policy: Policy
    topology: Topology | str | None = None
    strict: bool = False
    sink: Callable[[Report], None] | None = None


region_p = core.Primitive(REGION)
core.register_call_primitive_rules(region_p, name=REGION)


@region_p.def_impl
def _eager(*args: Any, **params: Any) -> Sequence[Any]:
    # Evaluated equation by equation, the collectives would run natively.
    return jax.jit(partial(region_p.bind, **params))(*args)


def _lower(ctx: Any, *args: Any, call_jaxpr: core.Jaxpr, region: Region) -> Any:
    mesh, manual, devices = _compat.manual_context(ctx)
    platform = _compat.lowering_platform(ctx)
    hardware = Hardware(region.topology, platform, devices)
    scope = scope_of_mesh(mesh, manual) if mesh is not None and not mesh.empty else Scope()
    rewriter = Rewriter(region.policy, hardware, region.strict)
    edited = rewriter.rewrite(call_jaxpr, scope)
    report = rewriter.report()
    agree_on_plans(report, devices)
    if region.sink is not None:
        region.sink(report)
    return mlir.core_call_lowering(ctx, *args, name=REGION, call_jaxpr=edited)


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
    out = region_p.bind(*consts, *flat, call_jaxpr=opened, region=region)
    return jax.tree.unflatten(jax.tree.structure(out_shape), out)
