"""Reshardings by the partitioner that other shardings of the program would spare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from xcoll.hlo.advising.flow import RESULT, Flow, argument
from xcoll.hlo.advising.words import places
from xcoll.hlo.reader import Collective
from xcoll.hlo.rows import Advice, Row


def reshardings(
    flow: Flow, rows: Sequence[Row], collectives: Mapping[str, Collective]
) -> Iterator[Advice]:
    """Yields advice for all-to-alls that the partitioner made, in three cases that are certain.

    An all-to-all by the partitioner moves a sharding from one dimension to another. It is not
    needed where

    * an argument is used for nothing else but, element by element, to be resharded,
    * its result is used for nothing else but to be, element by element, an output,
    * its result, element by element, only goes into another over the same groups.

    What a constraint between two other operations asks for, as around the experts of a mixture, may
    be meant.
    """
    found = {r.name: r for r in rows if r.kind == "all-to-all" and r.made_by == "partitioner"}
    entry = flow.module.computations[flow.module.entry]
    if not found:
        return
    told: set[str] = set()
    for parameter in entry.instructions.values():
        if parameter.opcode != "parameter":
            continue
        ends = flow.ends(entry.name, parameter.name)
        row = found.get(ends.pop()) if len(ends) == 1 else None
        if row is not None:
            told.add(row.name)
            yield _advice(
                [row],
                f"The argument {argument(parameter)} is resharded before it is used"
                f"{places([row])}, and used in no other sharding: pass it in that.",
                row.exposed_s,
            )
    for row in found.values():
        ends = flow.ends(row.computation, row.name)
        end = ends.pop() if len(ends) == 1 else None
        if end == RESULT and row.computation == entry.name and row.name not in told:
            yield _advice(
                [row],
                f"A result is resharded when it is done{places([row])}, and used in no other"
                " sharding: return it in the one in which it is made (out_shardings, or the last"
                " constraint on it).",
                row.exposed_s,
            )
        other = found.get(end) if end else None
        if other is None or collectives[row.name].groups != collectives[other.name].groups:
            continue
        times = [r.exposed_s for r in (row, other) if r.exposed_s is not None]
        yield _advice(
            [row, other],
            f"A value is resharded twice over {row.axes}{places([row, other])}, and between the"
            " two only worked on element by element, as in any sharding: leave out the constraint"
            " between them, and one or both of the two are not needed.",
            min(times) if len(times) == 2 else None,
        )


def _advice(rows: Sequence[Row], text: str, spared_s: float | None) -> Advice:
    return Advice(
        kind="resharding",
        text=text,
        rows=tuple(row.name for row in rows),
        saves_s=None if spared_s is None else spared_s * rows[0].runs,
    )
