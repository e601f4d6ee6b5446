"""What a tile looks like on the wire: as it is, or as int8 codes with an exponent a row.

A wire is given a tile's refs in VMEM and reads or writes them a group of rows at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xcoll_kernels import arithmetic
from xcoll_kernels.tpu.ring_layout import BLOCK

LANES = 128

Parts = tuple[tuple[tuple[int, int], Any], ...]


class Wire(Protocol):
    """A form of tiles on the wire; ``suffix`` tells kernels apart by name."""

    suffix: ClassVar[str]

    def parts(self, tile_rows: int) -> Parts:
        """Returns shape and dtype of each array that one tile is sent as."""
        ...

    def write(self, value_of: Callable[[pl.Slice], jax.Array], refs: Sequence[Any]) -> None:
        """Writes a tile whose rows ``value_of`` gives as float32 ``[rows, BLOCK]``."""
        ...

    def values(self, refs: Sequence[Any]) -> Callable[[pl.Slice], jax.Array]:
        """Returns what gives any group of a tile's rows as float32, as `write` asks for them."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainWire:
    """Tiles in the payload's dtype; sums are rounded to it, to nearest even, at each hop."""

    suffix: ClassVar[str] = ""
    dtype: Any

    def parts(self, tile_rows: int) -> Parts:
        """As `Wire.parts`: one array."""
        return (((tile_rows, BLOCK), self.dtype),)

    def write(self, value_of: Callable[[pl.Slice], jax.Array], refs: Sequence[Any]) -> None:
        """As `Wire.write`."""
        for rows in groups(refs[0].shape[0]):
            refs[0][rows, :] = value_of(rows).astype(self.dtype)

    def values(self, refs: Sequence[Any]) -> Callable[[pl.Slice], jax.Array]:
        """As `Wire.values`."""
        return lambda rows: refs[0][rows, :].astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Wire:
    """Int8 codes, a power-of-two scale a row: ``kernels/xcoll_kernels/arithmetic.py`` in VMEM.

    A row's exponent comes out of the reduction down a column, one a sublane. On the wire it takes
    a byte: that of row ``128 * k + lane`` is byte ``k`` of that lane of one int32 row. The way
    between the two is a sum over a masked 128 x 128 square, which needs no relayout of vectors.

    Attributes:
      limit: largest float32 that counts as finite: that rounds to a finite payload value.
      saturate: largest finite value of the payload's dtype.
    """

    suffix: ClassVar[str] = "_int8"
    limit: float
    saturate: float

    def parts(self, tile_rows: int) -> Parts:
        """As `Wire.parts`: codes, then exponents."""
        return ((tile_rows, BLOCK), jnp.int8), ((1, LANES), jnp.int32)

    def write(self, value_of: Callable[[pl.Slice], jax.Array], refs: Sequence[Any]) -> None:
        """As `Wire.write`."""
        limit_bits = arithmetic.bits_of(self.limit)
        packed = jnp.zeros((1, LANES), jnp.int32)
        for k, rows in enumerate(groups(refs[0].shape[0])):
            value = value_of(rows)
            largest = jnp.max(arithmetic.magnitude_bits(value), axis=1, keepdims=True)
            exponent = arithmetic.finite_exponent(largest, bits=8, limit_bits=limit_bits)
            finite = largest <= limit_bits
            codes = arithmetic.code(value, arithmetic.inverse_scale(exponent), finite)
            refs[0][rows, :] = codes.astype(jnp.int8)
            stored = arithmetic.marked_exponent(exponent, largest, limit_bits=limit_bits)
            in_lanes = jnp.sum(_on_diagonal(stored, value.shape[0]), axis=0, keepdims=True)
            packed = packed | (in_lanes << (8 * k))
        refs[1][...] = packed

    def values(self, refs: Sequence[Any]) -> Callable[[pl.Slice], jax.Array]:
        """As `Wire.values`."""

        def value_of(rows: pl.Slice) -> jax.Array:
            byte = (refs[1][...] >> (8 * (rows.start // LANES))) & 255
            codes = refs[0][rows, :].astype(jnp.int32)
            exponent = jnp.sum(_on_diagonal(byte, codes.shape[0]), axis=1, keepdims=True)
            return arithmetic.value(codes, exponent, saturate=self.saturate)

        return value_of


def groups(tile_rows: int) -> list[pl.Slice]:
    """Returns the rows of a tile in groups of 128 (the last may be smaller)."""
    return [pl.ds(i, min(LANES, tile_rows - i)) for i in range(0, tile_rows, LANES)]


def _on_diagonal(x: jax.Array, num_rows: int) -> jax.Array:
    """Spreads ``[rows, 1]`` or ``[1, lanes]`` over the diagonal of ``[rows, lanes]``, else 0."""
    shape = (num_rows, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(
        jnp.int32, shape, 1
    )
    return jnp.where(diagonal, jnp.broadcast_to(x, shape), 0)
