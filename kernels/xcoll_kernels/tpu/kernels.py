"""The bodies of the TPU kernels: one tile of rows of 128 lanes, chunk by chunk.

Codes are bytes, and a strided access to rows of packed bytes does not exist: codes are widened
to int32 in scratch memory first, and read from there plane by plane.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from xcoll_kernels import arithmetic
from xcoll_kernels.tpu import units


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a kernel is specialised to.

    Attributes:
      unit: how blocks lie in rows.
      chunks: chunks of 128 blocks, and so rows of exponents, of a tile.
      limit: largest magnitude that counts as finite in an encoded block.
      saturate: largest magnitude of a decoded value.
    """

    unit: units.Unit
    chunks: int
    limit: float = 0.0
    saturate: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of 128 values."""
        return self.chunks * self.unit.chunk_rows

    @property
    def code_rows(self) -> int:
        """Rows of 128 bytes of codes."""
        return self.chunks * self.unit.chunk_code_rows


def quantize(
    x: Any, codes: Any, exponents: Any, values: Any, wide: Any, rows: Any, *, tile: Tile
) -> None:
    """Encodes a tile; ``values``, ``wide`` and ``rows`` are scratch, as everywhere below."""

    def chunk(index: Any) -> None:
        _encode(_load_values(x, values, index, tile), codes, wide, rows, index, tile)

    _for_each(tile, chunk)
    exponents[...] = rows[...].astype(exponents.dtype)


def dequantize(codes: Any, exponents: Any, out: Any, wide: Any, rows: Any, *, tile: Tile) -> None:
    """Decodes a tile."""
    rows[...] = exponents[...].astype(jnp.int32)
    u = tile.unit

    def chunk(index: Any) -> None:
        for plane, value in enumerate(_decode(codes, wide, rows, index, tile)):
            out[pl.ds(index * u.chunk_rows + plane, u.units, stride=u.rows), :] = value

    _for_each(tile, chunk)


def accumulate_and_quantize(
    x: Any,
    codes: Any,
    exponents: Any,
    out_codes: Any,
    out_exponents: Any,
    values: Any,
    wide: Any,
    rows: Any,
    *,
    tile: Tile,
) -> None:
    """Adds a decoded tile to ``x`` and encodes the sum."""
    rows[...] = exponents[...].astype(jnp.int32)

    def chunk(index: Any) -> None:
        decoded = _decode(codes, wide, rows, index, tile)
        own = _load_values(x, values, index, tile)
        total = [arithmetic.flushed(a) + b for a, b in zip(own, decoded, strict=True)]
        _encode(total, out_codes, wide, rows, index, tile)

    _for_each(tile, chunk)
    out_exponents[...] = rows[...].astype(out_exponents.dtype)


def reduce_and_quantize(
    codes: Any,
    exponents: Any,
    out_codes: Any,
    out_exponents: Any,
    total: Any,
    wide: Any,
    rows: Any,
    *,
    tile: Tile,
) -> None:
    """Adds one rank's decoded tile to ``total``, which stays in scratch; the last one encodes.

    The grid goes over ranks inside tiles, so that each contribution is read once and the sum is
    written once. ``total`` keeps the planes of a chunk one after another.
    """
    rank, u = pl.program_id(1), tile.unit
    rows[...] = exponents[0].astype(jnp.int32)

    def place(index: Any, plane: int) -> Any:
        return pl.ds(pl.multiple_of(index * u.chunk_rows + plane * u.units, 8), u.units)

    def first(index: Any) -> None:
        for plane, value in enumerate(_decode(codes.at[0], wide, rows, index, tile)):
            total[place(index, plane), :] = value

    def later(index: Any) -> None:
        for plane, value in enumerate(_decode(codes.at[0], wide, rows, index, tile)):
            total[place(index, plane), :] = total[place(index, plane), :] + value

    def last(index: Any) -> None:
        planes = [total[place(index, plane), :] for plane in range(u.rows)]
        _encode(planes, out_codes, wide, rows, index, tile)

    @pl.when(rank == 0)
    def _() -> None:
        _for_each(tile, first)

    @pl.when(rank > 0)
    def _() -> None:
        _for_each(tile, later)

    @pl.when(rank == pl.num_programs(1) - 1)
    def _() -> None:
        _for_each(tile, last)
        out_exponents[...] = rows[...].astype(out_exponents.dtype)


def _for_each(tile: Tile, chunk: Callable[[Any], None]) -> None:
    # Bounds of int32 whatever jax_enable_x64 says: there is no int64 in a kernel.
    lax.fori_loop(np.int32(0), np.int32(tile.chunks), lambda index, _: chunk(index), None)


def _load_values(x: Any, values: Any, index: Any, tile: Tile) -> list[Any]:
    """Returns a chunk's planes of float32."""
    u = tile.unit
    start: Any = pl.multiple_of(index * u.chunk_rows, 32)
    if x.dtype != jnp.float32:
        chunk = x[pl.ds(start, u.chunk_rows), :]
        values[...] = (
            arithmetic.float16_value(chunk) if x.dtype == jnp.int16 else chunk.astype(jnp.float32)
        )
        x, start = values, 0
    return [x[pl.ds(start + plane, u.units, stride=u.rows), :] for plane in range(u.rows)]


def _decode(codes: Any, wide: Any, rows: Any, index: Any, tile: Tile) -> list[Any]:
    u = tile.unit
    start = pl.multiple_of(index * u.chunk_code_rows, 32)
    wide[...] = codes[pl.ds(start, u.chunk_code_rows), :].astype(jnp.int32)
    planes = [wide[pl.ds(plane, u.units, stride=u.code_rows), :] for plane in range(u.code_rows)]
    return units.decode(planes, rows[pl.ds(index, 1), :], u, saturate=tile.saturate)


def _encode(planes: list[Any], codes: Any, wide: Any, rows: Any, index: Any, tile: Tile) -> None:
    u = tile.unit
    limit_bits = arithmetic.bits_of(tile.limit)
    encoded, rows[pl.ds(index, 1), :] = units.encode(planes, u, limit_bits=limit_bits)
    for plane, code in enumerate(encoded):
        wide[pl.ds(plane, u.units, stride=u.code_rows), :] = code
    start = pl.multiple_of(index * u.chunk_code_rows, 32)
    codes[pl.ds(start, u.chunk_code_rows), :] = wide[...].astype(jnp.int8)
