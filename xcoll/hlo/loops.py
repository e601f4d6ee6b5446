"""How often each computation of a program runs: trip counts, nested."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xcoll.hlo.text import Instruction, Module

_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_SAME = ("copy", "bitcast", "reshape", "optimization-barrier", "copy-start", "copy-done")
_REVERSED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}

Affine = tuple[int | None, int]
"""A scalar as an element of a loop's state plus an integer; None for the integer alone."""


def executions(module: Module) -> dict[str, int | None]:
    """Counts how often each computation runs in one execution of the program.

    Both branches of a conditional count as taken. A computation called from several places has the
    sum.

    Returns:
      A count for each computation, 0 where nothing calls it, None where it depends on a loop whose
      trip count the text does not show.
    """
    counts: dict[str, int | None] = {module.entry: 1}

    def count(name: str) -> int | None:
        if name not in counts:
            total: int | None = 0
            for caller, instruction, key in module.callers.get(name, []):
                outer, inner = count(caller), _times(module, caller, instruction, key)
                known = outer is not None and inner is not None and total is not None
                # What never runs runs never, even with an unknown trip count inside.
                total = total if outer == 0 else total + outer * inner if known else None  # type: ignore[operator]
            counts[name] = total
        return counts[name]

    return {name: count(name) for name in module.computations}


def conditional(module: Module) -> frozenset[str]:
    """Returns the computations that run only if a branch of a conditional is taken."""
    return _reached(module, [c for _, c, by_slice in _branches(module) if not by_slice])


def slices(module: Module) -> dict[str, tuple[int, ...]]:
    """Returns, for the computations that only some TPU slices run, which slices those are.

    Where slices differ in what they do, libtpu branches on the number of the slice.
    """
    found: dict[str, set[int]] = {}
    for number, callee, by_slice in _branches(module):
        if by_slice:
            for name in _reached(module, [callee]):
                found.setdefault(name, set()).add(number)
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def trip_count(module: Module, caller: str, loop: Instruction) -> int | None:
    """Returns how often the body of a ``while`` runs, or None if the text does not show it.

    GPU and CPU print the count. TPU does not: there it is worked out where the condition compares
    an element of the state, which starts at a constant and moves by a constant, with a constant.

    Args:
      module: the program.
      caller: name of the computation that ``loop`` stands in.
      loop: the ``while`` instruction.
    """
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    names = dict(loop.calls())
    condition, body = (module.computations.get(names.get(k, "")) for k in ("condition", "body"))
    if condition is None or body is None:
        return None
    test = condition.instructions[condition.root]
    if test.opcode == "fusion":  # a comparison that was wrapped: its operands are the fusion's
        inner = module.computations[dict(test.calls())["calls"]]
        compare = inner.instructions[inner.root]
        sides = [_through_fusion(module, condition.name, test, name) for name in compare.operands]
    else:
        compare = test
        sides = [_affine(module, condition.name, name) for name in compare.operands]
    direction = (compare.attribute("direction") or "").strip()
    if compare.opcode != "compare" or direction not in _REVERSED or None in sides:
        return None
    (left, first), (right, last) = sides  # type: ignore[misc]
    if left is None or _step(module, body.name, left) == 0:  # the side that moves comes first
        left, first, right, last, direction = right, last, left, first, _REVERSED[direction]
    if left is None:
        return None
    step = _step(module, body.name, left)
    start = _initial(module, caller, loop, left)
    limit: int | None = last
    if right is not None:
        invariant = _step(module, body.name, right) == 0
        base = _initial(module, caller, loop, right) if invariant else None
        limit = None if base is None else base + last
    if step is None or start is None or limit is None:
        return None
    return _trips(start + first, limit, step, direction)


def _times(module: Module, caller: str, instruction: Instruction, key: str) -> int | None:
    if instruction.opcode == "while" and key in ("body", "condition"):
        trips = trip_count(module, caller, instruction)
        return trips + 1 if trips is not None and key == "condition" else trips
    return 1


