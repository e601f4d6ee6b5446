"""Encoded slots on the wire: a codec, with what it needs to run inside a program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xcoll.codecs import Codec

_TILE_ITEMS = 4096
"""Items of an int8 tile of a TPU, (32, 128)."""


@dataclass
class Wire:
    """Encodes and decodes slots of float32 for one stage.

    Attributes:
      codec: the codec.
      dtype: of the payload: what is not finite in it is NaN on the wire.
      platform: what the program is lowered for.
      kernels: whether Pallas kernels may be used.
      key: PRNG key of stochastic rounding, the rank folded in; each encoding folds in its number.
    """

    codec: Codec
    dtype: str
    platform: str
    kernels: bool
    key: jax.Array | None = None
    _encodings: int = field(default=0)

    def encode(self, slots: jax.Array) -> jax.Array:
        """Returns ``(slots, ...)`` on the wire, from ``(slots, elements)``."""
        bits = self.codec.encode(slots, key=self._next_key(), **self._options())
        return _tiled(bits)

    def decode(self, bits: jax.Array, elements: int) -> jax.Array:
        """Returns ``float32[slots, elements]``.

        What is decoded is fenced: the compiler must neither take the rank's own slots from before
        they were encoded, nor fuse the product into a sum.
        """
        flat = lax.optimization_barrier(bits).reshape(bits.shape[0], -1)
        return lax.optimization_barrier(self.codec.decode(flat, elements, **self._options()))

    def reduce_and_encode(self, bits: jax.Array, elements: int) -> jax.Array:
        """Returns one slot on the wire: the sum of ``bits``, one contribution a rank."""
        flat = bits.reshape(bits.shape[0], -1)
        key = self._next_key()
        total = self.codec.reduce_and_encode(flat, elements, key=key, **self._options())
        return _tiled(total[None])

    def accumulate_and_encode(self, slots: jax.Array, bits: jax.Array) -> jax.Array:
        """Returns ``slots + decode(bits)`` on the wire."""
        flat = bits.reshape(bits.shape[0], -1)
        key, elements = self._next_key(), slots.shape[1]
        return _tiled(
            self.codec.accumulate_and_encode(slots, flat, elements, key=key, **self._options())
        )

    def numbered(self, iteration: int | jax.Array) -> Wire:
        """Returns the wire for one iteration of a loop, which rounds by a key of its own."""
        if self.key is None:
            return self
        self._encodings += 1
        key = jax.random.fold_in(jax.random.fold_in(self.key, self._encodings), iteration)
        return replace(self, key=key, _encodings=0)

    def _options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "platform": self.platform, "kernels": self.kernels}

    def _next_key(self) -> jax.Array | None:
        if self.key is None or not self.codec.needs_key:
            return None
        self._encodings += 1
        return jax.random.fold_in(self.key, self._encodings)


def _tiled(bits: jax.Array) -> jax.Array:
    """Keeps slots of whole tiles two-dimensional, so that a TPU does not pad them."""
    slots, items = bits.shape
    return bits.reshape(slots, -1, 128) if items % _TILE_ITEMS == 0 else bits


def as_wide(x: jax.Array) -> jax.Array:
    """Returns ``x`` in float32, in which codecs work."""
    return x.astype(jnp.float32)
