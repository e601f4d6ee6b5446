"""Jaxpr editing: find the collectives, group them, plan each group, put the plans in.

Works on the program as it is lowered, after differentiation and batching. Types do not
change: the new equation has the old ones' outputs.
"""

from __future__ import annotations

import dataclasses
import heapq
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from xcoll import _compat
from xcoll.errors import XcollWarning
from xcoll.hints import find_hints
from xcoll.meshes import Hardware
from xcoll.plan import Plan, Request
from xcoll.planner import plan as make_plan
from xcoll.policy import Policy
from xcoll.report import Report, Site
from xcoll.sites import OPAQUE, REGION, Scope, Spec, enter, operand_bytes, operand_type, read
from xcoll.stages import Member, stages_p

INNER_REGION = "an inner policy or optimize has planned it already"
EMPTY = "empty operand"
NOT_SELECTED = "not selected by the policy's where"
_UNORDERED_IS_FINE = (INNER_REGION, EMPTY, NOT_SELECTED)


@dataclass
class Rewriter:
    """Rewrites the collectives of one program.

    Attributes:
      policy: what is permitted.
      hardware: what the meshes of the program lie on.
      strict: what the policy's algorithm cannot do is an error, not kept native.
      sites: filled with every collective found.
      warnings: filled with what its author is likely not to want.
    """

    policy: Policy
    hardware: Hardware
    strict: bool = False
    sites: list[Site] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _done: dict[tuple[int, Scope], core.Jaxpr] = field(default_factory=dict)
    _alive: list[core.Jaxpr] = field(default_factory=list)
    _num_groups: int = 0

    def rewrite(self, jaxpr: core.Jaxpr, scope: Scope) -> core.Jaxpr:
        """Returns ``jaxpr`` with its plans put in, the same object where nothing changes."""
        new_eqns, levels = list(jaxpr.eqns), _levels(jaxpr)
        found: dict[int, list[Site]] = {}
        groups: dict[tuple[Any, ...], list[tuple[int, Spec]]] = {}
        packs: list[list[int]] = []
        for index, eqn in enumerate(jaxpr.eqns):
            spec = read(eqn)
            if eqn.primitive.name in OPAQUE:
                continue
            if spec is None:
                new_eqns[index], found[index] = self._descend(eqn, scope)
                continue
            reason = spec.kept_reason or self._kept_by_policy(eqn, spec, scope)
            if reason is not None:
                self._refuse(eqn, spec, reason)
                found[index] = [_site(eqn, spec, scope, reason)]
                continue
            key = (spec, operand_type(eqn).dtype, levels[index])
            groups.setdefault(key, []).append((index, spec))
        for members in groups.values():
            indices = [i for i, _ in members]
            eqns, spec = [jaxpr.eqns[i] for i in indices], members[0][1]
            plan, number = self._plan(eqns, spec, scope)
            for index, eqn in zip(indices, eqns, strict=True):
                kept = plan.reason if plan.is_native else None
                found[index] = [_site(eqn, spec, scope, kept, plan, number)]
            if not plan.is_native:
                new_eqns[indices[-1]] = _packed(eqns, spec, plan)
                packs.append(indices)
        self.sites.extend(site for index in sorted(found) for site in found[index])
        for text in find_hints(jaxpr):
            self._warn(text)
        if all(new is old for new, old in zip(new_eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        return self._once(jaxpr, scope, lambda: jaxpr.replace(eqns=_sorted(new_eqns, packs)))

    def report(self) -> Report:
        """Returns what was found and done so far."""
        return Report(
            sites=tuple(self.sites),
            topology=self.hardware.describe(),
            warnings=tuple(dict.fromkeys(self.warnings)),
        )

    def _descend(self, eqn: core.JaxprEqn, scope: Scope) -> tuple[core.JaxprEqn, list[Site]]:
        """Rewrites the bodies of an equation; returns it with the sites found there."""
        region = eqn.params["region"] if eqn.primitive.name == REGION else None
        if region is not None and (region.policy is not None or region.is_planned):
            return eqn, [
                _site(inner, spec, at, INNER_REGION)
                for _, _, body, within in enter(eqn, scope)
                for inner, spec, at in all_sites(body, within)
            ]
        start = len(self.sites)
        params: dict[str, Any] = {}
        for key, index, body, within in enter(eqn, scope):
            new = self.rewrite(body, within)
            if index is None:
                params[key] = new
            else:
                items = list(params.get(key, eqn.params[key]))
                items[index] = new
                params[key] = type(eqn.params[key])(items)
        found = self.sites[start:]
        del self.sites[start:]
        if region is not None:
            params["region"] = dataclasses.replace(region, is_planned=True)
        if not _differs(params, eqn.params):
            return eqn, found
        return eqn.replace(params={**eqn.params, **params}), found

    def _once(self, jaxpr: core.Jaxpr, scope: Scope, make: Any) -> core.Jaxpr:
        # A function called twice is lowered once as long as its jaxpr is one object.
        key = (id(jaxpr), Scope(scope.axis_sizes, scope.auto_axes, scope.mesh, 1))
        if key not in self._done:
            self._done[key] = make()
            self._alive.append(jaxpr)
        return self._done[key]

    def _kept_by_policy(self, eqn: core.JaxprEqn, spec: Spec, scope: Scope) -> str | None:
        sizes = scope.sizes()
        if not all(axis in sizes for axis in spec.axes):
            return "its axis is no manual mesh axis (a named axis of vmap)"
        if scope.auto_axes:
            return (
                f"the partitioner owns mesh axes {', '.join(scope.auto_axes)} here, and cutting the"
                " operand could make it gather over them"
            )
        if operand_type(eqn).size == 0:
            return EMPTY
        if operand_bytes(eqn) < self.policy.min_bytes:
            return f"smaller than the policy's min_bytes={self.policy.min_bytes}"
        if self.policy.where is not None and not self.policy.where(_site(eqn, spec, scope)):
            return NOT_SELECTED
        return None

    def _refuse(self, eqn: core.JaxprEqn, spec: Spec, reason: str) -> None:
        """Raises where the policy demands an order of summation that a kept site cannot have."""
        is_rounded = spec.op in ("sum", "prod") and jnp.issubdtype(
            operand_type(eqn).dtype, jnp.inexact
        )
        if self.policy.deterministic and is_rounded and reason not in _UNORDERED_IS_FINE:
            raise ValueError(
                f"{spec.name} over {spec.axes}: Policy(deterministic=True) needs an explicit order"
                f" of summation, and no plan can give one here: {reason}"
            )

    def _plan(self, eqns: list[core.JaxprEqn], spec: Spec, scope: Scope) -> tuple[Plan, int]:
        sizes = scope.sizes()
        dtype = operand_type(eqns[0]).dtype
        request = Request(
            collective=spec.collective,
            op=spec.op,
            axes=spec.axes,
            axis_sizes=tuple(sizes[a] for a in spec.axes),
            dtype=str(dtype),
            itemsize=dtype.itemsize,
            shapes=tuple(tuple(operand_type(e).shape) for e in eqns),
            platform=self.hardware.platform,
            root=spec.root,
        )
        self._num_groups += 1
        topology = self.hardware.topology(scope.mesh)
        strict = self.strict or self.policy.by_name
        return make_plan(request, topology, self.policy, strict=strict), self._num_groups - 1

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(text, XcollWarning, stacklevel=2)


def all_sites(jaxpr: core.Jaxpr, scope: Scope) -> Iterable[tuple[core.JaxprEqn, Spec, Scope]]:
    """Yields every collective equation of a program, whatever region it is in."""
    for eqn in jaxpr.eqns:
        spec = read(eqn)
        if spec is not None:
            yield eqn, spec, scope
        else:
            for _, _, body, inner in enter(eqn, scope):
                yield from all_sites(body, inner)


def _site(
    eqn: core.JaxprEqn,
    spec: Spec,
    scope: Scope,
    kept_reason: str | None = None,
    plan: Plan | None = None,
    group: int | None = None,
) -> Site:
    return Site(
        collective=spec.name,
        axes=spec.axes,
        dtype=str(getattr(operand_type(eqn), "dtype", "none")) if eqn.invars else "none",
        num_bytes=operand_bytes(eqn),
        source=_compat.source_line(eqn),
        group=group,
        plan=plan,
        kept_reason=kept_reason,
        count=scope.count,
    )


def _levels(jaxpr: core.Jaxpr) -> list[int]:
    """Returns for each equation how many collectives stand one behind the other before it.

    Collectives of the same level cannot depend on each other, and packing by level cannot
    make a cycle: every dependence between two collectives goes up.
    """
    depth: dict[Any, int] = {}
    levels = []
    for eqn in jaxpr.eqns:
        level = max((depth.get(v, 0) for v in eqn.invars if isinstance(v, core.Var)), default=0)
        levels.append(level)
        after = level + (read(eqn) is not None)
        for v in eqn.outvars:
            depth[v] = after
    return levels


def _packed(eqns: list[core.JaxprEqn], spec: Spec, plan: Plan) -> core.JaxprEqn:
    members = tuple(Member(e.primitive, tuple(sorted(e.params.items()))) for e in eqns)
    return core.new_jaxpr_eqn(
        [e.invars[0] for e in eqns],
        [e.outvars[0] for e in eqns],
        stages_p,
        dict(plan=plan, members=members, root=spec.root),
        set().union(*(e.effects for e in eqns)),
        eqns[0].source_info,
        eqns[0].ctx,
    )


def _sorted(eqns: list[core.JaxprEqn], packs: list[list[int]]) -> list[core.JaxprEqn]:
    """Returns the equations in an order that respects dependences, close to the old one.

    Each pack stands at the index of its last member; the other members are gone. Equations
    with effects beyond named axes keep their order.
    """
    gone = {i for pack in packs for i in pack[:-1]}
    maker = {v: i for i, eqn in enumerate(eqns) if i not in gone for v in eqn.outvars}
    waits: dict[int, set[int]] = {}
    last_effect: int | None = None
    for i, eqn in enumerate(eqns):
        if i in gone:
            continue
        waits[i] = {maker[v] for v in eqn.invars if isinstance(v, core.Var) and v in maker}
        if any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects):
            if last_effect is not None:
                waits[i].add(last_effect)
            last_effect = i
    users: dict[int, list[int]] = {}
    for i, before in waits.items():
        for b in before:
            users.setdefault(b, []).append(i)
    ready = [i for i, before in waits.items() if not before]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(eqns[i])
        for user in users.get(i, ()):
            waits[user].discard(i)
            if not waits[user]:
                heapq.heappush(ready, user)
    assert len(order) == len(waits), "packing made a cycle"
    return order


def _differs(new: dict[str, Any], old: dict[str, Any]) -> bool:
    def parts(value: Any) -> Any:
        return value if isinstance(value, tuple | list) else (value,)

    return any(
        a is not b for k, v in new.items() for a, b in zip(parts(v), parts(old[k]), strict=True)
    )
