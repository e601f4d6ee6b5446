"""Casts to smaller floats."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from xcoll.codecs.base import Codec
from xcoll.codecs.limits import LARGEST
from xcoll.codecs.scales import bits_of, float_of, is_nan_block, magnitude_bits
from xcoll.errors import unknown


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """A smaller float: see `cast`."""

    kind: str = field(init=False, default="cast")
    dtype: str
    block: int = 1
    rounding: str = "nearest"

    @property
    def max_error(self) -> float:
        """Half a unit in the last place."""
        return 2.0**-8

    @property
    def formula(self) -> str:
        """The law of error as text."""
        return "m / 256"

    @property
    def wire_dtype(self) -> str:
        """The bits as an integer: XLA:CPU carries bfloat16 as float32."""
        return "uint16"

    @property
    def items_per_block(self) -> int:
        """One."""
        return 1

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
        elements = x.shape[-1]
        bits = bits_of(x.astype(jnp.float32))
        magnitude = magnitude_bits(x.astype(jnp.float32)[..., None])[..., 0]
        sign = (bits >> 16) & 0x8000
        # Integers, since a compiler may drop the pair of conversions of a cast there and back.
        # What rounds to infinity keeps that pattern: decoding saturates it.
        nearest = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        code = jnp.where(magnitude < 0x00800000, 0, nearest) | sign
        code = jnp.where(is_nan_block(magnitude, dtype), 0x7FC0, code).astype(jnp.uint16)
        rest = self.wire_items(elements) - elements
        return jnp.pad(code, [(0, 0)] * (code.ndim - 1) + [(0, rest)])

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
        bits = wire[..., :elements].astype(jnp.int32) << 16
        largest = LARGEST[dtype]
        values = jnp.clip(float_of(bits), -largest, largest)
        return jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, jnp.nan, values)


def cast(dtype: str) -> Cast:
    """Returns the codec that rounds to a smaller float."""
    if dtype != "bfloat16":
        raise ValueError(unknown(f"cast({dtype!r})", "dtype", dtype, ["bfloat16"]))
    return Cast(dtype=dtype)
