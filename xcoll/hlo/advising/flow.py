"""Where a value of a compiled program comes from, and where it goes."""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass

from xcoll.hlo.loops import trip_count
from xcoll.hlo.text import Computation, Instruction, Module, shapes

# fmt: off
_LAYOUT = frozenset({
    "bitcast", "broadcast", "concatenate", "copy", "get-tuple-element", "optimization-barrier",
    "reshape", "slice", "transpose", "tuple",
})
_POINTWISE = frozenset({
    "abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "constant",
    "convert", "cosine", "divide", "erf", "exponential", "exponential-minus-one", "floor", "iota",
    "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate",
    "not", "or", "parameter", "partition-id", "power", "reduce-precision", "remainder",
    "replica-id", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan",
    "tanh", "xor",
})
MOVES = _LAYOUT | {"constant", "convert", "dynamic-slice", "iota", "parameter"}
"""Operations that hand elements on, in another place or dtype."""
# fmt: on

# fmt: off
_USER_LAYOUT = frozenset({
    "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad", "reshape", "rev", "slice",
    "split", "squeeze", "transpose",
})
# fmt: on
"""Ends of names of operations that a user wrote, and that may need another sharding."""

RESULT = ""
"""Stands for what a computation returns, where the name of an instruction may."""

_ASYNC = re.compile(r"-(start|update|done)$")


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


