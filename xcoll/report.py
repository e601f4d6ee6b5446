"""Reports: what was found in a program, and what was done with each of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from xcoll.plan import EXACT, Plan
from xcoll.printing import Name, as_text, plain_table
from xcoll.traffic import Sent, busiest
from xcoll.units import counted, readable_bytes, readable_time


@dataclass(frozen=True, kw_only=True)
class Site:
    """One collective of the program.

    Attributes:
      collective: jax.lax's name (or xcoll's, beyond jax.lax).
      axes: mesh axes it acts over.
      dtype: name of the operand's dtype.
      num_bytes: bytes of the operand, per rank.
      source: ``file:line`` of the user's code.
      group: number of the group it was planned in, or None where it was not planned.
      plan: the group's plan, or None.
      max_error: the plan's bound on the error in any block, as a fraction of the sum over ranks of
        the block's largest magnitude; None where there is no plan.
      predicted_time_s: predicted time of one execution of the whole group; None where unknown.
      native_time_s: the same for XLA's own collective.
      wire_bytes: bytes that the busiest rank sends in one execution of the whole group, by axis.
        For a kept site that was not grouped these are the site's own.
      kept_reason: why the program was left as it is here; None when rewritten.
      count: executions per call of the program; None where it cannot be known.
      sent: the same bytes, rank by rank of the mesh; None where it is too large to count so.
    """

    collective: str
    axes: tuple[str, ...]
    dtype: str
    num_bytes: int
    source: str
    group: int | None = None
    plan: Plan | None = None
    kept_reason: str | None = None
    count: int | None = 1
    sent: Sent | None = field(default=None, repr=False, compare=False)

    @property
    def predicted_time_s(self) -> float | None:
        """Seconds for one execution of the group, as planned."""
        return _seconds(self.plan.predicted_time_ps) if self.plan else None

    @property
    def native_time_s(self) -> float | None:
        """Seconds for one execution of the group, by XLA's own collective."""
        return _seconds(self.plan.native_time_ps) if self.plan else None

    @property
    def max_error(self) -> float | None:
        """Bound on ``|error|`` in a block over the sum over ranks of its largest magnitude."""
        return self.plan.max_error if self.plan else None

    @property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes sent by the busiest rank in one execution of the group, by axis."""
        if self.sent is not None:
            return busiest({axis: list(ranks) for axis, ranks in self.sent.items()})
        return dict(self.plan.wire_bytes) if self.plan else {}

    @property
    def is_rewritten(self) -> bool:
        """Whether the program was changed here."""
        return self.kept_reason is None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every collective of a program, rewritten or kept with the reason.

    Attributes:
      sites: all of them, in program order.
      topology: what was planned for, in words.
      warnings: what its author is likely not to want.
    """

    sites: tuple[Site, ...]
    topology: str = "unknown"
    warnings: tuple[str, ...] = ()

    @property
    def rewritten(self) -> tuple[Site, ...]:
        """The sites that were changed."""
        return tuple(site for site in self.sites if site.is_rewritten)

    @property
    def kept(self) -> tuple[Site, ...]:
        """The sites that were left as they are."""
        return tuple(site for site in self.sites if not site.is_rewritten)

    def groups(self) -> Iterator[tuple[Site, ...]]:
        """Yields the sites of each planned group."""
        numbers = dict.fromkeys(s.group for s in self.sites if s.group is not None)
        for number in numbers:
            yield tuple(s for s in self.sites if s.group == number)

    def wire_bytes(self) -> dict[str, int]:
        """Returns the bytes sent by the busiest rank per call of the program, by axis.

        Rewritten and kept sites alike. Groups in loops of unknown length are counted once. Where
        not every plan can be counted rank by rank on one mesh, the sum over plans of their busiest
        ranks. Sites with an empty ``wire_bytes`` are not in it: what they send is not known.
        """
        ungrouped = [(site,) for site in self.sites if site.group is None]
        firsts = [first for first, *_ in (*self.groups(), *ungrouped)]
        exact: dict[str, list[Fraction]] = {}
        bound: dict[str, int] = {}
        is_exact = all(site.sent is not None for site in firsts)
        for site in firsts:
            times = 1 if site.count is None else site.count
            for axis, num_bytes in site.wire_bytes.items():
                bound[axis] = bound.get(axis, 0) + num_bytes * times
            for axis, ranks in (site.sent or {}).items():
                so_far = exact.get(axis, [Fraction(0)] * len(ranks))
                is_exact &= len(so_far) == len(ranks)  # of one mesh
                exact[axis] = [a + times * b for a, b in zip(so_far, ranks, strict=False)]
        return busiest(exact) if is_exact else bound

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        sites = []
        for site in self.sites:
            row = asdict(replace(site, plan=None, sent=None))
            del row["sent"]
            row |= {
                "plan": site.plan.name if site.plan else None,
                "reason": site.plan.reason if site.plan else site.kept_reason,
                "predicted_time_s": site.predicted_time_s,
                "native_time_s": site.native_time_s,
                "wire_bytes": site.wire_bytes,
                "max_error": site.max_error,
                "kernels": site.plan.kernels if site.plan else "",
            }
            sites.append(row)
        plans = {
            str(g[0].group): json.loads(g[0].plan.to_json()) for g in self.groups() if g[0].plan
        }
        return json.dumps(
            {
                "topology": self.topology,
                "warnings": list(self.warnings),
                "sites": sites,
                "plans": plans,
            },
            indent=1,
        )

    def __rich__(self) -> Any:
        from rich.console import Group

        if not self.sites:
            return _NO_SITES
        table = plain_table(f"xcoll: {self.summary()}", padding=(0, 0))
        for name, justify, width in _COLUMNS:
            table.add_column(
                name, justify=justify, no_wrap=width is None, min_width=width, overflow="fold"
            )
        for row in self._rows():
            table.add_row(*row)
        notes = list(self._lossy_notes())
        notes += [f"kept: {reason}" for reason in dict.fromkeys(s.kept_reason for s in self.kept)]
        notes += [f"warning: {text}" for text in self.warnings]
        return Group(table, "", f"topology: {self.topology}", *notes)

    def _lossy_notes(self) -> Iterator[str]:
        """Yields what groups with a codec may be off by, by what, and why others have none."""
        plans = [(group[0].group, group[0].plan) for group in self.groups()]
        named = [(f"# {number}", plan) for number, plan in plans]
        # Sites of an inner policy are in no group here, and are as lossy as theirs says.
        inner = [site for site in self.sites if site.group is None]
        named += [(os.path.basename(site.source), site.plan) for site in inner]
        lossy = [(name, plan) for name, plan in named if plan is not None and plan.kernels]
        for name, plan in dict.fromkeys(lossy):
            yield f"{name}: |error| <= {plan.max_error:.3g} x sum over ranks of max |block|"
        for text in dict.fromkeys(plan.kernels for _, plan in lossy):
            yield f"codecs by: {text}"
        exact: dict[str, list[str]] = {}
        for group, made in plans:
            if made is not None and not made.is_native and EXACT in made.reason:
                exact.setdefault(made.reason.split(EXACT, 1)[1], []).append(str(group))
        for reason, numbers in exact.items():
            yield f"# {', '.join(numbers)}: exact: {reason}"

    def _rows(self) -> Iterator[tuple[str | Name, ...]]:
        rows: dict[Any, list[Site]] = {}
        for site in self.sites:
            key = (site.group, site.collective, site.axes, site.dtype, site.kept_reason, site.count)
            rows.setdefault(key, []).append(site)
        for sites in rows.values():
            first = sites[0]
            lines = sorted({os.path.basename(s.source) for s in sites})
            yield (
                "-" if first.group is None else str(first.group),
                first.collective + (f" x{len(sites)}" if len(sites) > 1 else ""),
                f"{first.dtype}\n{readable_bytes(sum(s.num_bytes for s in sites))}",
                "\n".join(_sent(first)),
                "?" if first.count is None else str(first.count),
                Name(_plan_name(first)),
                "\n".join(_times(first.plan)),
                lines[0].replace(":", "\n:")
                + (f"\n+{len(lines) - 1} lines" if len(lines) > 1 else ""),
            )

    def summary(self) -> str:
        """Returns one line: how many sites, how many of them rewritten."""
        return (
            f"{counted(len(self.sites), 'collective')},"
            f" {len(self.rewritten)} rewritten, {len(self.kept)} kept"
        )

    def __str__(self) -> str:
        return as_text(self)


