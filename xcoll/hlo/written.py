"""The collectives that a program has before it is compiled: those that someone wrote or derived.

libtpu keeps no names of operations in programs of several slices. What stood in the program before
compilation then says where its collectives come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xcoll import _compat
from xcoll.costmodel import carried_itemsize

_KINDS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "collective_permute": "collective-permute",
    "collective_broadcast": "collective-broadcast",
}
# fmt: off
_FRAME = frozenset({
    "builtin.module", "func.call", "func.func", "func.return", "sdy.manual_computation", "sdy.mesh",
    "sdy.return", "stablehlo.constant",
})
"""What may stand outside of manual computations without being divided by the partitioner."""
# fmt: on
_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
_AXIS = re.compile(r'axis_ref<name = "([^"]+)">')
_BITS = re.compile(r"(\d+)")
_MADE_OF = {
    "all-reduce": ("all-reduce", "reduce-scatter"),
    "reduce-scatter": ("reduce-scatter", "all-reduce"),
    "all-gather": ("all-gather", "all-reduce"),
}
"""Which collectives of the program a compiled one can be a part of; others only of their like."""


@dataclass(frozen=True)
class Written:
    """One collective of a program before compilation.

    Attributes:
      kind: as HLO names it.
      num_bytes: of its operands.
      dims: of the first operand.
      element: its type, as MLIR names it (``"f32"``).
      axes: mesh axes; None where its groups are written as lists.
      op_name: the path of JAX's name stack.
      source: ``file:line`` of the user's code, or None.
    """

    kind: str
    num_bytes: int
    dims: tuple[int, ...]
    element: str
    axes: frozenset[str] | None
    op_name: str
    source: str | None

    @property
    def is_complex(self) -> bool:
        """Whether a TPU sends it as two real arrays."""
        return self.element.startswith("complex")

    @property
    def itemsize(self) -> int:
        """Bytes of an element, of a complex one's half; at least one."""
        return max(1, _bits(self.element) // 8)

    def carried_bytes(self, platform: str | None) -> int:
        """Returns the operands' bytes as XLA's own collectives carry them on a platform."""
        if platform != "cpu":
            return self.num_bytes
        dtype = "bfloat16" if self.element == "bf16" else self.element.replace("f8", "float8")
        return self.num_bytes // self.itemsize * carried_itemsize(dtype, self.itemsize, platform)


class WrittenProgram:
    """The collectives of a lowered program.

    Args:
      lowered: a `jax.stages.Lowered`.
      num_axes: mesh axes of more than one device.

    Attributes:
      collectives: all of them.
      is_manual: nothing is left to the partitioner: every collective of the compiled program
        is one of these, or made of one.
    """

    def __init__(self, lowered: Any, num_axes: int):
        self.collectives: list[Written] = []
        self.is_manual = True
        for op, is_inside in _walk(lowered.compiler_ir("stablehlo").operation, num_axes):
            name = op.name
            if name.removeprefix("stablehlo.") in _KINDS:
                self.collectives.append(_written(op))
            if not is_inside and name not in _FRAME:
                self.is_manual = False

    def behind(self, kind: str, num_bytes: int) -> list[Written]:
        """Returns those that a compiled operation can be, or be a part of.

        Args:
          kind: the operation's; for a transfer between slices, that which it carries out.
          num_bytes: of its operands.
        """
        kinds = _MADE_OF.get(kind, (kind,))
        fits = [w for w in self.collectives if w.kind in kinds]
        exact = [w for w in fits if w.kind == kind and w.num_bytes == num_bytes]
        return exact or [w for w in fits if num_bytes and w.num_bytes % num_bytes == 0] or fits


def _walk(op: Any, num_axes: int, is_inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yields all operations, and whether they stand where all axes of the mesh are manual."""
    yield op, is_inside
    if op.name == "sdy.manual_computation":
        manual = re.findall(r'"[^"]+"', str(op.attributes["manual_axes"]))
        is_inside = is_inside or len(manual) >= num_axes
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation, num_axes, is_inside)


def _written(op: Any) -> Written:
    location = str(op.location)
    name = re.match(r'loc\("([^"]*)"', location)
    places = ((file, line) for file, line in _PLACE.findall(location) if _compat.is_users(file))
    found = next(places, None)
    return Written(
        kind=_KINDS[op.name.removeprefix("stablehlo.")],
        num_bytes=sum(_bytes(operand.type) for operand in op.operands),
        dims=tuple(op.operands[0].type.shape),
        element=str(op.operands[0].type.element_type),
        axes=_axes(op),
        op_name=name[1] if name else "",
        source=f"{found[0]}:{found[1]}" if found else None,
    )


def _axes(op: Any) -> frozenset[str] | None:
    if "replica_groups" not in op.attributes:
        return None
    return frozenset(_AXIS.findall(str(op.attributes["replica_groups"]))) or None


def _bytes(tensor: Any) -> int:
    element = str(tensor.element_type)
    bits = _bits(element) * (2 if element.startswith("complex") else 1)
    for size in tensor.shape:
        bits *= size
    return -(-bits // 8)


def _bits(element: str) -> int:
    """Returns the bits of an element, of a complex one's half."""
    return 8 if element == "i1" else int(_BITS.search(element)[1])  # type: ignore[index]
