"""How large libtpu may make the operand of a collective: arrays are stored in tiles.

The two inner dimensions, in an order that the compiler chooses, are rounded up to tiles of up to
8 rows of 128 32-bit words. What is sent is what is stored.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from xcoll.hlo.written import Written

_LANES = 128


def is_stored_in(
    num_bytes: int,
    written: Written,
    part_bytes: int,
    parts: Sequence[int],
    slots: Sequence[int],
    copies: int,
) -> bool:
    """Whether libtpu may store a part of an operand of the program in so many bytes.

    Args:
      num_bytes: what was emitted.
      written: the collective of the program.
      part_bytes: what was planned, without padding: the operand itself, a share, or several.
      parts: numbers of shares that it may be cut into, and of its copies.
      slots: by which a dimension may be cut in two.
      copies: of the part, side by side.
    """
    size = written.itemsize
    for shape in (written.dims, (*written.dims, 2)) if written.is_complex else (written.dims,):
        elements = math.prod(shape)
        for number in parts:
            if part_bytes == -(-elements // number) * size:
                stored = _shares(shape, number, copies, size, slots)
            elif written.kind == "all-gather" and part_bytes == elements * number * size:
                stored = _sizes((copies * number, *shape), size, slots)
            else:
                continue
            if num_bytes == copies * part_bytes or num_bytes in stored:
                return True
    return False


def is_rounded_to(num_bytes: int, written: Written, part_bytes: int, ranks: int) -> bool:
    """Whether libtpu may scatter an operand of the program with so many bytes.

    Where one of its dimensions is scattered, each share is rounded up to 16 rows, and may have 16
    more.

    Args:
      num_bytes: what was emitted.
      written: the collective of the program.
      part_bytes: what was planned: the whole operand.
      ranks: shares.
    """
    if part_bytes != written.num_bytes:
        return False
    # A dimension that counts shares is joined with the next.
    for dim in (*written.dims, *map(operator.mul, written.dims, written.dims[1:])):
        if dim and dim % ranks == 0:
            share = dim // ranks
            for rows in (_up(share, 16), _up(share, 16) + 16):
                if num_bytes == part_bytes // share * rows:
                    return True
    return False


def _shares(
    shape: tuple[int, ...], number: int, copies: int, itemsize: int, slots: Sequence[int]
) -> Iterator[int]:
    """Yields the sizes of one of so many shares of an array: of a dimension, or of its tiles."""
    for i, dim in enumerate(shape):
        if dim % number == 0:
            share = (*shape[:i], dim // number, *shape[i + 1 :])
            yield from _sizes((copies, *share), itemsize, slots)
    yield from _sizes((copies, -(-math.prod(shape) // number)), itemsize, ())
    yield from _sizes((copies * -(-math.prod(shape) // number),), itemsize, ())
    for rows in _rows(itemsize):
        tile = rows * _LANES * itemsize
        for whole in _stored(shape, itemsize, rows):
            yield copies * tile * -(-whole // (tile * number))


def _sizes(shape: tuple[int, ...], itemsize: int, slots: Sequence[int]) -> Iterator[int]:
    """Yields the bytes in which an array may be stored, whole or with a dimension cut in two."""
    cut = [
        (*shape[:i], number, dim // number, *shape[i + 1 :])
        for i, dim in enumerate(shape)
        for number in slots
        if dim % number == 0
    ]
    for rows in _rows(itemsize):
        # In one dimension, a tile is as many elements in a row.
        yield _up(math.prod(shape), rows * _LANES) * itemsize
        for view in (shape, *cut):
            yield from _stored(view, itemsize, rows)


def _rows(itemsize: int) -> list[int]:
    """Returns the rows that a tile may have: 1, 2, 4 or 8 of 32-bit words."""
    return [n * max(1, 4 // itemsize) for n in (1, 2, 4, 8)]


def _stored(shape: tuple[int, ...], itemsize: int, rows: int) -> Iterator[int]:
    """Yields the bytes of an array, any two dimensions being the inner ones of tiles."""
    dims = (1, *shape)
    for i in range(len(dims)):
        for j in range(len(dims)):
            if i != j:
                outer = math.prod(dim for k, dim in enumerate(dims) if k not in (i, j))
                inner = _up(dims[i], rows) * _up(dims[j], _LANES)
                yield outer * inner * itemsize


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
