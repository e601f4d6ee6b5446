"""Casts to smaller floats: bfloat16 as it is, float16 and fp8 with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from xcoll_kernels import arithmetic

from xcoll.codecs.base import Codec
from xcoll.codecs.checks import check_block, check_name, check_rounding
from xcoll.codecs.limits import LARGEST
from xcoll.codecs.packing import joined, padded_with_zeros, split
from xcoll.codecs.scales import block_magnitude, limit_bits, power_of_two
from xcoll.codecs.small_floats import FORMATS, from_small, to_bfloat16, to_small

CASTS = ("bfloat16", *FORMATS)
"""Dtypes that `cast` takes."""

_NAN = 0x7FC0  # of bfloat16


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """A smaller float: see `cast`."""

    kind: str = field(init=False, default="cast")
    dtype: str
    block: int = 256
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_name("cast", "dtype", self.dtype, CASTS)
        check_block("cast", self.block)
        check_rounding("cast", self.rounding)
        if self.dtype == "bfloat16" and self.block != 1:
            raise ValueError(
                f"cast('bfloat16', block={self.block}): bfloat16 has the range of float32 and needs"
                " no scale; leave block out"
            )

    def __str__(self) -> str:
        """Reads like the call that makes it: the default block is not shown.

        >>> print(cast("float16"), cast("float16", block=64))
        cast(float16) cast(float16, block=64)
        """
        block = f", block={self.block}" if self.block != _default_block(self.dtype) else ""
        rounding = f", rounding={self.rounding}" if self.rounding != "nearest" else ""
        return f"cast({self.dtype}{block}{rounding})"

    @property
    def significand_bits(self) -> int:
        """Stored bits of the significand."""
        return 7 if self.dtype == "bfloat16" else FORMATS[self.dtype].significand_bits

    @property
    def max_error(self) -> float:
        """Half a unit in the last place to nearest, a unit by chance."""
        return 2.0 ** -(self.significand_bits + (self.rounding == "nearest"))

    @property
    def formula(self) -> str:
        """The law of error as text."""
        return f"|error| <= m / {round(1 / self.max_error)} + 2**-126"

    @property
    def wire_dtype(self) -> str:
        """The bits as integers: XLA:CPU carries bfloat16 as float32, and fp8 as float16."""
        return "uint16" if self.dtype == "bfloat16" else FORMATS[self.dtype].wire_dtype

    @property
    def items_per_block(self) -> int:
        """The values, and one item for the exponent of their scale where there is one."""
        return 1 if self.dtype == "bfloat16" else self.block + 1

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
        self.check_encode(dtype, key)
        blocks = x.reshape(*x.shape[:-1], self.num_blocks(x.shape[-1]), self.block)
        blocks = blocks.astype(jnp.float32)
        limit = limit_bits(dtype)
        magnitude = block_magnitude(blocks)
        blocks = jnp.where(magnitude > limit, 0.0, arithmetic.flushed(blocks))
        if self.dtype == "bfloat16":
            # flushed() takes the sign of zeros of its own making only.
            bits = to_bfloat16(blocks, self.rounding, key)
            return padded_with_zeros(self._items(jnp.where(magnitude > limit, _NAN, bits))[..., 0])
        small = FORMATS[self.dtype]
        exponent = power_of_two(jnp.minimum(magnitude, limit), small.largest)
        scaled = blocks * arithmetic.inverse_scale(exponent)
        codes = to_small(scaled, small, self.rounding, key)
        marked = arithmetic.marked_exponent(exponent, magnitude, limit_bits=limit)
        return joined(self._items(codes), self._items(marked))

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
        self.check_decode(wire, elements, dtype)
        largest = LARGEST[dtype]
        if self.dtype == "bfloat16":
            # What was rounded to infinity is saturated like the rest.
            bits = wire[..., :elements].astype(jnp.int32) << 16
            values = lax.bitcast_convert_type(bits, jnp.float32)
            return jnp.where(jnp.isnan(values), jnp.nan, jnp.clip(values, -largest, largest))
        codes, scales = split(wire, self.num_blocks(elements), self.block, 1)
        exponent = scales.astype(jnp.int32) & 0xFF
        values = from_small(codes.astype(jnp.int32), FORMATS[self.dtype])
        values = jnp.clip(values * arithmetic.scale(exponent), -largest, largest)
        # A small value times a small scale may be subnormal.
        values = jnp.where(exponent == arithmetic.NAN_EXPONENT, jnp.nan, arithmetic.flushed(values))
        return values.reshape(*wire.shape[:-1], elements)

    def _items(self, bits: jax.Array) -> jax.Array:
        return bits.astype(self.wire_dtype)


def cast(dtype: str, *, block: int | None = None, rounding: str = "nearest") -> Cast:
    """Returns the codec that rounds to a smaller float.

    bfloat16 has float32's range: each element is rounded by itself. float16 and the fp8 dtypes
    have one power-of-two scale for each block, so that its largest magnitude comes near the
    largest number of the format.

    Args:
      dtype: ``"bfloat16"``, ``"float16"``, ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
      block: contiguous elements that share a scale, 256 by default; for bfloat16, leave it out.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``, which needs a key and is unbiased.

    Returns:
      A codec with, rounding to nearest, ``|error| <= u m + 2**-126``: ``u`` is 1/256 for bfloat16
      (of the element itself), 1/2048 for float16, 1/16 for float8_e4m3fn and 1/8 for float8_e5m2.
      Twice that by chance. A value that rounds past float32's largest is saturated.

    Raises:
      TypeError: ``block`` is not an integer.
      ValueError: an option has no such value.

    Example:
      >>> codec = cast("bfloat16")
      >>> wire = codec.encode(jnp.array([1.0, 1.001, -3.15]), dtype="float32")
      >>> wire.dtype.name, codec.decode(wire, 3, dtype="float32").tolist()
      ('uint16', [1.0, 1.0, -3.15625])
      >>> cast("float8_e4m3fn").wire_bytes((1024,), "float32")
      1028
    """
    if block is None:
        block = _default_block(dtype)
    return Cast(dtype=dtype, block=block, rounding=rounding)


def _default_block(dtype: str) -> int:
    return 1 if dtype == "bfloat16" else 256
