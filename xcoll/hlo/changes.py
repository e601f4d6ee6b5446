"""What a change did to a program: figures and sites, before and after."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from xcoll.printing import as_text, plain_table
from xcoll.units import counted, readable_bytes, readable_seconds


@dataclass(frozen=True, kw_only=True)
class Total:
    """One figure of the whole program, in both audits.

    Attributes:
      table: ``"wire_bytes"`` (by axis), ``"count"`` (operations by kind), ``"time"`` (seconds) or
        ``"memory"`` (bytes).
      key: what of it.
      before: None where it is not known, or the mesh has no such axis.
      after: the same.
    """

    table: str
    key: str
    before: int | float | None
    after: int | float | None

    @property
    def difference(self) -> int | float | None:
        """What the change added; None where one of them is not known."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The collectives of one site in one program, together.

    Attributes:
      number: of operations in the program.
      executions: of all of them in one execution of the program; None where not known.
      num_bytes: of their operands, per device, each operation once.
      wire_bytes: that the busiest device of each sends in one execution of the program, by axis.
      exposed_s: what the device waits for them in one execution; None where not predicted.
    """

    number: int
    executions: int | None
    num_bytes: int
    wire_bytes: dict[str, int]
    exposed_s: float | None


@dataclass(frozen=True, kw_only=True)
class SiteChange:
    """The collectives of one site, of one kind, before and after.

    Attributes:
      kind: as in `xcoll.hlo.rows.Row`.
      axes: as there.
      dtypes: as there.
      source: as there; that of the second audit, where it is in both, as all of these.
      op_name: as there.
      before: None where they appeared.
      after: None where they vanished.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtypes: tuple[str, ...]
    source: str | None
    op_name: str
    before: Tally | None
    after: Tally | None

    @property
    def what(self) -> str:
        """``"appeared"``, ``"vanished"``, ``"changed"`` or ``"same"``."""
        if self.before is None:
            return "appeared"
        if self.after is None:
            return "vanished"
        return "same" if self.before == self.after else "changed"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a change did to a program, made by `compare`.

    Attributes:
      notes: what makes the audits hard to compare: other meshes, other topologies, what could not
        be read.
      totals: the figures of the whole program.
      sites: the collectives by site, in the order of the second program, then those that vanished.
    """

    notes: tuple[str, ...]
    totals: tuple[Total, ...]
    sites: tuple[SiteChange, ...]

    def to_json(self) -> str:
        """Returns the comparison as JSON text."""
        totals = [asdict(total) | {"difference": total.difference} for total in self.totals]
        sites = [{"what": site.what} | asdict(site) for site in self.sites]
        return json.dumps({"notes": self.notes, "totals": totals, "sites": sites}, indent=1)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.notes, _totals(self), "", *_sites(self))

    def __str__(self) -> str:
        return as_text(self, least_width=120)


def _totals(comparison: Comparison) -> Any:
    table = plain_table("xcoll: one execution of the program, on one device")
    table.add_column("", overflow="fold")
    for heading in ("before", "after", "difference"):
        table.add_column(heading, justify="right", overflow="fold")
    for total in comparison.totals:
        if total.before or total.after or total.difference is None:
            table.add_row(*_total_row(total))
    return table


_TITLES = {"wire_bytes": "sent over {}", "count": "{}", "time": "{} time", "memory": "memory, {}"}


def _total_row(total: Total) -> tuple[str, ...]:
    amounts = [_amount(total.table, amount) for amount in (total.before, total.after)]
    return (_TITLES[total.table].format(total.key), *amounts, _difference(total))


def _difference(total: Total) -> str:
    difference = total.difference
    if difference is None:
        return "-"
    if not difference:
        return "same"
    text = f"{'+' if difference > 0 else '-'}{_amount(total.table, abs(difference))}"
    return text + (f" ({difference / total.before:+.1%})" if total.before else "")


def _amount(table: str, amount: int | float | None) -> str:
    if amount is None:
        return "-"
    if table == "time":
        return readable_seconds(amount)
    return str(amount) if table == "count" else readable_bytes(int(amount))


def _sites(comparison: Comparison) -> Iterator[Any]:
    changes = [site for site in comparison.sites if site.what != "same"]
    if changes:
        table = plain_table("xcoll: collectives that changed, by site")
        for heading in ("", "collective", "over", "number", "runs", "sent", "waits", "from"):
            table.add_column(heading, overflow="fold")
        cells = [_site_row(change) for change in changes]
        number = Counter((cell[1:3], cell[-1]) for cell in cells)
        for change, cell in zip(changes, cells, strict=True):
            *others, where = cell
            if number[cell[1:3], where] > 1 and where != change.op_name:
                where = f"{where}\n{change.op_name}"  # what a line does, forwards and backwards
            table.add_row(*others, where.rstrip())
        yield table
    same = len(comparison.sites) - len(changes)
    yield f"{counted(same, 'site')} with the same collectives"


def _site_row(change: SiteChange) -> tuple[str, ...]:
    cells = [_cells(tally) for tally in (change.before, change.after) if tally is not None]
    return (
        change.what,
        f"{change.kind}\n{', '.join(change.dtypes)}",
        "?" if change.axes is None else ", ".join(change.axes),
        *("\n-> ".join(dict.fromkeys(column)) for column in zip(*cells, strict=True)),
        os.path.basename(change.source) if change.source else change.op_name or "?",
    )


def _cells(tally: Tally) -> tuple[str, ...]:
    sent = [
        f"{axis} {readable_bytes(amount)}" for axis, amount in tally.wire_bytes.items() if amount
    ]
    return (
        str(tally.number),
        "?" if tally.executions is None else str(tally.executions),
        ", ".join(sent) or "-",
        _amount("time", tally.exposed_s),
    )
