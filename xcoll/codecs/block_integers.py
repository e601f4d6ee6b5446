"""What the integer codecs have in common: codes against one scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xcoll.codecs.base import Codec
from xcoll.codecs.limits import LARGEST
from xcoll.codecs.packing import joined, packed_nibbles, split, unpacked_nibbles
from xcoll.codecs.rounding import rounded
from xcoll.codecs.scales import (
    NAN_EXPONENT,
    inverse_scale_of,
    is_nan_block,
    magnitude_bits,
    power_of_two,
    scale_of,
)


@dataclass(frozen=True, kw_only=True)
class BlockIntegers(Codec):
    """Integers of 8 or 4 bits, with one scale for each block of contiguous elements."""

    block: int
    scale: str = "power_of_two"
    rounding: str = "nearest"

    @property
    def bits(self) -> int:
        """Bits of one code."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """The largest code; codes are symmetric around zero."""
        return (1 << (self.bits - 1)) - 1

    @property
    def max_error(self) -> float:
        """Half a step (nearest), or a step; a step is up to ``2 m / largest``."""
        return (1 if self.rounding == "nearest" else 2) / self.largest

    @property
    def formula(self) -> str:
        """The law of error as text."""
        times = "" if self.rounding == "nearest" else "2 "
        return f"{times}m / {self.largest}"

    @property
    def wire_dtype(self) -> str:
        """Codes and scales travel as int8."""
        return "int8"

    @property
    def code_items(self) -> int:
        """Bytes of one block's codes."""
        return self.block * self.bits // 8

    @property
    def scale_items(self) -> int:
        """Bytes of one block's scale."""
        return 1

    @property
    def items_per_block(self) -> int:
        """Bytes of one block."""
        return self.code_items + self.scale_items

    def encode(
        self,
        x: jax.Array,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Encodes payloads: see `Codec.encode`."""
        self.check_dtype(dtype)
        self.check_key(key)
        num_blocks = self.num_blocks(x.shape[-1])
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], num_blocks, self.block)
        magnitude = magnitude_bits(blocks)
        bad = is_nan_block(magnitude, dtype)
        exponent = power_of_two(magnitude, self.largest)
        scaled = blocks * inverse_scale_of(exponent)
        codes = jnp.where(bad, 0, rounded(scaled, self.rounding, key)).astype(jnp.int32)
        codes = packed_nibbles(codes) if self.bits == 4 else codes.astype(jnp.int8)
        scales = jnp.where(bad, NAN_EXPONENT, exponent).astype(jnp.int8)
        return joined(codes, scales, self.wire_items(x.shape[-1]))

    def decode(
        self,
        wire: jax.Array,
        elements: int,
        *,
        dtype: str,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Decodes slots: see `Codec.decode`."""
        self.check_dtype(dtype)
        self.check_wire(wire, elements)
        codes, scales = split(wire, self.num_blocks(elements), self.code_items, self.scale_items)
        codes = unpacked_nibbles(codes) if self.bits == 4 else codes
        exponent = scales.astype(jnp.int32) & 0xFF
        largest = LARGEST[dtype]
        values = jnp.clip(codes.astype(jnp.float32) * scale_of(exponent), -largest, largest)
        values = jnp.where(exponent == NAN_EXPONENT, jnp.nan, values)
        return values.reshape(*wire.shape[:-1], elements)
