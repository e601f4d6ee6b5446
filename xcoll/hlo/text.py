"""The text of a compiled program, as instructions by computation.

Text is the one form of a compiled program that every JAX version, backend and
compile-only device gives (``jax.stages.Compiled.as_text()``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_END = re.compile(r"\}(?:, execution_thread=.*)?\s*$")  # SparseCore runs computations of its own
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CALL = re.compile(r"\b([a-z_]+)=(?:%([\w.\-]+)|\{(%[^{}]*)\})")

WRAPPERS = ("fusion", "fusion-start", "async-start", "call-start", "custom-call-start")
"""Instructions whose computation may hold a collective that runs as they do.

A ``custom-call-start`` is what libtpu prints where the SparseCores carry out a collective.
"""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without ``%``.
      opcode: for example ``"all-reduce-start"``.
      type: its result's type, as printed.
      operands: names of the operands.
      arguments: what stands between the parentheses (for a constant or parameter, its value).
      attributes: everything after them.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    def attribute(self, key: str) -> str | None:
        """Returns the text of attribute ``key``, braces included, or None."""
        at = re.search(rf"(?<![\w\-]){re.escape(key)}=", self.attributes)
        if at is None:
            return None
        return self.attributes[at.end() : attribute_end(self.attributes, at.end())]

    @property
    def op_name(self) -> str:
        """The path of JAX's name stack, with `jax.named_scope`; empty where there is none."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    def calls(self) -> list[tuple[str, str]]:
        """Returns the computations it names, as ``(attribute, computation)``."""
        return self._calls

    @cached_property
    def _calls(self) -> list[tuple[str, str]]:
        found = []
        for key, one, several in _CALL.findall(self.attributes):
            found += [(key, name) for name in ([one] if one else _NAME.findall(several))]
        return found


@dataclass
class Computation:
    """A named list of instructions; the last of them, or the one marked, is its root."""

    name: str
    header: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def parameter(self, index: int) -> str | None:
        """Returns the name of parameter ``index``."""
        for i in self.instructions.values():
            if i.opcode == "parameter" and i.arguments.strip() == str(index):
                return i.name
        return None


@dataclass
class Module:
    """A program: computations by name, in the order they are printed."""

    header: str
    computations: dict[str, Computation]
    entry: str

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction, str]]]:
        """Where each computation is called: computation, instruction, attribute.

        An update or a done names again what its start has called, and is left out.
        """
        found: dict[str, list[tuple[str, Instruction, str]]] = {}
        for computation in self.computations.values():
            for i in computation.instructions.values():
                if i.opcode.endswith(("-update", "-done")):
                    continue
                for key, callee in i.calls():
                    found.setdefault(callee, []).append((computation.name, i, key))
        return found

    @cached_property
    def num_devices(self) -> int:
        """Number of devices that its replica groups number; of one slice on several TPU slices."""
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        total = 1
        for size in sizes:
            total *= int(size)
        return total


def walk(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    """Yields every instruction once, in the order in which the program first comes to it.

    A computation comes where the first instruction that names it stands, before that instruction;
    what the program does not reach comes last.
    """
    seen: set[str] = set()

    def visit(name: str) -> Iterator[tuple[Computation, Instruction]]:
        if name in seen or name not in module.computations:
            return
        seen.add(name)
        computation = module.computations[name]
        for i in computation.instructions.values():
            for _, callee in i.calls():
                yield from visit(callee)
            yield computation, i

    for name in (module.entry, *module.computations):
        yield from visit(name)


def program_text(program: Any) -> str:
    """Returns the text of a compiled program, or ``program`` itself where it is text.

    Raises:
      TypeError: ``program`` is neither.
    """
    if isinstance(program, str):
        return program
    as_text = getattr(program, "as_text", None)
    text = as_text() if callable(as_text) else None
    if not isinstance(text, str) or not text.startswith("HloModule"):
        raise TypeError(
            f"hlo: cannot read a {type(program).__name__}; pass a compiled program"
            " (jax.jit(f).lower(...).compile()) or its as_text()"
        )
    return text


def parse(text: str) -> Module:
    """Parses the text of a compiled program.

    Raises:
      ValueError: the text has no entry computation.
    """
    header, entry = "", ""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    pending: list[str] = []

    def flush() -> None:
        if pending and current is not None:
            root, instruction = _instruction(" ".join(pending))
            current.instructions[instruction.name] = instruction
            if root or not current.root:
                current.root = instruction.name
        pending.clear()

    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif current is None:
            if match := _HEADER.match(line):
                current = Computation(match[2], line)
                computations[current.name] = current
                entry = current.name if match[1] else entry
        elif _END.match(line):  # a kernel's metadata goes on over lines, and ends in "}}"
            flush()
            current = None
        elif _INSTRUCTION.match(line):
            flush()
            pending.append(line)
        else:  # a constant of several dimensions goes on over lines, too
            pending.append(line.strip())
    if not entry:
        raise ValueError("hlo: no ENTRY computation; pass the as_text() of a compiled program")
    return Module(header, computations, entry)


def shapes(type_text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns dtype and dimensions of every array in a type, in order; tokens are left out.

    >>> shapes("(f32[8,128]{1,0:T(8,128)}, token[], pred[])")
    (('f32', (8, 128)), ('pred', ()))
    """
    return tuple(
        (dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(type_text)
        if dtype not in ("token", "opaque")
    )


def num_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    """Returns the bytes of an array, without padding; sub-byte types are packed.

    >>> num_bytes("bf16", (3, 5)), num_bytes("s4", (3,)), num_bytes("f8e4m3fn", (7,))
    (30, 2, 7)
    """
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    for size in dims:
        bits *= size
    return -(-bits // 8)


def _instruction(line: str) -> tuple[bool, Instruction]:
    head = _INSTRUCTION.match(line)
    assert head is not None
    rest = line[head.end() - 1 :]
    opcode = _OPCODE.search(rest)
    if opcode is None:
        raise ValueError(f"hlo: cannot read the instruction {line.strip()[:200]!r}")
    end = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : end - 1]
    return bool(head[1]), Instruction(
        name=head[2],
        opcode=opcode[1],
        type=rest[: opcode.start()].strip(),
        operands=tuple(_NAME.findall(arguments)) if opcode[1] != "constant" else (),
        arguments=arguments,
        attributes=rest[end:],
    )


def _closing(text: str, start: int) -> int:
    """Returns the index after the bracket that closes the one at ``start``; strings are skipped."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]').finditer(text, start):
        if match[0] in "({[":
            depth += 1
        elif match[0] in ")}]":
            depth -= 1
            if depth == 0:
                return match.end()
    return len(text)


def attribute_end(text: str, start: int) -> int:
    """Returns where the attribute value at ``start`` ends: at a comma or bracket of its level."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]').finditer(text, start):
        if match[0] in ("(", "{", "["):
            depth += 1
        elif match[0] in (")", "}", "]"):
            depth -= 1
            if depth < 0:
                return match.start()
        elif match[0] == "," and depth == 0:
            return match.start()
    return len(text.rstrip())
