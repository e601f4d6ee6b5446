"""A compiled program's text without what does not change what it does."""

from __future__ import annotations

import math
import re
from typing import Any

from xcoll.hlo.text import Computation, Instruction, Module, attribute_end, parse, program_text

# Where the program came from, and hashes over that.
_DROPPED = ("metadata", "original_value", "fingerprint_before_lhs")
# Names that pair operations with each other; only which are equal matters.
_PAIRING = re.compile(
    r"\b(channel_id|chain_id|_xla_host_transfer_rendezvous|MegascaleRendezvousKeyName)"
    r'=("?)([^",}]*)\2'
)


def canonical(program: Any) -> str:
    """Returns the text of a compiled program after canonical renaming.

    Two programs with the same canonical text do the same, instruction by instruction in the same
    order. Computations are written in the order in which the program reaches them, they and their
    instructions numbered; metadata, stack frames, source tables, the module's name and
    fingerprints are left out; channels and rendezvous are numbered in order of appearance.

    Args:
      program: a compiled program (``jax.jit(f).lower(...).compile()``) or its ``as_text()``.

    Raises:
      TypeError: ``program`` is neither.
      ValueError: the text is not that of a compiled program.

    Example:
      >>> one = '''HloModule jit_f
      ... ENTRY %main.1 (x: f32[8]) -> f32[8] {
      ...   %x = f32[8]{0} parameter(0), metadata={op_name="x"}
      ...   ROOT %neg.7 = f32[8]{0} negate(%x), metadata={op_name="jit(f)/neg" stack_frame_id=3}
      ... }'''
      >>> print(canonical(one))
      HloModule
      ENTRY %c0 {
        %c0.0 = f32[8]{0} parameter(0)
        ROOT %c0.1 = f32[8]{0} negate(%c0.0)
      }
    """
    module = parse(program_text(program))
    order = _reached(module)
    names = {name: f"c{number}" for number, name in enumerate(order)}
    numbers: dict[tuple[str, str], str] = {}
    header = _clean(re.sub(r"^HloModule [^,\s]+", "HloModule", module.header), numbers)
    lines = [re.sub(r",? ?frontend_attributes=\{\}", "", header)]
    for name in order:
        entry = "ENTRY " if name == module.entry else ""
        lines.append(f"{entry}%{names[name]} {{")
        lines += _body(module.computations[name], names, numbers)
        lines.append("}")
    return "\n".join(lines)


def _reached(module: Module) -> list[str]:
    """Returns all computations, those that the program reaches first, in that order."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in order or name not in module.computations:
            return
        order[name] = None
        for i in module.computations[name].instructions.values():
            for _, callee in i.calls():
                visit(callee)

    visit(module.entry)
    for name in module.computations:
        visit(name)
    return list(order)


def _body(
    computation: Computation, names: dict[str, str], numbers: dict[tuple[str, str], str]
) -> list[str]:
    prefix = names[computation.name]
    # Parameters first: where they are printed among the others has no meaning, and varies.
    ordered = sorted(computation.instructions.values(), key=_parameter_number)
    local = {i.name: f"{prefix}.{number}" for number, i in enumerate(ordered)}

    def renamed(match: re.Match[str]) -> str:
        return "%" + local.get(match[1], names.get(match[1], match[1]))

    lines = []
    for i in ordered:
        root = "ROOT " if i.name == computation.root else ""
        attributes = re.sub(r"%([\w.\-]+)", renamed, _clean(i.attributes, numbers))
        arguments = re.sub(r"%([\w.\-]+)", renamed, i.arguments)
        lines.append(f"  {root}%{local[i.name]} = {i.type} {i.opcode}({arguments}){attributes}")
    return lines


def _parameter_number(i: Instruction) -> float:
    return int(i.arguments) if i.opcode == "parameter" else math.inf


def _clean(attributes: str, numbers: dict[tuple[str, str], str]) -> str:
    for key in _DROPPED:
        while at := re.search(rf"(?:, ?|(?<=\{{)){key}=", attributes):
            end = attribute_end(attributes, at.end())
            attributes = (attributes[: at.start()] + attributes[end:]).replace("{, ", "{")

    def numbered(match: re.Match[str]) -> str:
        known = sum(key == match[1] for key, _ in numbers)
        number = numbers.setdefault((match[1], match[3]), str(known))
        return f"{match[1]}={match[2]}{number}{match[2]}"

    attributes = _PAIRING.sub(numbered, attributes)
    return re.sub(r", frontend_attributes=\{\}", "", attributes)