def _branches(module: Module) -> Iterator[tuple[int, str, bool]]:
    """Yields number and computation of each branch, and whether the slice's number selects it."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "conditional":
                selector = computation.instructions[instruction.operands[0]]
                while selector.opcode in (*_SAME, "convert"):
                    selector = computation.instructions[selector.operands[0]]
                by_slice = selector.attribute("custom_call_target") == '"SliceId"'
                for number, (_, callee) in enumerate(instruction.calls()):
                    yield number, callee, by_slice


def _reached(module: Module, names: list[str]) -> frozenset[str]:
    """Returns these computations and all that they call."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in module.computations and name not in found:
            found.add(name)
            for instruction in module.computations[name].instructions.values():
                names += [callee for _, callee in instruction.calls()]
    return frozenset(found)


def _trips(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        direction, limit = direction[0] + "T", limit + (1 if direction == "LE" else -1)
    if direction == "NE":
        whole = step != 0 and (limit - start) % step == 0 and (limit - start) // step >= 0
        return (limit - start) // step if whole else None
    if direction == "GT":
        start, limit, step = -start, -limit, -step
    if start >= limit:
        return 0
    return -(-(limit - start) // step) if step > 0 else None


def _initial(module: Module, caller: str, loop: Instruction, index: int) -> int | None:
    """Returns what element ``index`` of the state is when the loop starts."""
    state = module.computations[caller].instructions[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    value = _affine(module, caller, state.operands[index])
    return value[1] if value is not None and value[0] is None else None


def _step(module: Module, body: str, index: int) -> int | None:
    """Returns how much element ``index`` of the state moves in an iteration."""
    computation = module.computations[body]
    root = computation.instructions[computation.root]
    if root.opcode != "tuple":
        return None
    value = _affine(module, body, root.operands[index])
    return value[1] if value is not None and value[0] == index else None


def _affine(module: Module, computation: str, name: str) -> Affine | None:
    """Works out a scalar of a loop's body or condition in terms of the loop's state."""
    instructions = module.computations[computation].instructions
    i = instructions[name]
    if i.opcode == "constant":
        return (None, int(i.arguments)) if re.fullmatch(r"\s*-?\d+\s*", i.arguments) else None
    if i.opcode in _SAME:
        return _affine(module, computation, i.operands[0])
    if i.opcode == "get-tuple-element":
        source = instructions[i.operands[0]]
        index = int(i.attribute("index") or 0)
        if source.opcode == "tuple":
            return _affine(module, computation, source.operands[index])
        return (index, 0) if source.opcode == "parameter" else None
    if i.opcode in ("add", "subtract"):
        return _sum(i.opcode, *(_affine(module, computation, name) for name in i.operands))
    if i.opcode == "fusion":
        inner = module.computations[dict(i.calls())["calls"]]
        return _through_fusion(module, computation, i, inner.root)
    return None


def _through_fusion(module: Module, outer: str, fusion: Instruction, name: str) -> Affine | None:
    """Works out scalar ``name`` inside a fusion in terms of the state outside it."""
    inner = module.computations[dict(fusion.calls())["calls"]]
    i = inner.instructions[name]
    if i.opcode == "parameter":
        return _affine(module, outer, fusion.operands[int(i.arguments)])
    if i.opcode in ("add", "subtract"):
        return _sum(i.opcode, *(_through_fusion(module, outer, fusion, n) for n in i.operands))
    if i.opcode in _SAME:
        return _through_fusion(module, outer, fusion, i.operands[0])
    return _affine(module, inner.name, name) if i.opcode == "constant" else None


def _sum(opcode: str, left: Affine | None, right: Affine | None) -> Affine | None:
    if left is None or right is None:
        return None
    if right[0] is not None:
        if opcode == "subtract" or left[0] is not None:
            return None
        left, right = right, left
    return (left[0], left[1] + (-right[1] if opcode == "subtract" else right[1]))
