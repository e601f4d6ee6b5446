"""An audit as people read it: a table of collectives, totals, advice."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from typing import Any, Literal

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xcoll.hlo.findings import Findings
from xcoll.hlo.rows import Row
from xcoll.units import readable_bytes, readable_time

_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("collective", "left"),
    ("operand", "right"),
    ("sent over", "left"),
    ("runs", "right"),
    ("time,\nbound", "right"),
    ("exposed", "right"),
    ("made by,\nfor", "left"),
)


def show(audit: Findings) -> Any:
    """Returns what rich prints for an audit: rows alike are one, the costliest first."""
    table = Table(
        title=f"xcoll: {_summary(audit)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)
    for rows in _alike(audit):
        table.add_row(*_cells(rows))
    parts: list[Any] = [table] if audit.rows else [Text(f"xcoll: {_summary(audit)}")]
    parts += ["", *(Text(line) for line in _totals(audit))]
    if audit.advice:
        parts.append("")
    for advice in audit.advice:
        saves = f" (saves {_time(advice.saves_s)} a run)" if advice.saves_s else ""
        parts.append(Text(f"{advice.kind}{saves}:", style="bold"))
        parts.append(Padding(Text(advice.text), (0, 0, 0, 2)))
    return Group(*parts)


def text(audit: Findings) -> str:
    """Returns the same as plain text, for a terminal of at least 100 columns."""
    out = io.StringIO()
    Console(file=out, width=max(100, shutil.get_terminal_size((100, 40)).columns)).print(
        show(audit)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def _summary(audit: Findings) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in audit.axis_sizes.items())
    number = len(audit.rows)
    found = f"{number} collective{'' if number == 1 else 's'}" if number else "no collective"
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
        yield f"? not read\n{first.unread}"
    else:
        yield "\n".join(_sent(first)) or "-"
    runs = "?" if first.executions is None else str(first.executions)
    yield runs + ("\nin a branch" if first.conditional else "")
    yield f"{_time(first.time_s)}\n{_time(first.bound_s)}"
    exposed = _time(first.exposed_s)
    yield exposed + ("\nasync" if first.is_async else "")
    near = "near " if first.is_near else ""
    where = f"{near}{_short(first.source)}" if first.source else "no source kept"
    yield f"{first.made_by}\n{where}"


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
    yield (
        f"compute {_time(audit.compute_s)} ({audit.compute_source}), communication"
        f" {_time(audit.communication_s)}, exposed {_time(audit.exposed_s)}"
        + (f" = {audit.exposed_share:.0%} of the step" if audit.exposed_share is not None else "")
    )
    if audit.memory is not None:
        m = audit.memory
        yield (
            f"memory a device: {readable_bytes(m.total)} (arguments {readable_bytes(m.arguments)},"
            f" outputs {readable_bytes(m.outputs)}, temporaries {readable_bytes(m.temporaries)}"
            + (f", {readable_bytes(m.aliased)} of the outputs in place)" if m.aliased else ")")
        )
    unknown = sum(row.executions is None for row in audit.rows)
    if unknown:
        yield (
            f"{unknown} run in loops whose number of iterations the program does not show: totals"
            " count them once"
        )
    if not audit.is_complete and (unread := sum(bool(row.unread) for row in audit.rows)):
        yield f"{unread} could not be read in full: totals leave out what is not known of them"
    yield f"topology: {audit.topology}"


def _short(source: str) -> str:
    return os.path.basename(source)


def _time(time_s: float | None) -> str:
    return readable_time(None if time_s is None else round(time_s * 1e12))
