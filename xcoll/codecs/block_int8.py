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
    """Returns the codec of 8-bit integers, with a scale for each block.

    A value ``x`` is sent as ``q = round(x / scale)``, with ``|q| <= 127``.

    Args:
      block: contiguous elements that share a scale.
      scale: ``"power_of_two"``, the smallest that fits the block, kept in one byte: the same bits
        on every backend, at up to twice the error; or ``"exact"``, ``m / 127`` in four bytes.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``, which needs a key and is unbiased.

    Returns:
      A codec with ``|error| <= m / 127 + 2**-126``, where ``m`` is the block's largest magnitude;
      ``m / 254 * (1 + 2**-12)`` with exact scales; twice that with stochastic rounding.

    Raises:
      TypeError: ``block`` is not an integer.
      ValueError: ``block`` is not positive or too large for the kernels, or another option has no
        such value.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = int8(block=4)
      >>> wire = codec.encode(jnp.array([1.0, -0.5, 0.26, 3.0]), dtype="float32")
      >>> wire.tolist()  # the scale is 2 ** (122 - 127)
      [32, -16, 8, 96, 122]
      >>> codec.decode(wire, 4, dtype="float32").tolist()
      [1.0, -0.5, 0.25, 3.0]
    """
    return Int8(block=block, scale=scale, rounding=rounding)
