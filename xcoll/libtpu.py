"""What libtpu makes of XLA's collectives: reduce-scatters undone, transfers between slices.

Read off programs that libtpu compiled ahead of time for v5e, v5p, v6e and tpu7x
(``tests/test_aot_native.py`` repeats it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xcoll.topology import Digit

# A complex operand is sent as two of float32; only an all-reduce between slices scatters it.
_SCATTERED = ("float32", "bfloat16", "complex64")
_TILE = 1024
_TWO_TILES, _FOUR_TILES = 2 * _TILE, 4 * _TILE


def between_slices(digit: Digit) -> bool:
    """Whether a level connects slices, rather than the chips of one or their cores."""
    link = digit.level.link
    return link.network == "switch" and link.kind != "core"


def cannot(collective: str, dtype: str) -> str | None:
    """Returns why XLA:TPU cannot compile its own collective, or None."""
    if collective == "reduce_scatter" and dtype.startswith("complex"):
        return f"XLA:TPU has no reduce-scatter of {dtype}"
    return None


def undone(dtype: str, digits: tuple[Digit, ...], share_elements: int) -> str | None:
    """Returns why XLA:TPU's reduce-scatter becomes an all-reduce of the same operand, or None.

    Args:
      dtype: of the operand.
      digits: the levels its ranks lie on; none, where they are not known.
      share_elements: elements that each rank keeps.
    """
    across = [between_slices(digit) for digit in digits]
    if across and all(across):
        return None
    if any(across):
        return "XLA:TPU turns a reduce-scatter inside slices and between them into an all-reduce"
    if dtype not in _SCATTERED:
        return f"XLA:TPU turns a reduce-scatter of {dtype} into an all-reduce"
    if share_elements < _FOUR_TILES or share_elements % _TILE:
        # Two and three tiles are kept on some slices, or kept with permutes after them.
        return (
            f"XLA:TPU turns a reduce-scatter to {share_elements} elements, no whole (8, 128)"
            " tiles or under four, into an all-reduce"
        )
    return None


def operands_of(part: Part, dtype: str) -> int:
    """Returns in how many operations of its own XLA:TPU sends a part: complex numbers in two.

    All-reduces that do not go between slices are combined into one again.
    """
    if not dtype.startswith("complex"):
        return 1
    is_between = part.digits != () and all(map(between_slices, part.digits))
    return 1 if part.kind == "all-reduce" and not is_between else 2


@dataclass(frozen=True)
class Part:
    """One operation that XLA's collective becomes.

    Attributes:
      kind: its HLO name.
      num_bytes: bytes of the operand on each rank.
      digits: the levels it acts over; none stands for all ranks of the span.
    """

    kind: str
    num_bytes: int
    digits: tuple[Digit, ...] = ()


def parts(
    kind: str,
    digits: tuple[Digit, ...],
    shape: tuple[int, ...],
    itemsize: int,
    dtype: str,
) -> tuple[Part, ...]:
    """Returns what libtpu makes of one collective.

    Between slices, an all-reduce is a reduce-scatter inside each, an exchange of the shares and an
    all-gather inside, or two all-reduces where the operand is small and no dimension of it divides
    among the ranks inside; an all-gather gathers between the slices first; a reduce-scatter is an
    all-reduce inside, and scatters the rank's share of it between them. All else stays one
    operation.

    Shares that do not divide are rounded up to elements; libtpu pads them further, by its tiles.
    An all-reduce inside may also be chosen for large operands whose shape does not suit it, and a
    reduce-scatter over all of a slice of more than eight chips is undone: not counted.

    Args:
      kind: HLO name.
      digits: the levels its ranks lie on, innermost first.
      shape: of the operand, on each rank.
      itemsize: bytes of an element.
      dtype: of the operand.
    """
    num_elements = math.prod(shape)
    num_bytes = num_elements * itemsize
    inside = tuple(digit for digit in digits if not between_slices(digit))
    across = tuple(digit for digit in digits if between_slices(digit))
    size = math.prod(digit.level.size for digit in inside)
    share = -(-num_elements // size)
    if kind == "reduce-scatter" and not across and undone(dtype, inside, share):
        return (Part("all-reduce", num_bytes, digits),)
    if not inside or not across or kind not in ("all-reduce", "reduce-scatter", "all-gather"):
        return (Part(kind, num_bytes, digits),)
    if kind == "all-gather":
        slices = math.prod(digit.level.size for digit in across)
        return Part(kind, num_bytes, across), Part(kind, slices * num_bytes, inside)
    scatter = "all-reduce" if undone(dtype, inside, share) else "reduce-scatter"
    if kind == "reduce-scatter":
        # Only where slices vary fastest do the shares inside them lie together.
        is_together = max(d.stride for d in across) < min(d.stride for d in inside)
        first = Part(scatter if is_together else "all-reduce", num_bytes, inside)
        return first, Part(kind, share * itemsize, across)
    # A small operand is cut along a dimension only, and only where it has two.
    dims = [dim for dim in shape if dim > 1]
    is_cut = len(dims) > 1 and any(dim % size == 0 for dim in dims)
    if not is_cut and share < _TWO_TILES:
        return Part(kind, num_bytes, inside), Part(kind, num_bytes, across)
    return (
        Part(scatter, num_bytes, inside),
        Part(kind, share * itemsize, across),
        Part("all-gather", share * itemsize, inside),
    )