_COLUMNS: tuple[tuple[str, Literal["left", "right"], int | None], ...] = (
    ("#", "right", None),
    ("collective", "left", None),
    ("operands", "right", None),
    ("sent over", "left", None),
    ("runs", "right", None),
    ("plan", "left", 12),
    ("time,\nnative", "right", None),
    ("source", "left", 10),
)
"""Heading (# is the group), alignment, and the width down to which a cell folds (None: never)."""

_NO_SITES = (
    "xcoll: no collective in the traced program. Under jit with shardings the partitioner inserts"
    " its collectives later, when it compiles; write the step with jax.shard_map to have them"
    " planned."
)


def _seconds(picoseconds: int | None) -> float | None:
    return None if picoseconds is None else picoseconds * 1e-12


def _sent(site: Site) -> list[str]:
    """Returns a line an axis: its name and, where known, what the busiest rank sends over it."""
    sent = site.wire_bytes
    return [
        f"{a} {readable_bytes(sent[a])}" if a in sent else a
        for a in dict.fromkeys((*site.axes, *sent))
    ]


def _plan_name(site: Site) -> str:
    if site.plan is None or site.plan.is_native:
        return "kept"
    return site.plan.name.replace("(", "\n(", 1)


def _times(plan: Plan | None) -> tuple[str, ...]:
    """Returns the predicted time and, below it, that of XLA's own collective."""
    if plan is None:
        return ("-",)
    times = (plan.predicted_time_ps, plan.native_time_ps)
    return tuple(dict.fromkeys(map(readable_time, times)))
