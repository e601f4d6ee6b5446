"""Collectives over a slow link that xcoll has a faster plan for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xcoll.candidates import GAIN_PERCENT
from xcoll.hlo.advising.requests import request_of
from xcoll.hlo.advising.words import places
from xcoll.hlo.rows import Advice, Row
from xcoll.hlo.text import Module
from xcoll.plan import Plan
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.topology import Level, Topology
from xcoll.units import readable_time

_EXACT, _LOSSY = Policy(), Policy(codec="int8")
_WITHIN = ("core", "nvlink")
"""Switched links that do not leave the machine."""
_PS = 1e-12


@dataclass(frozen=True)
class _Group:
    """What rows that one advice is about have in common."""

    kind: str
    link: str
    collective: str
    axes: tuple[str, ...]
    dtype: str
    by_partitioner: bool


@dataclass(frozen=True)
class _Better:
    """A row, and the plan that is faster than what the compiler has for it."""

    row: Row
    plan: Plan

    @property
    def times_ps(self) -> tuple[int, int]:
        """Time before and after, in one execution of the program."""
        before, after = self.plan.native_time_ps, self.plan.predicted_time_ps
        return (before or 0) * self.row.runs, (after or 0) * self.row.runs


def better_plans(
    module: Module, rows: Sequence[Row], topology: Topology, axis_sizes: Mapping[str, int]
) -> Iterator[Advice]:
    """Yields one advice for each kind, axes, dtype and maker of collectives over a slow link.

    A plan that changes no bit comes first; a codec is proposed where there is none.
    """
    if not topology.is_known:
        return
    groups: dict[_Group, list[_Better]] = {}
    for row in rows:
        link = _slow_link(row, topology)
        request = request_of(module, [row], topology, axis_sizes)
        if link is None or request is None or row.kind == "recv":  # the other end of a send
            continue
        for policy, kind in ((_EXACT, "hierarchy"), (_LOSSY, "codec")):
            made = plan(request, topology, policy)
            before, after = made.native_time_ps or 0, made.predicted_time_ps or 0
            is_faster = after * 100 <= before * (100 - GAIN_PERCENT) and not made.is_native
            if is_faster and (row.exposed_s is None or row.exposed_s > 0):
                key = _Group(
                    kind=kind,
                    link=link,
                    collective=row.transfer or row.kind,
                    axes=request.axes,
                    dtype=request.dtype,
                    by_partitioner=row.made_by == "partitioner",
                )
                groups.setdefault(key, []).append(_Better(row, made))
                break
    for group, found in groups.items():
        yield _advice(group, found)


def _slow_link(row: Row, topology: Topology) -> str | None:
    """Returns the kind of the link between machines that a row crosses, if it does."""
    levels = {axis.name: axis.levels for axis in topology.axes}
    crossed: list[Level] = [
        level
        for axis in row.axes or ()
        for level in levels[axis]
        if level.size > 1 and level.link.network == "switch" and level.link.kind not in _WITHIN
    ]
    return crossed[0].link.kind if crossed else None


def _advice(group: _Group, found: Sequence[_Better]) -> Advice:
    rows = [better.row for better in found]
    before = sum(better.times_ps[0] for better in found)
    after = sum(better.times_ps[1] for better in found)
    best = max(found, key=lambda better: better.times_ps[0] - better.times_ps[1]).plan
    # What computation hides anyway cannot be saved.
    saved = [
        min((b.times_ps[0] - b.times_ps[1]) * _PS, (b.row.exposed_s or 0.0) * b.row.runs)
        for b in found
    ]
    policy = "" if group.kind == "hierarchy" else ", policy=xcoll.Policy(codec='int8')"
    bits = (
        "No bit of what is moved, and no more than roundoff of what is summed, changes."
        if group.kind == "hierarchy"
        else f"It is lossy: |error| <= {best.max_error:.3g} x sum over ranks of max |block|."
    )
    how = f"xcoll.optimize(step{policy})"
    if group.by_partitioner:
        how = (
            "the partitioner made it, where xcoll.optimize does not reach: write it in a"
            f" jax.shard_map over {group.axes}, or, for gradients, take"
            f" xcoll.gradients.value_and_grad; then {how}"
        )
    times = f"{readable_time(before)} to {readable_time(after)}"
    return Advice(
        kind=group.kind,
        text=(
            f"{len(rows)} x {group.collective} of {group.dtype} over {group.axes} on"
            f" {group.link}{places(rows)}:"
            f" the plan {best.name} takes all of them from {times}, predicted. {bits} How: {how}."
        ),
        rows=tuple(row.name for row in rows),
        saves_s=sum(saved) if all(row.exposed_s is not None for row in rows) else None,
    )
