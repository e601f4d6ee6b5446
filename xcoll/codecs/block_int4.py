"""int4: two values a byte, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, field

from xcoll.codecs.block_integers import BlockIntegers


@dataclass(frozen=True, kw_only=True)
class Int4(BlockIntegers):
    """4-bit integers, two a byte, with a scale for each block: see `int4`."""

    kind: str = field(init=False, default="int4")
    block: int = 64

    @property
    def bits(self) -> int:
        """4."""
        return 4


def int4(*, block: int = 64, scale: str = "power_of_two", rounding: str = "nearest") -> Int4:
    """Returns the codec of 4-bit integers, two a byte, with a scale for each block."""
    return Int4(block=block, scale=scale, rounding=rounding)
