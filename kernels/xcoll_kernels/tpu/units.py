"""How blocks lie in rows of 128 lanes, and what is done to one chunk of 128 blocks.

A payload is viewed as rows of 128 values and its codes as rows of 128 bytes: the views of a flat
array that have no padding lanes in memory. A *unit* is the fewest rows that hold whole blocks and
whole rows of codes. A *chunk* is 128 blocks, whose exponents fill one row of lanes. A chunk's rows
are handled as *planes*: plane ``i`` is row ``i`` of every unit, ``[units, 128]``, so that two
halves or quarters of a block meet by elementwise operations.

`encode` and `decode` are functions of values, without references to memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from xcoll_kernels import arithmetic, tiling

LANES = tiling.LANES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """The fewest rows that hold whole blocks and whole rows of codes.

    Attributes:
      bits: 8 or 4.
      block: elements of a block.
      rows: rows of 128 values of one unit.
      code_rows: rows of 128 bytes of codes of one unit.
      blocks: blocks of one unit.
    """

    bits: int
    block: int
    rows: int
    code_rows: int
    blocks: int

    @property
    def units(self) -> int:
        """Units of one chunk."""
        return LANES // self.blocks

    @property
    def chunk_rows(self) -> int:
        """Rows of 128 values of one chunk."""
        return self.block

    @property
    def chunk_code_rows(self) -> int:
        """Rows of 128 bytes of codes of one chunk."""
        return self.block * self.bits // 8


def unit(*, block: int, bits: int) -> Unit | str:
    """Returns how blocks of that size lie in rows, or why they cannot."""
    smallest = 32 if bits == 8 else 64
    if block < LANES:
        if block % smallest or LANES % block:
            return f"below {LANES}, TPU kernels take blocks of {smallest} or 64"
    elif block % LANES:
        return f"above {LANES}, TPU kernels take blocks of a multiple of {LANES}"
    if bits == 8:
        rows = max(block // LANES, 1)
        return Unit(bits=8, block=block, rows=rows, code_rows=rows, blocks=max(LANES // block, 1))
    if block <= LANES:
        return Unit(bits=4, block=block, rows=2, code_rows=1, blocks=2 * LANES // block)
    if block % (2 * LANES):
        return f"above {LANES}, TPU kernels take blocks of four bits of a multiple of {2 * LANES}"
    rows = block // LANES
    return Unit(bits=4, block=block, rows=rows, code_rows=rows // 2, blocks=1)


def encode(planes: Sequence[Any], u: Unit, *, limit_bits: int) -> tuple[list[Any], Any]:
    """Encodes one chunk.

    Args:
      planes: `Unit.rows` planes of float32.
      u: the unit.
      limit_bits: bits of the largest magnitude that counts as finite.

    Returns:
      `Unit.code_rows` planes of int32, and the exponents as an int32 row ``[1, 128]``.
    """
    magnitudes = [arithmetic.magnitude_bits(plane) for plane in planes]
    columns = []
    if u.blocks == 1:
        largest = magnitudes[0]
        for plane in magnitudes[1:]:
            largest = jnp.maximum(largest, plane)
        columns.append(_row_max(largest))
    else:
        segment = _lane(u) // u.block
        per_row = LANES // u.block
        for index in range(u.blocks):
            inside = segment == index % per_row
            columns.append(_row_max(jnp.where(inside, magnitudes[index // per_row], 0)))
    exponents = [
        arithmetic.finite_exponent(column, bits=u.bits, limit_bits=limit_bits) for column in columns
    ]
    codes = [
        arithmetic.code(plane, arithmetic.inverse_scale(exponent), largest <= limit_bits)
        for plane, exponent, largest in zip(
            planes, _spread(exponents, u), _spread(columns, u), strict=True
        )
    ]
    stored = [
        arithmetic.marked_exponent(exponent, column, limit_bits=limit_bits)
        for exponent, column in zip(exponents, columns, strict=True)
    ]
    return (codes if u.bits == 8 else _pack(codes, u)), _as_row(stored, u)


def decode(codes: Sequence[Any], row: Any, u: Unit, *, saturate: float) -> list[Any]:
    """Decodes one chunk: the inverse of `encode`, to planes of float32."""
    wide = list(codes) if u.bits == 8 else _unpack(codes, u)
    exponents = _spread(_as_columns(row, u), u)
    return [
        arithmetic.value(plane, exponent, saturate=saturate)
        for plane, exponent in zip(wide, exponents, strict=True)
    ]


def _lane(u: Unit) -> Any:
    return lax.broadcasted_iota(jnp.int32, (u.units, LANES), 1)


def _sublane(u: Unit) -> Any:
    return lax.broadcasted_iota(jnp.int32, (u.units, LANES), 0)


def _row_max(x: Any) -> Any:
    return jnp.max(x, axis=1, keepdims=True)


def _spread(columns: Sequence[Any], u: Unit) -> list[Any]:
    """Returns, for every plane, each lane's value of its block's column ``[units, 1]``."""
    if u.blocks == 1:
        return [columns[0]] * u.rows
    per_row = LANES // u.block
    segment = _lane(u) // u.block
    planes = []
    for plane in range(u.rows):
        spread = jnp.broadcast_to(columns[plane * per_row], (u.units, LANES))
        for index in range(1, per_row):
            spread = jnp.where(segment == index, columns[plane * per_row + index], spread)
        planes.append(spread)
    return planes


def _as_row(columns: Sequence[Any], u: Unit) -> Any:
    """Turns columns ``[units, 1]`` into one dense row ``[1, 128]``, block by block.

    A column cannot be stored without 127 lanes of padding, and a transpose of one column costs as
    much as one of 128: each value is spread over its lanes, all but the wanted one are masked out,
    and a sum over sublanes brings them into one row.
    """
    lane = _lane(u)
    spread = jnp.broadcast_to(columns[0], (u.units, LANES))
    for index in range(1, u.blocks):
        spread = jnp.where(lane % u.blocks == index, columns[index], spread)
    wanted = lane // u.blocks == _sublane(u)
    return jnp.sum(jnp.where(wanted, spread, 0), axis=0, keepdims=True, dtype=jnp.int32)


def _as_columns(row: Any, u: Unit) -> list[Any]:
    """Turns a row ``[1, 128]`` back into columns ``[units, 1]``, in the same way."""
    lane, first = _lane(u), _sublane(u) * u.blocks
    return [
        jnp.sum(jnp.where(lane == first + index, row, 0), axis=1, keepdims=True, dtype=jnp.int32)
        for index in range(u.blocks)
    ]


def _pack(codes: Sequence[Any], u: Unit) -> list[Any]:
    """Packs planes of four-bit codes, the halves of a block into one plane of bytes."""
    if u.rows > 2 or u.block == 2 * LANES:
        half = u.rows // 2
        pairs = zip(codes[:half], codes[half:], strict=True)
        return [arithmetic.packed_nibbles(low, high) for low, high in pairs]
    gathered = []
    for part in (0, 1):
        plane = None
        for first, source, shift in _moves(u, part):
            moved = pltpu.roll(codes[source], shift, 1) if shift else codes[source]
            plane = moved if plane is None else jnp.where(_lane(u) >= first, moved, plane)
        gathered.append(plane)
    return [arithmetic.packed_nibbles(*gathered)]


def _unpack(codes: Sequence[Any], u: Unit) -> list[Any]:
    """Undoes `_pack`."""
    parts = (arithmetic.low_nibble, arithmetic.high_nibble)
    if u.rows > 2 or u.block == 2 * LANES:
        return [part(plane) for part in parts for plane in codes]
    half = u.block // 2
    planes: list[Any] = [jnp.zeros((u.units, LANES), jnp.int32)] * 2
    for part, nibble in enumerate(parts):
        wide = nibble(codes[0])
        for first, target, shift in _moves(u, part):
            back = (LANES - shift) % LANES
            moved = pltpu.roll(wide, back, 1) if back else wide
            start = (first + back) % LANES
            inside = (_lane(u) >= start) & (_lane(u) < start + half)
            planes[target] = jnp.where(inside, moved, planes[target])
    return planes


def _moves(u: Unit, part: int) -> list[tuple[int, int, int]]:
    """Returns, for a unit of two rows and one row of codes, where a row of half blocks comes from.

    Args:
      u: a unit of four-bit blocks of at most 128 elements.
      part: 0 for the first halves of the blocks, 1 for the second.

    Returns:
      By rising first lane: first lane in the row of codes, plane it comes from, and by how many
      lanes that plane is rotated upwards.
    """
    half = u.block // 2
    moves = []
    for index in range(LANES // half):
        element = index * u.block + part * half  # of the unit's two rows
        first = index * half
        moves.append((first, element // LANES, (first - element) % LANES))
    return moves
