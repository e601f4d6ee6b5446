"""The bodies of the GPU kernels: one program encodes or decodes a few whole blocks.

A block's values are held as *parts*, ``[blocks, part]``: one part for codes of eight bits, and
the two halves of the block, loaded apart, for codes of four bits, because Triton cannot slice a
value. The last program starts early enough to end with the last block, and repeats what another
one writes, with the same bits: so no access needs a mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from xcoll_kernels import arithmetic

_UNROLLED_RANKS = 16  # loads of several ranks are in flight at once; beyond, a loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a kernel is specialised to.

    Attributes:
      bits: 8 or 4.
      block: elements of a block, a power of two.
      blocks: blocks of one program, a power of two.
      num_blocks: blocks of the payload, at least ``blocks``.
      limit: largest magnitude that counts as finite in an encoded block.
      saturate: largest magnitude of a decoded value.
    """

    bits: int
    block: int
    blocks: int
    num_blocks: int
    limit: float = 0.0
    saturate: float = 0.0

    @property
    def parts(self) -> list[Any]:
        """Columns of each part of a block."""
        num_parts = 8 // self.bits
        part = self.block // num_parts
        return [pl.ds(index * part, part) for index in range(num_parts)]


def quantize(x: Any, codes: Any, exponents: Any, *, program: Program) -> None:
    """Encodes blocks."""
    rows = _rows(program)
    _store(_load(x, rows, program), codes, exponents, rows, program)


def dequantize(codes: Any, exponents: Any, out: Any, *, program: Program) -> None:
    """Decodes blocks."""
    rows = _rows(program)
    parts = _decode(codes[rows, :], exponents[rows], program)
    for columns, part in zip(program.parts, parts, strict=True):
        out[rows, columns] = part


def accumulate_and_quantize(
    x: Any, codes: Any, exponents: Any, out_codes: Any, out_exponents: Any, *, program: Program
) -> None:
    """Adds decoded blocks to ``x`` and encodes the sum."""
    rows = _rows(program)
    decoded = _decode(codes[rows, :], exponents[rows], program)
    own = _load(x, rows, program)
    total = [arithmetic.flushed(a) + b for a, b in zip(own, decoded, strict=True)]
    _store(total, out_codes, out_exponents, rows, program)


def reduce_and_quantize(
    codes: Any, exponents: Any, out_codes: Any, out_exponents: Any, *, program: Program
) -> None:
    """Sums the decoded blocks of all ranks, in registers, and encodes the sum."""
    rows, num_ranks = _rows(program), codes.shape[0]

    def added(rank: Any, total: tuple[Any, ...]) -> tuple[Any, ...]:
        decoded = _decode(codes[rank, rows, :], exponents[rank, rows], program)
        return tuple(a + b for a, b in zip(total, decoded, strict=True))

    total = tuple(_decode(codes[0, rows, :], exponents[0, rows], program))
    for rank in range(1, min(num_ranks, _UNROLLED_RANKS)):
        total = added(rank, total)
    if num_ranks > _UNROLLED_RANKS:
        total = lax.fori_loop(np.int32(_UNROLLED_RANKS), np.int32(num_ranks), added, total)
    _store(list(total), out_codes, out_exponents, rows, program)


def _rows(program: Program) -> Any:
    start = jnp.minimum(pl.program_id(0) * program.blocks, program.num_blocks - program.blocks)
    return pl.ds(start, program.blocks)


def _load(x: Any, rows: Any, program: Program) -> list[Any]:
    return [x[rows, columns].astype(jnp.float32) for columns in program.parts]


def _decode(codes: Any, exponents: Any, program: Program) -> list[Any]:
    wide, exponent = codes.astype(jnp.int32), exponents.astype(jnp.int32)[:, None]
    nibbles = (arithmetic.low_nibble, arithmetic.high_nibble)
    parts = [wide] if program.bits == 8 else [nibble(wide) for nibble in nibbles]
    return [arithmetic.value(part, exponent, saturate=program.saturate) for part in parts]


def _store(parts: list[Any], codes: Any, exponents: Any, rows: Any, program: Program) -> None:
    """Encodes parts of float32 and writes codes and exponents."""
    limit_bits = arithmetic.bits_of(program.limit)
    largest = jnp.max(arithmetic.magnitude_bits(parts[0]), axis=1)
    for part in parts[1:]:
        largest = jnp.maximum(largest, jnp.max(arithmetic.magnitude_bits(part), axis=1))
    exponent = arithmetic.finite_exponent(largest, bits=program.bits, limit_bits=limit_bits)
    inverse = arithmetic.inverse_scale(exponent)[:, None]
    finite = (largest <= limit_bits)[:, None]
    encoded = [arithmetic.code(part, inverse, finite) for part in parts]
    packed = encoded[0] if program.bits == 8 else arithmetic.packed_nibbles(*encoded)
    stored = arithmetic.marked_exponent(exponent, largest, limit_bits=limit_bits)
    codes[rows, :] = packed.astype(codes.dtype)
    exponents[rows] = stored.astype(exponents.dtype)
