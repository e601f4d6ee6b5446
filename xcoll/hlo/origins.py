"""Who put a collective into a program, and from which line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from xcoll.hlo.frames import Frames
from xcoll.hlo.reader import Collective
from xcoll.hlo.text import WRAPPERS, Instruction, Module, walk
from xcoll.hlo.written import Written, WrittenProgram
from xcoll.names import GRADIENTS_SCOPE, PLAN_SCOPE

# fmt: off
PRIMITIVES = frozenset({
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pallas_call",
    "pbroadcast", "pbroadcast_dynamic", "pmax", "pmin", "ppermute", "precv", "psend", "psum",
    "psum_invariant", "ragged_all_to_all", "reduce_scatter", "unreduced_pmax", "unreduced_pmin",
    "unreduced_psum", "unreduced_reduce_scatter", "xcoll_barrier",
    "debug_callback", "debug_print", "io_callback", "pure_callback",
})
"""Names of equations that are collectives or call the host, as they end the name of an operation.

Also with ``_start`` and ``_done``.
"""
# fmt: on

_SCOPES = frozenset({PLAN_SCOPE, GRADIENTS_SCOPE})
_RENDEZVOUS = "_xla_host_transfer_rendezvous"

_FARTHEST = 64
"""Instructions without a name or a line that are passed over in search of one that has them."""


@dataclass(frozen=True)
class Origin:
    """Where a collective comes from.

    Attributes:
      op_name: the path of JAX's name stack; empty where the compiler has kept none.
      made_by: one of `xcoll.hlo.rows.MADE_BY`.
      source: ``file:line`` of the user's code, or None.
      is_near: ``source`` is that of the nearest operation that has one.
    """

    op_name: str
    made_by: str
    source: str | None
    is_near: bool


class Origins:
    """Finds the origins of a program's collectives.

    Args:
      module: the program.
      frames: its stack frames.
      written: makes the program before compilation, where that is at hand. It is asked only for
        what the compiled one does not say.
    """

    def __init__(
        self,
        module: Module,
        frames: Frames,
        written: Callable[[], WrittenProgram] | None = None,
    ):
        self._module, self._frames = module, frames
        self._make_written = written
        self._has_manual = any("/shard_map/" in i.attributes for _, i in walk(module))
        self._users: dict[str, dict[str, list[str]]] = {}
        self._transfers: dict[str, Origin] = {}

    def of(self, collective: Collective) -> Origin:
        """Returns the origin of a collective of the program.

        The compiler's own mark decides, then the name of the operation: one that ends in a
        collective's name was written by someone, or made by differentiating what someone wrote; one
        that does not was put in by the partitioner. Where the compiler has kept no name (libtpu
        keeps none in programs of several slices), the program before compilation, the operation's
        name and those of its neighbours decide what they can.
        """
        name, computation = collective.name, collective.computation
        instruction = self._module.computations[computation].instructions[name]
        # A recv between TPU slices is the other end of a send.
        rendezvous = instruction.attribute(_RENDEZVOUS)
        if rendezvous is None:
            return self._of(collective, computation, instruction)
        if rendezvous not in self._transfers:
            self._transfers[rendezvous] = self._of(collective, computation, instruction)
        return self._transfers[rendezvous]

    def _of(self, collective: Collective, computation: str, instruction: Instruction) -> Origin:
        # What the TPU compiler has wrapped in a fusion is named by the fusion.
        place: tuple[str, Instruction] | None = computation, instruction
        while not instruction.op_name and (outer := self._outside(computation)):
            place = computation, instruction = outer
        op_name = instruction.op_name
        source, near = self._frames.source(instruction), ""
        is_near = False
        while place and not ((op_name or near) and source):
            for neighbour in self._neighbours(*place):
                near = near or neighbour.op_name
                if source is None:
                    source = self._frames.source(neighbour)
                    is_near = source is not None
                if near and source:
                    break
            place = self._outside(place[0])
        is_marked = 'is_spmd_generated="true"' in instruction.attributes
        if op_name or is_marked:
            return Origin(op_name, _made_by(op_name, is_marked), source, is_near)
        behind = self._behind(collective)
        sources = {w.source for w in behind}
        if behind and len(sources) == 1 and None not in sources:
            source, is_near = sources.pop(), False
        return Origin("", self._guess(instruction, near, behind), source, is_near)

    def _outside(self, computation: str) -> tuple[str, Instruction] | None:
        """Returns where the one fusion or asynchronous call stands that runs a computation."""
        callers = self._module.callers.get(computation, [])
        is_one = len(callers) == 1 and callers[0][1].opcode in WRAPPERS
        return callers[0][:2] if is_one else None

    def _behind(self, collective: Collective) -> list[Written]:
        """Returns what a nameless operation can be of the program before compilation."""
        if self._written is None or not self._written.is_manual:
            return []
        kind = collective.transfer or collective.kind
        return self._written.behind(kind, collective.operand_bytes)

    @cached_property
    def _written(self) -> WrittenProgram | None:
        return None if self._make_written is None else self._make_written()

    def _guess(self, instruction: Instruction, near: str, behind: list[Written]) -> str:
        """Says who made an operation whose name the compiler has dropped, where that is certain."""
        makers = {_made_by(w.op_name, False) for w in behind}
        if len(makers) == 1:
            return makers.pop()
        if not _SCOPES.isdisjoint(near.split("/")):
            return "xcoll"
        rendezvous = instruction.attribute(_RENDEZVOUS) or ""
        for name in (instruction.name, rendezvous.strip('"')):
            # XLA:GPU drops the name of what no partitioner makes, with that of its neighbours.
            is_ragged = instruction.opcode == "ragged-all-to-all"
            if is_ragged or re.sub(r"[.\d_]*$", "", name) in PRIMITIVES:
                return "differentiation" if "transpose(" in near else "user"
        return "unknown" if self._has_manual or not near else "partitioner"

    def _neighbours(self, computation: str, start: Instruction) -> Iterator[Instruction]:
        """Yields what an operation feeds and is fed by, nearest first.

        It goes on through those without a name or a line.
        """
        instructions = self._module.computations[computation].instructions
        users = self._users_in(computation)
        seen, queue = {start.name}, deque([start])
        while queue and len(seen) < _FARTHEST:
            current = queue.popleft()
            for name in (*users.get(current.name, ()), *current.operands):
                if name in seen or name not in instructions:
                    continue
                seen.add(name)
                neighbour = instructions[name]
                if neighbour.opcode in ("parameter", "constant"):
                    continue
                yield neighbour
                # What is done to an argument has its name, and no line.
                if not neighbour.op_name or self._frames.source(neighbour) is None:
                    queue.append(neighbour)

    def _users_in(self, computation: str) -> dict[str, list[str]]:
        if computation not in self._users:
            users: dict[str, list[str]] = {}
            for i in self._module.computations[computation].instructions.values():
                for operand in i.operands:
                    users.setdefault(operand, []).append(i.name)
            self._users[computation] = users
        return self._users[computation]


def _made_by(op_name: str, is_marked: bool) -> str:
    """Says who made an operation, by the path of its name.

    >>> _made_by("jit(f)/shard_map/jvp()/psum_invariant", False)
    'user'
    >>> _made_by("jit(f)/shard_map/transpose(jvp())/reduce_scatter", False)
    'differentiation'
    >>> _made_by("jit(f)/shard_map/reduce_scatter_start", False)
    'user'
    >>> _made_by("jit(f)/bsf,fd->bsd/dot_general", False)
    'partitioner'
    """
    *path, last = op_name.split("/")
    # Where XLA has made one operation of several, it writes (one:other).
    names = {re.sub("_(start|done)$", "", name.strip("()")) for name in last.split(":")}
    if is_marked:
        return "partitioner"
    if not _SCOPES.isdisjoint(path):
        return "xcoll"
    if not names & PRIMITIVES:
        return "partitioner"
    again = "rematted_computation" in path
    return "differentiation" if "transpose(" in op_name and not again else "user"
