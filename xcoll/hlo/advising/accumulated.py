"""Sums over devices in every iteration of a loop that does nothing but add them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xcoll.hlo.advising.flow import Flow
from xcoll.hlo.advising.requests import operation
from xcoll.hlo.advising.sources import leaves
from xcoll.hlo.advising.words import named, places
from xcoll.hlo.loops import trip_count
from xcoll.hlo.rows import Advice, Row, total_s
from xcoll.hlo.text import Instruction

_SAME = ("bitcast", "copy", "get-tuple-element", "reshape")


def accumulated_sums(flow: Flow, rows: Sequence[Row]) -> Iterator[Advice]:
    """Yields one advice for each loop: ``sum of psum(x_i)`` is ``psum(sum of x_i)``."""
    loops: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        site = flow.loop(row.computation)
        if row.kind != "all-reduce" or site is None or operation(flow.module, row) != "sum":
            continue
        if _only_added(flow, row.computation, row.name):
            trips = trip_count(flow.module, *site)
            if trips is None or trips > 1:
                loops.setdefault((site[1].name, trips), []).append(row)
    for (_, trips), found in loops.items():
        saves_s = None
        if trips is not None:
            saves_s = total_s((row.exposed_s, row.runs - row.runs // trips) for row in found)
        how_often = "in every iteration" if trips is None else f"{trips} times"
        yield Advice(
            kind="sum-in-loop",
            text=(
                f"A loop sums over {named(found[0].axes)} {how_often} what it only adds up"
                f"{places(found)}: let each device add up its own, and sum once after the loop"
                " (in a jax.shard_map, where the carry may differ from device to device:"
                " jax.lax.pcast(..., to='varying'))."
            ),
            rows=tuple(row.name for row in found),
            saves_s=saves_s,
        )


def _only_added(flow: Flow, body: str, name: str) -> bool:
    """Whether all that is done with a value is to add it to one that the loop carries."""
    users = flow.users(body, name)
    if not users:
        return False
    for user in users:
        if user.opcode in (*_SAME, "all-reduce-done"):
            is_added = _only_added(flow, body, user.name)
        else:
            carried = _added_to(flow, body, user, name)
            is_added = carried is not None and _is_carried(flow, body, user, carried)
        if not is_added:
            return False
    return True


def _added_to(flow: Flow, computation: str, i: Instruction, name: str) -> str | None:
    """Returns the operand that an instruction, or a fusion, does nothing but add ``name`` to."""
    if i.opcode == "add" and len(set(i.operands)) == 2:
        return next(operand for operand in i.operands if operand != name)
    if i.opcode != "fusion" or len(i.operands) != 2 or len(set(i.operands)) != 2:
        return None
    inner = flow.called(i)
    root = inner.instructions[inner.root]
    while root.opcode in ("bitcast", "copy"):
        root = inner.instructions[root.operands[0]]
    sides = [leaves(flow, inner.name, [operand]) for operand in root.operands]
    if root.opcode != "add" or sorted(map(str, sides)) != ["{(0, None)}", "{(1, None)}"]:
        return None
    return next(operand for operand in i.operands if operand != name)


def _is_carried(flow: Flow, body: str, add: Instruction, name: str) -> bool:
    """Whether the loop's state holds ``name`` and, for the next iteration, what ``add`` makes."""
    instructions = flow.module.computations[body].instructions
    root = instructions[flow.module.computations[body].root]
    after = add
    while len(users := flow.users(body, after.name)) == 1 and users[0].opcode in _SAME:
        after = users[0]
    if users != [root] or root.opcode != "tuple":
        return False
    before = instructions[name]
    while before.opcode in ("bitcast", "copy", "reshape"):
        if len(flow.users(body, before.name)) != 1:
            return False
        before = instructions[before.operands[0]]
    # It must have no other use: a running sum that is looked at has to be whole.
    index = root.operands.index(after.name)
    site = flow.loop(body)
    assert site is not None
    condition = flow.module.computations[dict(site[1].calls())["condition"]]
    state = _element(flow, body, index)
    return (
        state == [before]
        and len(flow.users(body, before.name)) == 1
        and not _element(flow, condition.name, index)
    )


def _element(flow: Flow, computation: str, index: int) -> list[Instruction]:
    """Returns what reads an element of the state that a loop's body or condition is given."""
    state = flow.module.computations[computation].parameter(0) or ""
    return [i for i in flow.users(computation, state) if i.attribute("index") == str(index)]
