"""A program in time, as predicted: its events, and the file that Perfetto shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from xcoll.files import write_text
from xcoll.hlo.findings import Findings
from xcoll.hlo.rows import Event, Row
from xcoll.hlo.spans import Span
from xcoll.hlo.text import Module
from xcoll.hlo.walking import COMPUTE, LOOPS, Walk
from xcoll.hlo.work import Compute


def events_of(
    module: Module, rows: Sequence[Row], placed: Sequence[Span], compute: Compute
) -> tuple[Event, ...]:
    """Returns one execution of a program on one device, as predicted.

    Computation follows the schedule. A collective starts where the schedule starts it; where its
    time is longer than what the computation beside it hides, the device waits for the rest at its
    done. The first iteration of a loop is drawn whole, the others as one event. Of a conditional,
    the branch that takes longest is drawn, while `Audit.step_s` counts all of them: without
    conditionals and loops of unknown length, the last event ends at `Audit.step_s`.

    Args:
      module: the program.
      rows: its collectives.
      placed: where those that are asynchronous run, as `xcoll.hlo.spans.spans` returns it.
      compute: how long its instructions take.

    Returns:
      Events in the order of their starts; of those that start at once the longest comes first.
    """
    walk = Walk(module, rows, placed, compute)
    walk.run()
    walk.clock.flush()
    return tuple(sorted(walk.clock.events, key=_order))


def write_timeline(audit: Findings, path: str | os.PathLike[str]) -> None:
    """Writes an audit's events as Chrome trace events, which ui.perfetto.dev opens.

    The tracks are computation with what it waits for, loops, and the links, level by level.
    Collectives at the same time on one level lie on tracks of their own. The file is replaced
    once it is complete.

    Args:
      audit: what is written.
      path: of a JSON file.

    Raises:
      OSError: the file cannot be written.
    """
    title = f"one device, as predicted: {audit.topology.splitlines()[0]}"
    data = {"traceEvents": list(_trace(audit, title)), "displayTimeUnit": "ns"}
    write_text(path, json.dumps(data))


def _trace(audit: Findings, title: str) -> Iterator[dict[str, Any]]:
    rows = {row.name: row for row in audit.rows}
    yield _named("process_name", 0, title)
    lanes: dict[str, list[tuple[int, int]]] = {}
    names = [COMPUTE, LOOPS]
    for event in sorted(audit.events, key=_order):
        # Whole nanoseconds, which is what Perfetto keeps: by them ends and starts are compared.
        start, end = _ns(event.start_s), _ns(event.start_s + event.duration_s)
        track = event.track
        if event.track not in (COMPUTE, LOOPS):
            track = _lane(lanes, event.track, start, end)
        if track not in names:
            names.append(track)
        yield {
            "ph": "X",
            "pid": 0,
            "tid": names.index(track),
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "name": event.name,
            "args": _facts(event, rows.get(event.row or "")),
        }
    for number, name in enumerate(names):
        yield _named("thread_name", number, name)
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index",
               "args": {"sort_index": number}}  # fmt: skip


def _order(event: Event) -> tuple[float, float]:
    # What lies around another comes first, as Perfetto wants it.
    return event.start_s, -event.duration_s


def _named(what: str, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": number, "name": what, "args": {"name": name}}


def _lane(lanes: dict[str, list[tuple[int, int]]], track: str, start: int, end: int) -> str:
    """Returns the first track of a level that is free at ``start``, and takes it until ``end``."""
    taken = lanes.setdefault(track, [])
    number = next((n for n, (_, until) in enumerate(taken) if until <= start), len(taken))
    taken[number : number + 1] = [(start, end)]
    return track if number == 0 else f"{track} ({number + 1})"


def _facts(event: Event, row: Row | None) -> dict[str, Any]:
    """Returns what Perfetto shows of an event that is selected."""
    facts: dict[str, Any] = {"note": event.note} if event.note else {}
    if row is not None:
        facts |= {
            "instruction": row.name,
            "bytes": row.num_bytes,
            "axes": "unknown" if row.axes is None else ", ".join(row.axes),
            "runs": "unknown" if row.executions is None else row.executions,
            "time (s)": row.time_s,
            "exposed (s)": row.exposed_s,
            "made by": row.made_by,
            "source": row.source or "unknown",
            "name stack": row.op_name,
        }
    return facts


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
