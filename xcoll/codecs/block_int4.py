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
    """Returns the codec of 4-bit integers, two a byte, with a scale for each block.

    A value ``x`` is sent as ``q = round(x / scale)``, with ``|q| <= 7``. Byte ``j`` of a block
    holds ``q[j]`` in its low and ``q[j + block / 2]`` in its high four bits.

    Args:
      block: contiguous elements that share a scale, an even number.
      scale: ``"power_of_two"``, the smallest that fits the block, kept in one byte: the same bits
        on every backend, at up to twice the error; or ``"exact"``, ``m / 7`` in four bytes.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``, which needs a key and is unbiased.

    Returns:
      A codec with ``|error| <= m / 7 + 2**-126``, where ``m`` is the block's largest magnitude;
      ``m / 14 * (1 + 2**-12)`` with exact scales; twice that with stochastic rounding.

    Raises:
      TypeError: ``block`` is not an integer.
      ValueError: ``block`` is not positive, odd or too large for the kernels, or another option has
        no such value.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = int4(block=4)
      >>> wire = codec.encode(jnp.array([1.0, -0.5, 0.3, 3.0]), dtype="float32")
      >>> [byte % 256 for byte in wire.tolist()]  # codes 2, -1, 1, 6; the scale is 2 ** (126 - 127)
      [18, 111, 126]
      >>> codec.decode(wire, 4, dtype="float32").tolist()
      [1.0, -0.5, 0.5, 3.0]
    """
    return Int4(block=block, scale=scale, rounding=rounding)
