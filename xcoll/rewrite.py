"""Jaxpr editing: find the collectives, group them, plan each group, put the plans in.

Works on the program as it is lowered, after differentiation and batching. Types do not
change: the new equation has the old ones' outputs.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from xcoll import _compat, marks
from xcoll.cut_rules import Cut
from xcoll.cuts import Cuts
from xcoll.errors import XcollWarning
from xcoll.grouping import cut_groups, distinct, levels_of, pack_equations, sort_equations
from xcoll.hints import find_hints
from xcoll.kept import as_it_is, is_known
from xcoll.meshes import Hardware
from xcoll.permissions import check_axes_exist, check_codec_axes, key_of, policy_of
from xcoll.plan import Plan, Request
from xcoll.planner import plan as make_plan
from xcoll.policy import Policy
from xcoll.report import Report, Site
from xcoll.sites import (
    OPAQUE,
    PERMUTATION,
    REGION,
    Scope,
    Spec,
    enter,
    is_plain,
    is_symbolic,
    operand_bytes,
    operand_type,
    pairs_of,
    read,
)
from xcoll.traffic import Sent, sent_by_plan

INNER_REGION = "an inner policy or optimize has planned it already"
EMPTY = "empty operand"
NOT_SELECTED = "not selected by the policy's where"
TOO_SMALL = "smaller than the policy's min_bytes"


@dataclass
class Rewriter:
    """Rewrites the collectives of one program.

    Attributes:
      policy: what is permitted.
      hardware: what the meshes of the program lie on.
      strict: the collective (the schedules' name) for which it is an error, rather than a reason
        to keep it native, that the policy's algorithm cannot do it.
      sites: filled with every collective found.
      warnings: filled with what its author is likely not to want.
      cuts: what is known of how operands are cut over axes that are the partitioner's.
    """

    policy: Policy
    hardware: Hardware
    strict: str | None = None
    sites: list[Site] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cuts: Cuts = field(default_factory=Cuts)
    _done: dict[tuple[int, Scope], core.Jaxpr] = field(default_factory=dict)
    _alive: list[core.Jaxpr] = field(default_factory=list)
    _num_groups: int = 0
    _mesh_axes: dict[str, int] = field(default_factory=dict)

    def run(self, jaxpr: core.Jaxpr, scope: Scope, inputs: Sequence[Cut | None] = ()) -> core.Jaxpr:
        """Rewrites a whole program, and warns of what its author is likely not to want.

        Args:
          jaxpr: the program.
          scope: where it stands.
          inputs: how its inputs are cut over axes that are the partitioner's, where it is known.
        """
        for text in find_hints(jaxpr, scope):
            self.warnings.append(text)
            warnings.warn(text, XcollWarning, stacklevel=2)
        self.cuts = Cuts(jaxpr, scope, inputs)
        new = self.rewrite(jaxpr, scope)
        if self.strict is None:  # A single call's policy may be one for several meshes.
            check_axes_exist(self.policy, self._mesh_axes)
        return new

    def rewrite(self, jaxpr: core.Jaxpr, scope: Scope) -> core.Jaxpr:
        """Returns ``jaxpr`` with its plans put in, the same object where nothing changes."""
        new_eqns, levels = list(jaxpr.eqns), levels_of(jaxpr)
        found: dict[int, list[Site]] = {}
        marked = marks.found(jaxpr) if self.policy.is_lossy else {}
        groups: dict[tuple[Any, ...], list[int]] = {}
        packs: list[list[int]] = []
        sizes: dict[int, int] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            spec = read(eqn)
            if eqn.primitive.name in OPAQUE:
                continue
            if spec is None:
                new_eqns[index], found[index] = self._descend(eqn, scope)
                continue
            self._mesh_axes.update(scope.mesh_sizes())
            held = sizes[index] = self.cuts.operand_bytes(eqn, scope)
            policy = policy_of(self.policy, eqn, marked, held)
            reason = self._why_kept(eqn, spec, scope, policy, held)
            if reason is not None:
                found[index] = [self._keep(eqn, spec, scope, reason)]
                continue
            key = (spec, operand_type(eqn).dtype, levels[index], policy, pairs_of(eqn))
            groups.setdefault(key, []).append(index)
        for (spec, _, _, policy, _), indices in cut_groups(groups, jaxpr):
            eqns = [jaxpr.eqns[i] for i in indices]
            plan, number, sent = self._plan(eqns, spec, scope, policy)
            for index, eqn in zip(indices, eqns, strict=True):
                kept = plan.reason if plan.is_native else None
                found[index] = [_site(eqn, spec, scope, kept, plan, number, sent, sizes[index])]
            if not plan.is_native:
                new_eqns[indices[-1]] = pack_equations(
                    eqns,
                    plan,
                    tuple(scope.sizes()),
                    self.cuts.group(distinct(eqns)[0], spec, scope),
                    key_of(plan, eqns, marked, spec),
                    [site for index in indices for site in found[index]],
                )
                packs.append(indices)
        self.sites.extend(site for index in sorted(found) for site in found[index])
        if all(new is old for new, old in zip(new_eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        return self._once(jaxpr, scope, lambda: jaxpr.replace(eqns=sort_equations(new_eqns, packs)))

    def report(self) -> Report:
        """Returns what was found and done so far."""
        return Report(
            sites=tuple(self.sites),
            topology=self.hardware.describe(),
            warnings=tuple(self.warnings),
        )

    def _descend(self, eqn: core.JaxprEqn, scope: Scope) -> tuple[core.JaxprEqn, list[Site]]:
        """Rewrites the bodies of an equation; returns it with the sites found there."""
        if eqn.primitive.name == REGION:
            return self._inner_region(eqn, scope)
        start = len(self.sites)
        params: dict[str, Any] = {}
        for key, index, body, within in enter(eqn, scope):
            new = self.rewrite(body, within)
            if index is None:
                params[key] = new
            else:
                items = list(params.get(key, eqn.params[key]))
                items[index] = new
                kind = type(eqn.params[key])
                params[key] = kind(*items) if hasattr(kind, "_fields") else kind(items)
        found = self.sites[start:]
        del self.sites[start:]
        if not _differs(params, eqn.params):
            return eqn, found
        return eqn.replace(params={**eqn.params, **params}), found

    def _inner_region(self, eqn: core.JaxprEqn, scope: Scope) -> tuple[core.JaxprEqn, list[Site]]:
        """Leaves a region to its own policy; returns it with its sites, as it will plan them."""
        region = eqn.params["region"]
        given = self.hardware.given if region.topology is None else region.topology
        told = dataclasses.replace(region, topology=given, in_step=scope.in_step)
        if told != region:
            region, eqn = told, eqn.replace(params={**eqn.params, "region": told})
        hardware = Hardware(region.topology, self.hardware.platform, self.hardware.devices)
        inner = Rewriter(region.policy, hardware, region.strict, cuts=self.cuts)
        for _, _, body, within in enter(eqn, scope):
            inner.rewrite(body, within)
        firsts = {id(group[0]) for group in inner.report().groups()}
        return eqn, [
            dataclasses.replace(
                site,
                group=None,
                kept_reason=INNER_REGION,
                sent=site.sent if site.group is None or id(site) in firsts else {},
            )
            for site in inner.sites
        ]

    def _once(self, jaxpr: core.Jaxpr, scope: Scope, make: Any) -> core.Jaxpr:
        # A function called twice is lowered once as long as its jaxpr is one object.
        key = (id(jaxpr), dataclasses.replace(scope, count=1, source=None))
        if key not in self._done:
            self._done[key] = make()
            self._alive.append(jaxpr)
        return self._done[key]

    def _why_kept(
        self, eqn: core.JaxprEqn, spec: Spec, scope: Scope, policy: Policy, held: int
    ) -> str | None:
        """Returns the reason to leave a site as it is before any planning, or None.

        Args:
          eqn: the collective.
          spec: what it is.
          scope: where it stands.
          policy: what is permitted for it.
          held: bytes that one device holds of its operand.
        """
        operand = operand_type(eqn)
        if not all(axis in scope.sizes() for axis in spec.axes):
            return "its axis is no manual mesh axis (a named axis of vmap)"
        if spec.kept_reason is not None and not (
            spec.kept_reason == PERMUTATION and policy.narrowed(spec.name).is_lossy
        ):
            return spec.kept_reason
        if not is_plain(operand.dtype):
            return f"dtype {operand.dtype} cannot be cut into bytes"
        if is_symbolic(operand.shape):
            return f"shape {operand.shape} is symbolic, and its bytes are not known"
        if operand.size == 0:
            return EMPTY
        if (reason := self.cuts.why_not(eqn, spec, scope)) is not None:
            return reason
        if held < (self.policy.min_bytes or 0):
            return f"{TOO_SMALL}={self.policy.min_bytes}"
        if self.policy.where is not None and not self.policy.where(
            _site(eqn, spec, scope, num_bytes=held)
        ):
            return NOT_SELECTED
        return None

    def _keep(self, eqn: core.JaxprEqn, spec: Spec, scope: Scope, reason: str) -> Site:
        """Returns a kept site, with what XLA's own collective costs where that is known.

        Raises:
          ValueError: the policy demands what a kept site cannot have.
        """
        by_policy = reason in (EMPTY, NOT_SELECTED) or reason.startswith(TOO_SMALL)
        is_rounded = spec.op in ("sum", "prod") and jnp.issubdtype(
            operand_type(eqn).dtype, jnp.inexact
        )
        if self.policy.deterministic and is_rounded and reason != EMPTY:
            raise ValueError(
                f"{spec.name} over {spec.axes}: Policy(deterministic=True) needs an explicit order"
                f" of summation, and no plan can give one here: {reason}"
            )
        forced = self.policy.forced(spec.name)
        if self._is_strict(spec) and forced and forced.name != "native" and not by_policy:
            raise ValueError(
                f"{spec.name} over {spec.axes}: algorithm {forced} was asked for by name, and"
                f" cannot be had here: {reason}"
            )
        request = None
        if all(axis in scope.sizes() for axis in spec.axes) and spec.collective != "permute":
            request = self._request([eqn], spec, scope) if is_known(eqn) else None
        plan, sent = as_it_is(eqn, spec, scope, request, self.hardware)
        return _site(eqn, spec, scope, reason, plan, sent=sent)

    def _is_strict(self, spec: Spec) -> bool:
        return self.policy.by_name or self.strict == spec.collective

    def _request(self, eqns: list[core.JaxprEqn], spec: Spec, scope: Scope) -> Request:
        sizes = scope.sizes()
        dtype = operand_type(eqns[0]).dtype
        return Request(
            collective=spec.collective,
            op=spec.op,
            axes=spec.axes,
            axis_sizes=tuple(sizes[a] for a in spec.axes),
            dtype=str(dtype),
            itemsize=dtype.itemsize,
            shapes=tuple(self.cuts.local_shape(e, scope) for e in eqns),
            platform=self.hardware.platform,
            root=spec.root,
            pairs=pairs_of(eqns[0]),
            in_step=tuple((a, sizes[a]) for a in scope.in_step if a not in spec.axes),
        )

    def _plan(
        self, eqns: list[core.JaxprEqn], spec: Spec, scope: Scope, policy: Policy
    ) -> tuple[Plan, int, Sent | None]:
        self._num_groups += 1
        # The policy speaks of psum and pmax, the planner of all-reduces.
        policy = policy.narrowed(spec.name)
        check_codec_axes(policy, spec, scope)
        topology = self.hardware.topology(scope.mesh)
        request = self._request(distinct(eqns)[0], spec, scope)
        plan = make_plan(request, topology, policy, strict=self._is_strict(spec))
        return plan, self._num_groups - 1, sent_by_plan(plan, topology, scope.mesh_sizes())


def _site(
    eqn: core.JaxprEqn,
    spec: Spec,
    scope: Scope,
    kept_reason: str | None = None,
    plan: Plan | None = None,
    group: int | None = None,
    sent: Sent | None = None,
    num_bytes: int | None = None,
) -> Site:
    return Site(
        collective=spec.name,
        axes=spec.axes,
        dtype=str(getattr(operand_type(eqn), "dtype", "none")) if eqn.invars else "none",
        num_bytes=operand_bytes(eqn) if num_bytes is None else num_bytes,
        source=_compat.source_line(eqn) or scope.source or "unknown",
        group=group,
        plan=plan,
        kept_reason=kept_reason,
        count=scope.count,
        sent=sent,
    )


def _differs(new: dict[str, Any], old: dict[str, Any]) -> bool:
    def parts(value: Any) -> Any:
        return value if isinstance(value, tuple | list) else (value,)

    return any(
        a is not b for k, v in new.items() for a, b in zip(parts(v), parts(old[k]), strict=True)
    )
