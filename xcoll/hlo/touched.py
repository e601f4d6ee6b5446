"""Bytes of memory that instructions of a compiled program read and write."""

from __future__ import annotations

import math

from xcoll.hlo.reader import KINDS
from xcoll.hlo.text import Instruction, Module, num_bytes, shapes

_VIEWS = ("bitcast", "reshape", "convert", "transpose", "copy")
_SLICES = ("slice", "dynamic-slice", "gather")
_PREFETCHES = ("copy-done", "slice-done", "dynamic-slice-done", "fusion-done", "async-done")
_FUSIONS = ("fusion", "fusion-start")
_ON_CHIP = "S(1)"  # the TPU compiler's memory space for arrays that it keeps beside the cores


class Touched:
    """What the instructions of a program read and write, worked out once each.

    An operand counts once, and the result once, except that

    * of an operand that is only sliced or gathered from, the slices count;
    * of a result that is an operand with a slice replaced (``dynamic-update-slice``, scatter), what
      is replaced counts: XLA updates in place;
    * what a fusion hands through to a collective inside it, or takes from it, counts nothing;
    * an array that the TPU compiler keeps on chip counts nothing, unless it was prefetched: then
      it counts where it is used.

    Args:
      module: the program.
      on_chip: count arrays on chip like all others.
    """

    def __init__(self, module: Module, *, on_chip: bool = False) -> None:
        self._module = module
        self._on_chip = on_chip
        self._uses: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}
        self._fused = {
            callee: (computation.name, i)
            for computation in module.computations.values()
            for i in computation.instructions.values()
            if i.opcode in _FUSIONS
            for _, callee in i.calls()
        }

    def num_bytes(self, computation: str, i: Instruction) -> int:
        """Returns the bytes that one execution reads and writes.

        Args:
          computation: name of the computation that the instruction stands in.
          i: the instruction; none that calls computations of instructions, such as a ``while``.
        """
        total = self._written(computation, i)
        # An operand that is named twice is read once.
        for name in dict.fromkeys(i.operands):
            if self._in_memory(computation, name):
                counts = [
                    self._read(computation, i, n) for n, o in enumerate(i.operands) if o == name
                ]
                arrays = shapes(self._module.computations[computation].instructions[name].type)
                size = sum(math.prod(dims) for _, dims in arrays)
                whole = sum(num_bytes(*array) for array in arrays)
                total += whole * min(sum(counts), size) // max(size, 1)
        return total

    def _in_memory(self, computation: str, name: str) -> bool:
        i = self._module.computations[computation].instructions[name]
        if self._on_chip or _ON_CHIP not in i.type:
            return True
        while i.opcode in ("bitcast", "get-tuple-element"):
            i = self._module.computations[computation].instructions[i.operands[0]]
        return i.opcode in _PREFETCHES

    def _read(self, computation: str, user: Instruction, index: int) -> int:
        """Returns how many elements of its operand ``index`` an instruction reads."""
        instructions = self._module.computations[computation].instructions
        operand = instructions[user.operands[index]]
        size = sum(math.prod(dims) for _, dims in shapes(operand.type))
        if user.opcode in _SLICES and index == 0:
            return min(size, _elements(user.type))
        if user.opcode == "dynamic-update-slice" and index == 0:
            return 0
        if user.opcode == "scatter" and index < len(user.operands) // 2:
            return min(size, _elements(instructions[user.operands[-1]].type))
        if user.opcode == "tuple" or _moves(user):
            return 0
        if user.opcode in _FUSIONS:
            callee = self._module.computations[dict(user.calls())["calls"]]
            parameter = callee.parameter(index)
            uses = self._uses_of(callee.name).get(parameter or "", [])
            return min(size, sum(self._read(callee.name, *use) for use in uses))
        if user.opcode in _VIEWS and computation in self._fused:
            while user.name == self._module.computations[computation].root:
                computation, user = self._fused[computation]
                if computation not in self._fused:
                    return size
            uses = self._uses_of(computation).get(user.name, [])
            return min(size, sum(self._read(computation, *use) for use in uses))
        return size

    def _written(self, computation: str, i: Instruction) -> int:
        instructions = self._module.computations[computation].instructions
        if i.opcode == "tuple":
            return sum(self._written(computation, instructions[name]) for name in i.operands)
        if i.opcode in _FUSIONS:
            callee = self._module.computations[dict(i.calls())["calls"]]
            return self._written(callee.name, callee.instructions[callee.root])
        if i.opcode == "parameter" or _moves(i) or (_ON_CHIP in i.type and not self._on_chip):
            return 0
        computation, source = self._source(computation, i)
        instructions = self._module.computations[computation].instructions
        if source.opcode == "dynamic-update-slice":
            update = instructions[source.operands[1]].type
        elif source.opcode == "scatter":
            update = instructions[source.operands[-1]].type
        elif source.opcode in _SLICES and _moves(instructions[source.operands[0]]):
            return 0  # an all-reduce that is carried out as a reduce-scatter
        elif _moves(source):
            return 0
        else:
            return sum(num_bytes(*array) for array in shapes(i.type))
        dtype = shapes(i.type)[0][0]
        return num_bytes(dtype, (_elements(update),))

    def _source(self, computation: str, i: Instruction) -> tuple[str, Instruction]:
        """Returns what a value is a view of, also out of a fusion in a fusion, and into one."""
        while computation in self._fused:
            if i.opcode in _VIEWS:
                i = self._module.computations[computation].instructions[i.operands[0]]
            elif i.opcode in _FUSIONS:
                callee = self._module.computations[dict(i.calls())["calls"]]
                computation, i = callee.name, callee.instructions[callee.root]
            elif i.opcode == "parameter" and self._fused[computation][0] in self._fused:
                computation, fusion = self._fused[computation]
                operand = fusion.operands[int(i.arguments)]
                i = self._module.computations[computation].instructions[operand]
            else:
                break
        return computation, i

    def _uses_of(self, computation: str) -> dict[str, list[tuple[Instruction, int]]]:
        if computation not in self._uses:
            uses: dict[str, list[tuple[Instruction, int]]] = {}
            for i in self._module.computations[computation].instructions.values():
                for n, name in enumerate(i.operands):
                    uses.setdefault(name, []).append((i, n))
            self._uses[computation] = uses
        return self._uses[computation]


def _moves(i: Instruction) -> bool:
    """Says whether an instruction is a collective, or a step of one."""
    if i.opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return True
    return i.opcode == "custom-call" and "AsyncCollective" in i.attributes


def _elements(type_text: str) -> int:
    return sum(math.prod(dims) for _, dims in shapes(type_text))
