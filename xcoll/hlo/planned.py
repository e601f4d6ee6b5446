"""`check_plan`: what the plans of a program say, against what was compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from xcoll import _compat, aot
from xcoll.hlo.auditing import audit
from xcoll.hlo.compared import (
    COMBINED,
    EQUAL,
    NOT_EXPLAINED,
    NOTHING,
    OTHER_END,
    UNCERTAIN,
    Compared,
)
from xcoll.hlo.promised import Given, promises
from xcoll.hlo.result import Audit
from xcoll.hlo.verdicts import compared
from xcoll.policy import Policy
from xcoll.printing import as_text, plain_table
from xcoll.report import Report
from xcoll.topology import Topology
from xcoll.transform import Optimized, checked, flattened
from xcoll.units import readable_bytes

UPPER_BOUND = "planned as an upper bound, for so many ranks"

_SENDS_AS_MUCH = (EQUAL, COMBINED, OTHER_END, NOTHING)


@dataclass(frozen=True, kw_only=True)
class AxisBytes:
    """Bytes that the busiest device sends over a mesh axis in one run of the program.

    Attributes:
      planned: as `Report.wire_bytes` says.
      emitted: as `Audit.wire_bytes` says.
      verdict: ``"equal"``, or why they differ.
    """

    planned: int
    emitted: int
    verdict: str


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """Plans against the compiled program, made by `check_plan`.

    Attributes:
      rows: every planned and every emitted operation, in one line each with those like it.
      by_axis: bytes by mesh axis.
      report: what was planned.
      audit: what was emitted.
    """

    rows: tuple[Compared, ...]
    by_axis: dict[str, AxisBytes]
    report: Report
    audit: Audit

    @property
    def is_equal(self) -> bool:
        """Whether the compiled program is as planned, operation by operation and on each axis.

        A send between TPU slices and its recv are one operation; one that sends nothing is none.
        """
        same = (EQUAL, OTHER_END, NOTHING)
        verdicts = [row.verdict for row in self.rows]
        return all(v in same for v in (*verdicts, *(a.verdict for a in self.by_axis.values())))

    @property
    def is_explained(self) -> bool:
        """Whether every difference is one that is known, and was found to be that."""
        verdicts = [row.verdict for row in self.rows] + [a.verdict for a in self.by_axis.values()]
        return not any(NOT_EXPLAINED in verdict for verdict in verdicts)

    def to_json(self) -> str:
        """Returns the comparison as JSON text, without the report and the audit."""
        return json.dumps(
            {
                "is_equal": self.is_equal,
                "is_explained": self.is_explained,
                "rows": [asdict(row) for row in self.rows],
                "by_axis": {axis: asdict(found) for axis, found in self.by_axis.items()},
            },
            indent=1,
        )

    def __rich__(self) -> Any:
        from rich.console import Group

        table = plain_table(f"xcoll: planned against emitted: {self._summary()}")
        for name in ("operation", "over"):
            table.add_column(name, no_wrap=True)
        for name in ("bytes", "planned", "emitted"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for row in sorted(self.rows, key=lambda row: (row.kind, row.axes or (), -row.num_bytes)):
            loop = " a turn" if row.in_unknown_loop else ""
            table.add_row(
                row.kind,
                "?" if row.axes is None else ", ".join(row.axes),
                readable_bytes(row.num_bytes),
                f"{row.planned}{loop}",
                f"{row.emitted}{loop}",
                row.verdict,
            )
        lines = [
            f"over {axis}: planned {readable_bytes(found.planned)}, emitted"
            f" {readable_bytes(found.emitted)}: {found.verdict}"
            for axis, found in self.by_axis.items()
        ]
        return Group(table, "", *lines)

    def _summary(self) -> str:
        if self.is_equal:
            return "equal"
        return "different, and explained" if self.is_explained else "different, NOT all explained"

    def __str__(self) -> str:
        return as_text(self, least_width=100)


def check_plan(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    topology: Topology | str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    **kwargs: Any,
) -> PlanCheck:
    """Compiles ``fn`` and compares what its plans say with what the compiler made of them.

    Operand bytes and executions of every operation, kept collectives included, and the bytes of
    the busiest device over each axis. A difference is explained only where its cause could be
    shown: compilers combine operations, cut them between TPU slices, pad them, add their own.

    Nothing runs.

    Args:
      fn: a function, jitted or not. If `optimize` has wrapped it, its own policy and topology hold.
      *args: its arguments; `jax.ShapeDtypeStruct` with shardings will do.
      policy: what xcoll may do, as for `optimize`.
      topology: what the mesh lies on, as for `optimize`.
      mesh: the mesh that the program is for; None takes that of the arguments' shardings.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      The comparison. Print it; ``.is_equal`` and ``.is_explained`` are for tests.

    Raises:
      TypeError: ``fn`` is no function, or ``policy`` or ``topology`` is of a wrong type.
      ValueError: as `audit`; or xcoll is switched off.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("data")))
      >>> f = jax.shard_map(
      ...     lambda x: jax.lax.psum(x, "data"),
      ...     mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(),
      ... )
      >>> check_plan(f, x, policy=Policy(algorithm="ring")).is_equal
      True
    """
    if not callable(fn):
        raise TypeError(f"check_plan(fn={fn!r}): must be a function, not {type(fn).__name__}")
    policy = checked("check_plan", policy, topology)
    planned = _planned_anew(fn, policy, topology)
    if _compat.is_jitted(fn):
        jitted = jax.jit(planned, **_compat.jit_options(fn))
        lowered = aot.lower(jitted, args, kwargs, mesh)
    else:
        flat, leaves = flattened(planned.__wrapped__, args, kwargs)
        planned = Optimized(flat, planned.policy, planned.topology)
        lowered = aot.lower(jax.jit(planned), leaves, {}, mesh)
    if not planned.reports:
        raise ValueError("check_plan: nothing is planned while xcoll is switched off")
    emitted = audit(lowered, mesh=mesh, topology=planned.topology)
    return against(
        planned.reports[-1], emitted, _platform(planned.reports[-1], args, kwargs), lowered
    )


def against(
    report: Report, audit: Audit, platform: str, lowered: jax.stages.Lowered | None = None
) -> PlanCheck:
    """Returns the comparison of a report with an audit.

    Args:
      report: made when the program was lowered.
      audit: of the compiled program.
      platform: what it was compiled for: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
      lowered: what the compiler was given; without it, fewer differences can be explained.
    """
    planned = promises(report, audit.axis_sizes, platform)
    rows = compared(planned, audit.rows, platform, Given(lowered, audit.axis_sizes))
    sent = report.wire_bytes()
    by_axis = {
        axis: _axis(axis, sent.get(axis, 0), audit.wire_bytes.get(axis, 0), rows, report)
        for axis in audit.axis_sizes
    }
    return PlanCheck(rows=rows, by_axis=by_axis, report=report, audit=audit)


def _axis(
    axis: str, planned: int, emitted: int, rows: tuple[Compared, ...], report: Report
) -> AxisBytes:
    if planned == emitted:
        return AxisBytes(planned=planned, emitted=emitted, verdict=EQUAL)
    reasons = dict.fromkeys(
        row.verdict
        for row in rows
        if row.verdict not in _SENDS_AS_MUCH and (row.axes is None or axis in row.axes)
    )
    uncounted = [s for s in report.sites if s.sent is None and axis in s.axes]
    if not reasons and emitted < planned and any(site.plan for site in uncounted):
        reasons = {UPPER_BOUND: None}
    elif not reasons and emitted > planned and any(site.plan is None for site in uncounted):
        reasons = {UNCERTAIN: None}
    verdict = "; ".join(reasons) or NOT_EXPLAINED
    return AxisBytes(planned=planned, emitted=emitted, verdict=verdict)


def _planned_anew(fn: Any, policy: Policy, topology: Topology | str | None) -> Optimized:
    """Returns ``fn`` optimised, with no report and nothing lowered yet."""
    inner = fn.__wrapped__ if _compat.is_jitted(fn) else fn
    if isinstance(inner, Optimized):
        return Optimized(inner.__wrapped__, inner.policy, inner.topology)
    return Optimized(inner, policy, topology)


def _platform(report: Report, args: Any, kwargs: Any) -> str:
    """Returns what a program was lowered for."""
    for site in report.sites:
        if site.plan is not None:
            return site.plan.request.platform
    for leaf in jax.tree.leaves((args, kwargs)):
        if (sharding := getattr(leaf, "sharding", None)) is not None:
            platform = next(iter(sharding.device_set)).platform
            return "gpu" if platform in ("cuda", "rocm") else platform
    return jax.default_backend()
