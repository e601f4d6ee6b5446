"""An audit as people read it: a table of collectives, totals, advice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, Literal

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from xcoll.hlo.findings import Findings
from xcoll.hlo.rows import Row
from xcoll.printing import plain_table
from xcoll.units import counted, readable_bytes, readable_seconds

_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("collective", "left"),
    ("operand", "right"),
    ("sent over", "left"),
    ("runs", "right"),
    ("time,\nbound", "right"),
    ("exposed", "right"),
    ("made by,\nfor", "left"),
)

_WIDEST = 24  # an argument's name
_ARGUMENT = re.compile(r"[A-Za-z_]\w*(?:[.\[].*)?")

_NARROW = 100
"""Columns of a terminal under which who made a collective stands below its name."""


def show(audit: Findings, width: int) -> Any:
    """Returns what rich prints for an audit: rows alike are one, the costliest first.

    Args:
      audit: what was found.
      width: columns of the terminal.
    """
    table = plain_table(padding=(0, 1, 0, 0))
    is_narrow = width < _NARROW
    for name, justify in _COLUMNS[:-1] if is_narrow else _COLUMNS:
        # Names of axes, arguments and files may be long: their columns give way to the others.
        is_named = name in ("sent over", "made by,\nfor")
        table.add_column(name, justify=justify, no_wrap=not is_named, overflow="fold")
    for rows in _alike(audit):
        name, *cells, maker = _cells(rows)
        if is_narrow:
            table.add_row("\n  ".join([name, *maker.splitlines()]), *cells)
        else:
            table.add_row(name, *cells, maker)
    # The summary is no title of the table: that would break it at the table's width.
    parts: list[Any] = [Text(f"xcoll: {_summary(audit)}")]
    parts += ["", table, ""] if audit.rows else [""]
    parts += [_indented(line) for text in _totals(audit) for line in text.splitlines()]
    if audit.advice:
        parts.append("")
    for advice in audit.advice:
        saves = f" (saves {readable_seconds(advice.saves_s)} a run)" if advice.saves_s else ""
        parts.append(Text(f"{advice.kind}{saves}:", style="bold"))
        parts.append(Padding(Text(advice.text), (0, 0, 0, 2)))
    return Group(*parts)


def _summary(audit: Findings) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in audit.axis_sizes.items())
    number = len(audit.rows)
    found = counted(number, "collective") if number else "no collective"
    return f"{found} in the compiled program, mesh ({mesh}) on {audit.topology.splitlines()[0]}"


def _alike(audit: Findings) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in audit.rows:
        what = (row.kind, row.transfer, row.axes, row.dtypes, row.num_bytes, row.executions)
        how = (row.conditional, row.is_async, row.exposed_s, row.unread)
        groups.setdefault((what, how, row.made_by, row.source), []).append(row)
    return sorted(groups.values(), key=_cost, reverse=True)


def _cost(rows: list[Row]) -> tuple[float, float]:
    exposed = sum((row.exposed_s or 0.0) * row.runs for row in rows)
    sent = sum(max(row.wire_bytes.values(), default=row.num_bytes) * row.runs for row in rows)
    return exposed, sent


def _cells(rows: list[Row]) -> Iterator[str]:
    first, number = rows[0], len(rows)
    name = f"{first.kind} ({first.transfer})" if first.transfer else first.kind
    yield name + (f" x{number}" if number > 1 else "")
    yield f"{'+'.join(first.dtypes)}\n{readable_bytes(first.num_bytes)}"
    if first.axes is None:
        yield "? not read"
    else:
        yield "\n".join(_sent(first)) or ("the host" if _is_host(first) else "-")
    runs = "?" if first.executions is None else str(first.executions)
    yield runs + ("\nin a branch" if first.conditional else "")
    yield f"{readable_seconds(first.time_s)}\n{readable_seconds(first.bound_s)}"
    exposed = readable_seconds(first.exposed_s)
    yield exposed + ("\nasync" if first.is_async else "")
    yield f"{first.made_by}\n{_where(rows)}"


def _where(rows: list[Row]) -> str:
    """Says what rows alike are for: an argument of the program, if it is one, and a line."""
    first, names = rows[0], list(dict.fromkeys(name for row in rows for name in _arguments(row)))
    where = "no source kept" if first.source is None else os.path.basename(first.source)
    where = f"near {where}" if first.is_near else where
    if not names:
        return where
    name = names[0] if len(names[0]) <= _WIDEST else f"…{names[0][1 - _WIDEST :]}"
    name += f" and {len(names) - 1} more" if len(names) > 1 else ""
    return name if first.source is None else f"{name}\n{where}"


def _arguments(row: Row) -> list[str]:
    """Returns the arguments of the program that a collective is named by; most are by none.

    What the partitioner does to an argument has the argument's name, and no line. Where XLA has
    combined several it writes (one:other).
    """
    names = [] if "jit(" in row.op_name else re.findall("[^():]+", row.op_name)
    return names if all(map(_ARGUMENT.fullmatch, names)) else []


def _is_host(row: Row) -> bool:
    """Whether it is a transfer to the host or from it: a callback, or `jax.debug.print`."""
    return row.kind in ("send", "recv") and row.transfer is None and row.axes == ()


def _sent(row: Row) -> Iterator[str]:
    """Yields a line an axis: its name, and what the busiest device sends over it."""
    for axis in dict.fromkeys((*(row.axes or ()), *(a for a, n in row.wire_bytes.items() if n))):
        sent = row.wire_bytes.get(axis, 0)
        yield f"{axis} {readable_bytes(sent)}" if sent else axis


def _totals(audit: Findings) -> Iterator[str]:
    sent = [f"{axis} {readable_bytes(n)}" for axis, n in audit.wire_bytes.items() if n]
    yield f"sent by the busiest device in one run: {', '.join(sent) or 'nothing'}"
    levels = [f"{name} {readable_bytes(n)}" for name, n in audit.level_bytes.items() if n]
    if levels:
        yield f"  by link level: {', '.join(levels)}"
    communication = _at_least(audit.communication_s, [(r.time_s, r.runs) for r in audit.rows])
    exposed = _at_least(audit.exposed_s, [(r.exposed_s, r.runs) for r in audit.rows])
    share = "" if audit.exposed_share is None else f", {audit.exposed_share:.0%} of the step"
    yield (
        f"compute {readable_seconds(audit.compute_s)}, communication {communication}, of it exposed"
        f" {exposed}{share}"
    )
    yield f"  compute: {audit.compute_source}"
    if audit.memory is not None:
        m = audit.memory
        yield (
            f"memory a device: {readable_bytes(m.total)} (arguments {readable_bytes(m.arguments)},"
            f" outputs {readable_bytes(m.outputs)}, temporaries {readable_bytes(m.temporaries)}"
            + (f", {readable_bytes(m.aliased)} of the outputs in place)" if m.aliased else ")")
        )
    if hosts := sum(map(_is_host, audit.rows)):
        yield f"{hosts} to or from the host: how long they take is not predicted"
    if branches := sum(row.conditional for row in audit.rows):
        yield f"{branches} run only if a branch is taken: communication counts all branches"
    unknown = sum(row.executions is None for row in audit.rows)
    if unknown:
        yield (
            f"{unknown} run in loops whose number of iterations the program does not show: totals"
            " count them once"
        )
    if not audit.is_complete and (unread := sum(bool(row.unread) for row in audit.rows)):
        yield f"{unread} could not be read in full: totals leave out what is not known of them"
        yield from dict.fromkeys(f"  {row.unread}" for row in audit.rows if row.unread)
    yield f"topology: {audit.topology}"


def _indented(line: str) -> Any:
    """Returns a line that keeps its indentation where it is broken."""
    text = Text(line.lstrip())
    return Padding(text, (0, 0, 0, len(line) - len(line.lstrip())))


def _at_least(total_s: float | None, parts: list[tuple[float | None, int]]) -> str:
    """Returns a total; where not all of it is known, the sum of what is."""
    known_s = sum(time_s * runs for time_s, runs in parts if time_s is not None)
    if total_s is None and known_s:
        return f"at least {readable_seconds(known_s)}"
    return readable_seconds(total_s)
