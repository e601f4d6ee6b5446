"""int8: a quarter of float32's bytes, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, field

from xcoll.codecs.block_integers import BlockIntegers


@dataclass(frozen=True, kw_only=True)
class Int8(BlockIntegers):
    """8-bit integers with a scale for each block: see `int8`."""

    kind: str = field(init=False, default="int8")
    block: int = 256

    @property
    def bits(self) -> int:
        """8."""
        return 8


def int8(*, block: int = 256, scale: str = "power_of_two", rounding: str = "nearest") -> Int8:
    """Returns the codec of 8-bit integers, with a scale for each block."""
    return Int8(block=block, scale=scale, rounding=rounding)
