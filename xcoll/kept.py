"""What collectives that stay as they are cost and send, as far as it is known."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend import core

from xcoll.meshes import Hardware
from xcoll.plan import Plan, Request
from xcoll.planner import plan as make_plan
from xcoll.policy import Policy
from xcoll.sites import Scope, Spec, is_symbolic, operand_bytes, operand_type
from xcoll.traffic import Sent, sent_by_permutation, sent_by_plan, sent_evenly


def is_known(eqn: core.JaxprEqn) -> bool:
    """Whether an operand has a shape and a dtype of plain bytes, so that it can be counted."""
    operand = operand_type(eqn)
    extended = jnp.issubdtype(operand.dtype, jax.dtypes.extended)
    return not is_symbolic(operand.shape) and not extended


def as_it_is(
    eqn: core.JaxprEqn, spec: Spec, scope: Scope, request: Request | None, hardware: Hardware
) -> tuple[Plan | None, Sent | None]:
    """Returns XLA's own plan for a kept site, and what it sends, as far as they are known.

    Args:
      eqn: the collective.
      spec: what it is.
      scope: where it stands.
      request: it as a request, where all its axes are mesh axes and the operand `is_known`.
      hardware: what the meshes lie on.
    """
    mesh_sizes = scope.mesh_sizes()
    if spec.collective == "permute":
        if is_symbolic(operand_type(eqn).shape) or not set(spec.axes) <= set(scope.sizes()):
            return None, None
        perm = eqn.params.get("perm", ())
        return None, sent_by_permutation(perm, spec.axes, operand_bytes(eqn), mesh_sizes)
    if request is None:
        return None, None
    topology, native = hardware.topology(scope.mesh), Policy.native()
    if spec.collective == "barrier":
        request = dataclasses.replace(
            request, collective="all_reduce", op="sum", dtype="int32", itemsize=4, shapes=((),)
        )
        return None, sent_by_plan(make_plan(request, topology, native), topology, mesh_sizes)
    groups = eqn.params.get("axis_index_groups")
    if groups is not None:
        alike = len(spec.axes) == 1 and len({len(group) for group in groups}) == 1
        request = dataclasses.replace(request, axis_sizes=(len(groups[0]),))
        plan = make_plan(request, None, native) if alike else None
        return None, None if plan is None else sent_evenly(plan, mesh_sizes)
    if spec.kept_reason is not None:
        return None, None
    plan = make_plan(request, topology, native)
    return plan, sent_by_plan(plan, topology, mesh_sizes)
