"""Signs: one bit an element, and one scale a block."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll.gradients.checks import check_feedback
from xcoll.gradients.compressor import Compressor
from xcoll.gradients.two_shot import TwoShot

_BITS = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)

_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SignCode:
    """One bit an element, eight to a byte, and a float32 scale for each block.

    It is not among `xcoll.codecs`, since its error is as large as the values are: it trains with
    feedback only. A slot is ``bits | scales``, uint8.

    Attributes:
      block: contiguous elements that share a scale.
    """

    block: int
    needs_key = False

    def encode(
        self,
        x: jax.Array,
        *,
        dtype: str,
        key: jax.Array | None = None,
        kernels: bool = True,
        is_real: jax.Array | bool = True,
    ) -> jax.Array:
        """Encodes float32 ``(..., elements)`` as signs times the block's mean magnitude.

        The mean is over the real elements: the padding of a short block would shrink it.
        """
        del dtype, key, kernels
        slots = x.shape[:-1]
        blocks = x.reshape(*slots, -1, self.block)
        real = jnp.broadcast_to(is_real, x.shape).reshape(blocks.shape)
        count = jnp.maximum(jnp.sum(real, axis=-1, keepdims=True), 1).astype(jnp.float32)
        # Divided first: the sum of large magnitudes may overflow where the mean does not.
        scale = jnp.sum(jnp.abs(blocks) / count, axis=-1)
        scale = jnp.where(jnp.isfinite(blocks).all(axis=-1), scale, jnp.nan)
        is_positive = (x >= 0).reshape(*slots, -1, 8)
        bits = jnp.sum(jnp.where(is_positive, _BITS, 0), axis=-1, dtype=jnp.uint8)
        scales = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*slots, -1)
        return jnp.concatenate([bits, scales], axis=-1)

    def decode(
        self, wire: jax.Array, elements: int, *, dtype: str, kernels: bool = True
    ) -> jax.Array:
        """Decodes slots to float32 ``(..., elements)``."""
        del dtype, kernels
        slots, num_blocks = wire.shape[:-1], elements // self.block
        is_positive = (wire[..., : elements // 8, None] & _BITS) != 0
        scales = wire[..., elements // 8 :].reshape(*slots, num_blocks, _SCALE_BYTES)
        scale = lax.bitcast_convert_type(scales, jnp.float32)[..., None]
        blocks = jnp.where(is_positive.reshape(*slots, num_blocks, self.block), scale, -scale)
        return blocks.reshape(*slots, elements)


@dataclass(frozen=True, kw_only=True)
class Signs(TwoShot):
    """The two-shot reduction of signs."""

    code: SignCode

    def encode(self, x: jax.Array, is_real: jax.Array, key: jax.Array | None) -> jax.Array:
        """Encodes float32 ``(..., elements)``, of which those that are not real are padding."""
        return self.code.encode(x, dtype="float32", is_real=is_real)


def sign(*, block: int = 256, feedback: bool = True) -> Compressor:
    """Sends one bit an element, and a scale for each block.

    An element is sent as its sign times the mean magnitude of its block, by the two-shot plan of
    `xcoll.gradients.error_feedback`: one thirty-second of float32's bytes, and 4 bytes a block. An
    element's error is at most the largest magnitude of its block, so without feedback small
    elements are lost. A block that holds a value which is not finite is NaN on all ranks, and its
    residuals stay as they were.

    Args:
      block: contiguous elements that share a scale, a multiple of 8.
      feedback: False drops the error.

    Returns:
      A compressor for `xcoll.gradients.sync`.

    Raises:
      ValueError: ``block`` is no positive multiple of 8.
      TypeError: an argument is of a wrong type.

    Example:
      >>> sign(block=64).block
      64

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      2019.
    """
    check_feedback("sign", feedback)
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"sign(block={block!r}): must be an integer")
    if block < 8 or block % 8:
        raise ValueError(
            f"sign(block={block}): must be a positive multiple of 8, as eight signs are a byte"
        )
    return Signs(code=SignCode(block=block), feedback=feedback)
