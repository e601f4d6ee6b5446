"""What a policy permits at a site: codecs for the program's own collectives, keys, axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from xcoll.errors import UnknownAxisError, unknown
from xcoll.marks import Mark
from xcoll.plan import Plan
from xcoll.policy import Policy
from xcoll.sites import Scope, Spec


def policy_of(
    policy: Policy, eqn: core.JaxprEqn, marked: Mapping[Any, Mark], num_bytes: int
) -> Policy:
    """Returns what is permitted for a site: exact where differentiation added it, or small.

    Args:
      policy: of the region.
      eqn: the collective.
      marked: the marked variables of its body (`xcoll.marks.found`).
      num_bytes: of its operand, on one device.
    """
    if not policy.is_lossy:
        return policy
    is_own = bool(eqn.invars) and eqn.invars[0] in marked
    permitted = policy if is_own else policy.derived()
    is_small = permitted.is_lossy and num_bytes < permitted.lossy_min_bytes()
    return permitted.exact() if is_small else permitted


def key_of(
    plan: Plan, eqns: Sequence[core.JaxprEqn], marked: Mapping[Any, Mark], spec: Spec
) -> Any:
    """Returns the variable of the PRNG key with which a plan rounds, or None if it needs none.

    Raises:
      ValueError: there is no key.
    """
    codecs = [stage.codec for stage in plan.stages if stage.codec and stage.codec.needs_key]
    if not codecs:
        return None
    mark = marked.get(eqns[0].invars[0])
    if mark is None or mark.key is None:
        raise ValueError(
            f"{spec.name} over {spec.axes}: {codecs[0]} needs a PRNG key, and there is none here;"
            f" pass it to the collective, xcoll.{spec.name}(..., policy=..., key=key), or use"
            " rounding='nearest'"
        )
    return mark.key


def check_codec_axes(policy: Policy, spec: Spec, scope: Scope) -> None:
    """Raises UnknownAxisError where a codec of a site is for an axis that its mesh lacks."""
    mesh = scope.mesh_sizes()
    for _, axis, _ in policy.permits:
        if axis and axis not in mesh:
            call = f"{spec.name} over {spec.axes}, Policy(codec={{{axis!r}: ...}})"
            raise UnknownAxisError(unknown(call, "mesh axis", axis, mesh))


def check_axes_exist(policy: Policy, mesh_axes: Mapping[str, int]) -> None:
    """Raises UnknownAxisError where a codec is for an axis that no mesh of a program has.

    Args:
      policy: what the program was marked with.
      mesh_axes: the axes of all meshes around its collectives; none where it has none.
    """
    for name in ("codec", "backward_codec"):
        for _, axis, _ in getattr(policy, name) or ():
            if axis and mesh_axes and axis not in mesh_axes:
                call = f"Policy({name}={{{axis!r}: ...}})"
                raise UnknownAxisError(unknown(call, "mesh axis", axis, mesh_axes))
