"""Where the values of a compiled program go."""

from __future__ import annotations

import heapq
import math
import re

from xcoll.hlo.text import Computation, Instruction, Module, shapes

# fmt: off
_LAYOUT = frozenset({
    "bitcast", "broadcast", "concatenate", "copy", "get-tuple-element", "optimization-barrier",
    "reshape", "slice", "transpose", "tuple",
})
POINTWISE = frozenset({
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

_USER_LAYOUT = frozenset({
    "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad", "reshape", "rev", "slice",
    "split", "squeeze", "transpose",
})
"""Ends of names of operations that a user wrote, and that may need another sharding."""
# fmt: on

RESULT = ""
"""Stands for what a computation returns, where the name of an instruction may."""

ASYNC = re.compile(r"-(start|update|done)$")


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
        sites = self.module.callers.get(computation, [])
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
        opcode = ASYNC.sub("", i.opcode)
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
            return self.num_elements(computation, i.operands[0]) == num_elements(i.type)
        if opcode in _LAYOUT:
            return i.op_name.rpartition("/")[2] not in _USER_LAYOUT
        return opcode in POINTWISE

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
            if not self.is_pointwise(computation, i) or any(
                self.num_elements(computation, other) > 1 for other in others
            ):
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

    def loop(self, body: str) -> tuple[str, Instruction] | None:
        """Returns the one loop that a computation is the body of, and where that stands."""
        sites = self.module.callers.get(body, [])
        if len(sites) != 1 or sites[0][2] != "body":
            return None
        return sites[0][0], sites[0][1]

    def num_elements(self, computation: str, name: str) -> int:
        """Returns the elements of a value, over all parts of it."""
        return num_elements(self.module.computations[computation].instructions[name].type)


def num_elements(type_text: str) -> int:
    """Returns the elements of a type, over all parts of it."""
    return sum(math.prod(dims) for _, dims in shapes(type_text))