class Flow:
    """Follows values through a program.

    Args:
      module: the program.
    """

    def __init__(self, module: Module):
        self.module = module
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self._orders: dict[str, dict[str, int]] = {}
        self._only: dict[tuple[str, bool], bool] = {}
        self._callers: dict[str, list[tuple[str, Instruction, str]]] = {}
        for computation in module.computations.values():
            for i in computation.instructions.values():
                if not i.opcode.endswith(("-update", "-done")):
                    for key, callee in i.calls():
                        self._callers.setdefault(callee, []).append((computation.name, i, key))

    def users(self, computation: str, name: str) -> list[Instruction]:
        """Returns the instructions that have ``name`` as an operand."""
        if computation not in self._users:
            found: dict[str, list[Instruction]] = {}
            for i in self.module.computations[computation].instructions.values():
                for operand in dict.fromkeys(i.operands):
                    found.setdefault(operand, []).append(i)
            self._users[computation] = found
        return self._users[computation].get(name, [])

    def called(self, i: Instruction) -> Computation:
        """Returns the computation of a fusion."""
        return self.module.computations[dict(i.calls())["calls"]]

    def fusion(self, computation: str) -> tuple[str, str] | None:
        """Returns where the one fusion stands that calls a computation, and its name."""
        sites = self._callers.get(computation, [])
        if len(sites) != 1 or sites[0][1].opcode != "fusion":
            return None
        return sites[0][0], sites[0][1].name

    def is_move(self, computation: str, i: Instruction) -> bool:
        """Whether an instruction only hands elements on, some of them, or as another dtype."""
        return self._is_only(computation, i, is_wide=False)

    def is_pointwise(self, computation: str, i: Instruction) -> bool:
        """Whether each element of a result depends on one of each operand, in any sharding.

        What changes the layout counts where the compiler has put it in.
        """
        return self._is_only(computation, i, is_wide=True)

    def _is_only(self, computation: str, i: Instruction, *, is_wide: bool) -> bool:
        opcode = _ASYNC.sub("", i.opcode)
        if opcode == "fusion":
            if i.opcode.endswith("-done"):
                return True  # its start has been looked at
            inner = self.called(i)
            if (inner.name, is_wide) not in self._only:
                self._only[inner.name, is_wide] = all(
                    self._is_only(inner.name, j, is_wide=is_wide)
                    for j in inner.instructions.values()
                )
            return self._only[inner.name, is_wide]
        if not is_wide:
            return opcode in MOVES
        if opcode == "reduce":  # libtpu reshards with a dimension of size 1, and then drops it
            return self._num_elements(computation, i.operands[0]) == _num_elements(i.type)
        if opcode in _LAYOUT:
            return i.op_name.rpartition("/")[2] not in _USER_LAYOUT
        return opcode in _POINTWISE

    def ends(self, computation: str, name: str) -> set[str]:
        """Returns what a value gets to by pointwise operations on nothing but it and scalars.

        Returns:
          Names of the first instructions that are none, and `RESULT` where it is what the
          computation returns, or a part of that.
        """
        root = self.module.computations[computation].root
        order = self._order(computation)
        made, ends = {name}, set[str]()
        # In program order, so that what makes an operand has been seen before its users.
        left = [(order[user.name], user) for user in self.users(computation, name)]
        heapq.heapify(left)
        while left:
            _, i = heapq.heappop(left)
            if i.name in made or i.name in ends:
                continue
            others = () if i.opcode == "tuple" else set(i.operands) - made
            is_alone = all(self._num_elements(computation, other) <= 1 for other in others)
            if not is_alone or not self.is_pointwise(computation, i):
                ends.add(i.name)
                continue
            made.add(i.name)
            for user in self.users(computation, i.name):
                heapq.heappush(left, (order[user.name], user))
        return ends | ({RESULT} if root in made else set())

    def _order(self, computation: str) -> dict[str, int]:
        if computation not in self._orders:
            names = self.module.computations[computation].instructions
            self._orders[computation] = {name: number for number, name in enumerate(names)}
        return self._orders[computation]

    def leaves(self, computation: str, names: list[str]) -> set[tuple[int, int | None]] | None:
        """Returns the parameters that values are made from by moves alone, else None.

        Each as its number, and of a tuple which element (else None).
        """
        instructions = self.module.computations[computation].instructions
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
            elif not self.is_move(computation, i):
                return None
            left += [name for name in operands if name not in seen]
            seen |= set(operands)
        return found

    def origin(self, computation: str, name: str) -> Origin | None:
        """Returns what a value of a loop's body is made from, if it is equal in every iteration.

        The loops that count are those from the innermost outwards in which it is.

        Returns:
          None where no loop makes it again, or where it is made from anything but the program's
          arguments (and constants), or in another way than by `MOVES`.
        """
        names = [name]
        repeats: int | None = 1
        loop, is_equal = "", True
        while computation != self.module.entry:
            leaves = self.leaves(computation, names)
            site = self._callers.get(computation, [])
            if not leaves or len(site) != 1:
                return None
            ((caller, i, key),) = site
            if i.opcode == "while" and key == "body":
                varying = {n for n in leaves if not self._is_kept(computation, n)}
                if any(self._size(computation, n) > 1 for n in varying):
                    return None  # not an argument, or a part of one
                is_equal = is_equal and not varying
                if is_equal:
                    trips = trip_count(self.module, caller, i)
                    repeats = repeats * trips if repeats is not None and trips is not None else None
                    loop = loop or i.name
                started = self._started(caller, i)
                if started is None:
                    return None
                names = [started[index] for _, index in leaves - varying if index is not None]
            elif key == "calls" and all(index is None for _, index in leaves):
                names = [i.operands[number] for number, _ in leaves]
            else:
                return None
            computation = caller
        leaves = self.leaves(computation, names)
        if not leaves or not loop:
            return None
        entry = self.module.computations[computation]
        parameters = [entry.parameter(number) for number, _ in sorted(leaves, key=str)]
        arguments = [
            entry.instructions[p].op_name.replace("\\'", "'") or p for p in parameters if p
        ]
        return Origin(arguments=tuple(arguments), repeats=repeats, loop=loop)

    def _is_kept(self, body: str, leaf: tuple[int, int | None]) -> bool:
        """Whether an element of a loop's state is handed on as it is."""
        root = self.module.computations[body].instructions[self.module.computations[body].root]
        index = leaf[1]
        if root.opcode != "tuple" or index is None:
            return False
        at = self.module.computations[body].instructions[root.operands[index]]
        while at.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            at = self.module.computations[body].instructions[at.operands[0]]
        return at.opcode == "get-tuple-element" and self.leaves(body, [at.name]) == {leaf}

    def _size(self, body: str, leaf: tuple[int, int | None]) -> float:
        """Returns the elements of a part of a loop's state."""
        parameter = self.module.computations[body].parameter(leaf[0])
        for i in self.users(body, parameter or ""):
            if i.opcode == "get-tuple-element" and i.attribute("index") == str(leaf[1]):
                return _num_elements(i.type)
        return math.inf

    def _num_elements(self, computation: str, name: str) -> int:
        return _num_elements(self.module.computations[computation].instructions[name].type)

    def _started(self, caller: str, loop: Instruction) -> tuple[str, ...] | None:
        """Returns the names of the elements with which a loop's state starts."""
        instructions = self.module.computations[caller].instructions
        state = instructions[loop.operands[0]]
        while state.opcode in ("optimization-barrier", "copy"):
            state = instructions[state.operands[0]]
        return state.operands if state.opcode == "tuple" else None


def argument(parameter: Instruction) -> str:
    """Returns how JAX names an argument of the program (``"params['w1']"``), or its name in it."""
    return parameter.op_name.replace("\\'", "'") or parameter.name


def _num_elements(type_text: str) -> int:
    return sum(math.prod(dims) for _, dims in shapes(type_text))
