"""What a value of a compiled program is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xcoll.hlo.advising.flow import ASYNC, MOVES, POINTWISE, Flow, num_elements
from xcoll.hlo.loops import trip_count
from xcoll.hlo.text import WRAPPERS, Instruction

_STEPS = MOVES | POINTWISE | {"fusion"}
_SOURCES = ("parameter", "partition-id", "replica-id")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a value inside loops is made from, by operations of `MOVES` alone.

    Attributes:
      arguments: names of the program's arguments.
      repeats: how often the loops around it make it again, equal each time; None where the text
        does not show that.
      loop: the innermost of them.
    """

    arguments: tuple[str, ...]
    repeats: int | None
    loop: str


def origin(flow: Flow, computation: str, name: str) -> Origin | None:
    """Returns what a value of a loop's body is made from, if it is equal in every iteration.

    The loops that count are those from the innermost outwards in which it is.

    Returns:
      None where no loop makes it again, or where it is made from anything but the program's
      arguments (and constants), or in another way than by `MOVES`.
    """
    names = [name]
    repeats: int | None = 1
    loop, is_equal = "", True
    while computation != flow.module.entry:
        parts = leaves(flow, computation, names)
        site = flow.module.callers.get(computation, [])
        if not parts or len(site) != 1:
            return None
        ((caller, i, key),) = site
        if key == "body":
            varying = {part for part in parts if not _is_kept(flow, computation, part)}
            if any(_size(flow, computation, part) > 1 for part in varying):
                return None  # not an argument, nor a part of one
            is_equal = is_equal and not varying
            if is_equal:
                trips = trip_count(flow.module, caller, i)
                repeats = repeats * trips if repeats is not None and trips is not None else None
                loop = loop or i.name
            started = _started(flow, caller, i)
            if started is None:
                return None
            names = [started[index] for _, index in parts - varying if index is not None]
        elif i.opcode in WRAPPERS and all(index is None for _, index in parts):
            handed = _handed(flow, caller, i)
            names = [handed[number] for number, _ in parts]
        else:
            return None
        computation = caller
    parts = leaves(flow, computation, names)
    if not parts or not loop:
        return None
    entry = flow.module.computations[computation]
    parameters = [entry.parameter(number) for number in sorted({number for number, _ in parts})]
    arguments = tuple(argument(entry.instructions[p]) for p in parameters if p)
    return Origin(arguments=arguments, repeats=repeats, loop=loop)


def leaves(flow: Flow, computation: str, names: list[str]) -> set[tuple[int, int | None]] | None:
    """Returns the parameters that values are made from by moves alone, else None.

    Each as its number, and of a tuple which element (else None).
    """
    instructions = flow.module.computations[computation].instructions
    found: set[tuple[int, int | None]] = set()
    seen, left = set(names), list(names)
    while left:
        i = instructions[left.pop()]
        if i.opcode == "parameter":
            found.add((int(i.arguments), None))
            continue
        operands = i.operands
        if i.opcode == "get-tuple-element":
            index = int(i.attribute("index") or 0)
            source = instructions[i.operands[0]]
            while source.opcode == "optimization-barrier":
                source = instructions[source.operands[0]]
            if source.opcode == "parameter":
                found.add((int(source.arguments), index))
                continue
            operands = (source.operands[index],) if source.opcode == "tuple" else (source.name,)
        elif not flow.is_move(computation, i):
            return None
        left += [name for name in operands if name not in seen]
        seen |= set(operands)
    return found


def is_by_device(flow: Flow, computation: str, name: str) -> bool:
    """Whether a scalar, such as an offset, follows from the device's number alone."""
    return _sources(flow, computation, name) == {"partition-id"}


def _sources(flow: Flow, computation: str, name: str) -> set[str]:
    """Returns the kinds of instructions that a scalar is computed from, but for constants."""
    found: set[str] = set()
    seen, left = {name}, [name]
    while left:
        i = flow.module.computations[computation].instructions[left.pop()]
        fusion = flow.fusion(computation) if i.opcode == "parameter" else None
        if fusion is not None:
            caller, at = fusion
            outside = flow.module.computations[caller].instructions[at].operands
            found |= _sources(flow, caller, outside[int(i.arguments)])
        elif i.opcode in _SOURCES or ASYNC.sub("", i.opcode) not in _STEPS:
            found.add(i.opcode)
        else:
            left += [operand for operand in i.operands if operand not in seen]
            seen |= set(i.operands)
    return found


def _is_kept(flow: Flow, body: str, leaf: tuple[int, int | None]) -> bool:
    """Whether an element of a loop's state is handed on as it is."""
    root = flow.module.computations[body].instructions[flow.module.computations[body].root]
    index = leaf[1]
    if root.opcode != "tuple" or index is None:
        return False
    at = flow.module.computations[body].instructions[root.operands[index]]
    while at.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        at = flow.module.computations[body].instructions[at.operands[0]]
    return at.opcode == "get-tuple-element" and leaves(flow, body, [at.name]) == {leaf}


def _size(flow: Flow, body: str, leaf: tuple[int, int | None]) -> float:
    """Returns the elements of a part of a loop's state."""
    parameter = flow.module.computations[body].parameter(leaf[0])
    for i in flow.users(body, parameter or ""):
        if i.opcode == "get-tuple-element" and i.attribute("index") == str(leaf[1]):
            return num_elements(i.type)
    return math.inf


def _handed(flow: Flow, caller: str, i: Instruction) -> tuple[str, ...]:
    """Returns the operands of what a wrapper calls; to SparseCores, an update hands them over."""
    updates = (user for user in flow.users(caller, i.name) if user.opcode.endswith("-update"))
    return i.operands or next((update.operands[1:] for update in updates), ())


def _started(flow: Flow, caller: str, loop: Instruction) -> tuple[str, ...] | None:
    """Returns the names of the elements with which a loop's state starts."""
    instructions = flow.module.computations[caller].instructions
    state = instructions[loop.operands[0]]
    while state.opcode in ("optimization-barrier", "copy"):
        state = instructions[state.operands[0]]
    return state.operands if state.opcode == "tuple" else None


def argument(parameter: Instruction) -> str:
    """Returns how JAX names an argument of the program (``"params['w1']"``), or its name in it."""
    return parameter.op_name or parameter.name
