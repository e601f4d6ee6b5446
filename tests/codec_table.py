"""One table of all codecs: a new one goes here and inherits every law.

Beside each codec stands what its documentation promises, written out once more: the largest error
of one rounding over the block's largest magnitude, and the bytes of one block.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from xcoll import codecs
from xcoll.codecs import Codec, FixedPoint


class Row(NamedTuple):
    codec: Codec
    max_error: Fraction
    block_bytes: int

    def __str__(self) -> str:
        return str(self.codec)


EXACT_SLACK = 1 + Fraction(1, 2**12)
STOCHASTIC = {"rounding": "stochastic"}

TABLE = (
    Row(codecs.int8(), Fraction(1, 127), 256 + 1),
    Row(codecs.int8(block=32), Fraction(1, 127), 32 + 1),
    Row(codecs.int8(scale="exact"), Fraction(1, 254) * EXACT_SLACK, 256 + 4),
    Row(codecs.int8(**STOCHASTIC), Fraction(2, 127), 256 + 1),
    Row(codecs.int8(scale="exact", **STOCHASTIC), Fraction(1, 127) * EXACT_SLACK, 256 + 4),
    Row(codecs.int4(), Fraction(1, 7), 32 + 1),
    Row(codecs.int4(block=2), Fraction(1, 7), 1 + 1),
    Row(codecs.int4(scale="exact"), Fraction(1, 14) * EXACT_SLACK, 32 + 4),
    Row(codecs.int4(**STOCHASTIC), Fraction(2, 7), 32 + 1),
    Row(codecs.int4(scale="exact", **STOCHASTIC), Fraction(1, 7) * EXACT_SLACK, 32 + 4),
    Row(codecs.cast("bfloat16"), Fraction(1, 256), 2),
    Row(codecs.cast("bfloat16", **STOCHASTIC), Fraction(1, 128), 2),
    Row(codecs.cast("float16"), Fraction(1, 2048), 512 + 2),
    Row(codecs.cast("float16", block=1), Fraction(1, 2048), 2 + 2),
    Row(codecs.cast("float16", **STOCHASTIC), Fraction(1, 1024), 512 + 2),
    Row(codecs.cast("float8_e4m3fn"), Fraction(1, 16), 256 + 1),
    Row(codecs.cast("float8_e4m3fn", **STOCHASTIC), Fraction(1, 8), 256 + 1),
    Row(codecs.cast("float8_e5m2", block=64), Fraction(1, 8), 64 + 1),
    Row(codecs.cast("float8_e5m2", **STOCHASTIC), Fraction(1, 4), 256 + 1),
)
"""Codecs that encode slots."""

NEAREST = tuple(row for row in TABLE if not row.codec.needs_key)
BY_CHANCE = tuple(row for row in TABLE if row.codec.needs_key)

FIXED: tuple[FixedPoint, ...] = tuple(
    codecs.fixed_point(bits, rounding=rounding)
    for bits in (8, 16, 32)
    for rounding in ("nearest", "stochastic")
)
"""Codecs of sums only."""
