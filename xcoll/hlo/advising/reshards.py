"""Reshardings by the partitioner that other shardings of the program would spare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from xcoll.hlo.advising.flow import RESULT, Flow
from xcoll.hlo.advising.sources import argument, is_by_device
from xcoll.hlo.advising.words import named, places
from xcoll.hlo.reader import Collective
from xcoll.hlo.rows import Advice, Row


def reshardings(
    flow: Flow, rows: Sequence[Row], collectives: Mapping[str, Collective]
) -> Iterator[Advice]:
    """Yields advice for what the partitioner reshards, in the cases that are certain.

    An all-to-all by the partitioner moves a sharding from one dimension to another. It is not
    needed where

    * an argument is used for nothing else but, element by element, to be resharded,
    * its result is used for nothing else but to be, element by element, an output,
    * its result, element by element, only goes into another over the same groups.

    Nor is an all-gather of which each device uses, element by element, a part of its own alone.
    What a constraint between two other operations asks for, as around the experts of a mixture, may
    be meant.
    """
    made = [row for row in rows if row.made_by == "partitioner"]
    yield from _moved(flow, {r.name: r for r in made if r.kind == "all-to-all"}, collectives)
    for row in made:
        if row.kind == "all-gather" and _is_cut(flow, row.computation, row.name):
            yield _advice(
                [row],
                f"A value is gathered over {named(row.axes)} only for each device to cut out a part"
                f"{places([row])}, since the partitioner does not know a direct way between the two"
                " shardings (XLA calls it involuntary full rematerialization): put a constraint in"
                " between that is a step to both, such as the old sharding with the dimension to be"
                " cut sharded as well.",
                None,
            )


def _is_cut(flow: Flow, computation: str, name: str) -> bool:
    """Whether all that is used of a value is a part that differs from device to device."""
    ends = flow.ends(computation, name)
    for end in ends:
        i = flow.module.computations[computation].instructions.get(end)
        if i is not None and i.opcode == "fusion":
            called = flow.called(i)
            inside = [called.parameter(n) for n, o in enumerate(i.operands) if o == name]
            is_cut = bool(inside) and all(_is_cut(flow, called.name, p or "") for p in inside)
        elif i is not None and i.opcode == "dynamic-slice":
            is_cut = any(is_by_device(flow, computation, o) for o in i.operands[1:])
        else:
            is_cut = False
        if not is_cut:
            return False
    return bool(ends)


def _moved(
    flow: Flow, found: Mapping[str, Row], collectives: Mapping[str, Collective]
) -> Iterator[Advice]:
    if not found:
        return
    entry = flow.module.computations[flow.module.entry]
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
            f"A value is resharded twice over {named(row.axes)}{places([row, other])}, and between"
            " the two only worked on element by element, as in any sharding: leave out the"
            " constraint between them, and one or both of the two are not needed.",
            min(times) if len(times) == 2 else None,
        )


def _advice(rows: Sequence[Row], text: str, spared_s: float | None) -> Advice:
    return Advice(
        kind="resharding",
        text=text,
        rows=tuple(row.name for row in rows),
        saves_s=None if spared_s is None else spared_s * rows[0].runs,
    )
