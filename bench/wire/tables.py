"""The figures as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from bench.timing import Times
from xcoll.printing import Name, plain_table
from xcoll.units import counted, readable_bytes, readable_seconds

Figures = Mapping[str, Any]

_MEDIAN = "median [quartiles]"
_COLUMNS = (
    *("payload", "variant", "plan"),
    *(_MEDIAN, "x lax", "bound", "x bound", "predicted", "error", "target"),
)
_STACKED = (
    *("payload", "variant,\nplan"),
    *("median\n[quartiles]", "x lax", "bound,\nx bound", "predicted,\nerror"),
)
_NARROW = 140
"""Columns of a terminal under which what belongs together stands one below the other."""

MEANING = (
    "x lax: how many times as fast as jax.lax, round by round. bound: the bytes that have to cross"
    " the busiest link, encoded as the plan has them, scales included, at line rate; TCP over"
    " Ethernet takes 1514/1448 of it, and the first 128 kB after a pause pass a link at once."
    " error: predicted over measured, less 1."
)


def cluster_tables(figures: Figures, width: int) -> Iterator[Table | Text]:
    """Yields what one cluster measured: a table a collective, then where missed time goes.

    Args:
      figures: of the cluster.
      width: columns of the terminal.
    """
    yield Text(figures["header"])
    peers = "; ".join(figures["peers"].values())
    yield Text(f"planned for {figures['topology']}" + (f"; beside it {peers}" if peers else ""))
    for note in figures["notes"]:
        yield Text(note)
    collectives = dict.fromkeys(cell["collective"] for cell in figures["cells"])
    for collective in collectives:
        cells = [cell for cell in figures["cells"] if cell["collective"] == collective]
        yield _collective(figures, collective, cells, width < _NARROW)
        for note in dict.fromkeys(note for cell in cells for note in cell["notes"]):
            yield Text(note)
        for cell in cells:
            for found in cell["breakdowns"]:
                yield _breakdown(cell, found)


def _collective(figures: Figures, collective: str, cells: list[Figures], is_narrow: bool) -> Table:
    rounds = dict.fromkeys(counted(cell["rounds"], "round") for cell in cells)
    devices = counted(figures["devices"], "device")
    table = plain_table(
        f"\n{collective}, float32, {figures['hosts']} hosts x {devices},"
        f" {figures['rate_bits_per_s'] / 1e6:g} Mbit/s; {', '.join(rounds)}"
    )
    for name in _STACKED if is_narrow else _COLUMNS:
        is_text = name in ("payload", "variant", "target") or "plan" in name
        # Text: rich would take what stands in brackets of a str for a style.
        table.add_column(
            Text(name), justify="left" if is_text else "right", no_wrap="plan" not in name
        )
    for cell in cells:
        for number, row in enumerate(cell["rows"]):
            payload = readable_bytes(cell["payload_bytes"]) if number == 0 else ""
            shown = tuple(_cells(row, cell["rows"]))
            table.add_row(payload, *(_stacked(*shown) if is_narrow else shown))
        table.add_section()
    return table


def _stacked(
    variant: str, plan: Name, time: Text, x_lax: str, *others: str | Text
) -> Iterator[Name | Text | str]:
    bound, x_bound, predicted, error, verdict = map(str, others)
    yield Name("\n".join(filter(None, (variant, plan.text, verdict))))
    yield Text(str(time).replace(" [", "\n["))
    yield x_lax
    yield f"{bound}\n{x_bound}"
    yield f"{predicted}\n{error}"


def _cells(row: Figures, rows: list[Figures]) -> Iterator[Any]:
    predicted_s = row["predicted_s"]
    if row["variant"] == "lax":
        # The plans of the same site say what it is predicted to take.
        natives = [other["native_predicted_s"] for other in rows]
        predicted_s = next((time_s for time_s in natives if time_s is not None), None)
    yield row["variant"]
    yield Name(row["plan"] or "-")
    yield Text(str(Times(tuple(row["rounds_s"]))))
    yield "-" if row["times_lax"] is None else f"{row['times_lax']:.2f}"
    yield readable_seconds(row["bound_s"])
    yield f"{row['over_bound']:.{2 if row['over_bound'] < 100 else 0}f}"
    yield readable_seconds(predicted_s)
    yield "-" if predicted_s is None else f"{predicted_s / row['median_s'] - 1:+.0%}"
    yield _verdict(row)


def _verdict(row: Figures) -> Text:
    if row["target"] is None or row["met"] is None:
        return Text()
    return Text(
        f"{row['target']}: {'met' if row['met'] else 'MISSED'}",
        style="green" if row["met"] else "red",
    )


def _breakdown(cell: Figures, found: Figures) -> Table:
    table = plain_table(
        f"\nwhere the time goes: {cell['collective']} {readable_bytes(cell['payload_bytes'])},"
        f" {found['variant']}, {found['plan']}"
    )
    table.add_column("by itself")
    table.add_column(Text(_MEDIAN), justify="right", no_wrap=True)
    table.add_column("of the whole", justify="right", no_wrap=True)
    whole_s = found["whole_s"]

    def add(name: str, time: str | Text, time_s: float) -> None:
        table.add_row(Name(name), time, f"{time_s / whole_s:.0%}")

    add("the whole plan", readable_seconds(whole_s), whole_s)
    for is_stage in (True, False):
        table.add_section()
        for piece in found["pieces"]:
            if piece["is_stage"] == is_stage:
                times = str(Times(tuple(piece["rounds_s"])))
                add(piece["piece"], Text(times), piece["median_s"])
        if is_stage and found["stages_s"] is not None:
            add("all stages", readable_seconds(found["stages_s"]), found["stages_s"])
        elif is_stage:
            table.add_row("its stages are not whole axes each, and are not run alone", "", "")
    return table
