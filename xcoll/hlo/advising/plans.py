"""Collectives over a slow link that xcoll has a faster plan for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xcoll.candidates import GAIN_PERCENT
from xcoll.hlo.advising.requests import request_of
from xcoll.hlo.advising.words import named, places
from xcoll.hlo.rows import Advice, Row
from xcoll.hlo.text import Module
from xcoll.plan import Plan, Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.topology import Link, Topology
from xcoll.units import readable_time

_CODEC = "int8"
_WITHIN = ("core", "nvlink")
"""Switched links that do not leave the machine."""
_PS = 1e-12


@dataclass(frozen=True)
class _Group:
    """What rows that one advice is about have in common."""

    link: str
    collective: str
    axes: tuple[str, ...]
    dtype: str
    policy: Policy
    by_partitioner: bool


@dataclass(frozen=True)
class _Better:
    """A row, and the plan that is faster than what the compiler has for it."""

    row: Row
    plan: Plan

    @property
    def before_ps(self) -> int:
        """Predicted time of the compiler's own in one execution of the program."""
        return (self.plan.native_time_ps or 0) * self.row.runs

    @property
    def after_ps(self) -> int:
        """Predicted time of the plan."""
        return (self.plan.predicted_time_ps or 0) * self.row.runs

    @property
    def saved_ps(self) -> int:
        """What the device waits less: computation may hide a part of either."""
        exposed_ps = round((self.row.exposed_s or 0.0) / _PS) * self.row.runs
        return min(self.before_ps - self.after_ps, exposed_ps)


def better_plans(
    module: Module, rows: Sequence[Row], topology: Topology, axis_sizes: Mapping[str, int]
) -> Iterator[Advice]:
    """Yields one advice for each kind, axes, dtype and maker of collectives over a slow link.

    A plan that is exact comes first; a codec, over the slow axes alone, is proposed where there is
    none.
    """
    if not topology.is_known:
        return
    groups: dict[_Group, list[_Better]] = {}
    made: dict[Request, list[tuple[Policy, Plan]]] = {}
    for row in rows:
        slow = _slow_axes(row, topology)
        if row.kind == "recv" or not slow:  # a recv is the other end of a send
            continue
        request = request_of(module, [row], topology, axis_sizes)
        if request is None:
            continue
        if request not in made:
            lossy = Policy(codec=dict.fromkeys(slow, _CODEC))
            made[request] = [(p, plan(request, topology, p)) for p in (Policy(), lossy)]
        for policy, candidate in made[request]:
            better = _Better(row, candidate)
            is_worth_it = better.saved_ps * 100 >= GAIN_PERCENT * better.before_ps > 0
            if is_worth_it and not candidate.is_native:
                group = _Group(
                    link=", ".join(dict.fromkeys(slow.values())),
                    collective=row.transfer or row.kind,
                    axes=request.axes,
                    dtype=request.dtype,
                    policy=policy,
                    by_partitioner=row.made_by == "partitioner",
                )
                groups.setdefault(group, []).append(better)
                break
    for group, found in groups.items():
        yield _advice(group, found)


def _slow_axes(row: Row, topology: Topology) -> dict[str, str]:
    """Returns the axes of a row that lie on links between machines, with the kind of link."""
    return {
        axis.name: level.link.kind
        for axis in topology.axes
        for level in axis.levels
        if axis.name in (row.axes or ()) and level.size > 1 and _leaves_machine(level.link)
    }


def _leaves_machine(link: Link) -> bool:
    return link.network == "switch" and link.kind not in _WITHIN


def _advice(group: _Group, found: Sequence[_Better]) -> Advice:
    rows = [better.row for better in found]
    saved = sum(better.saved_ps for better in found)
    before = readable_time(sum(better.before_ps for better in found))
    after = readable_time(sum(better.after_ps for better in found))
    best = max(found, key=lambda better: better.saved_ps).plan
    codec = group.policy.codec is not None
    sums = group.collective in ("all-reduce", "reduce-scatter")
    how = "xcoll.optimize(step)"
    terms = "It is exact, but for the order of a sum." if sums else "It is exact."
    if codec:
        axes = ", ".join(f"{axis!r}: {_CODEC!r}" for _, axis, _ in group.policy.permits)
        how = f"xcoll.optimize(step, policy=xcoll.Policy(codec={{{axes}}}))"
        terms = f"It is lossy: |error| <= {best.max_error:.3g} x sum over ranks of max |block|."
    if group.by_partitioner:
        gradients = ", or, for gradients, take xcoll.gradients.value_and_grad" if sums else ""
        how = (
            "the partitioner made it, where xcoll.optimize does not reach: write it in a"
            f" jax.shard_map over {named(group.axes)}{gradients}; then {how}"
        )
    return Advice(
        kind="codec" if codec else "hierarchy",
        text=(
            f"{len(rows)} x {group.collective} of {group.dtype} over {named(group.axes)}, crossing"
            f" {group.link}{places(rows)}: predicted {before}, and {after} by the plan"
            f" {best.name}. {terms} How: {how}."
        ),
        rows=tuple(row.name for row in rows),
        saves_s=saved * _PS,
    )
