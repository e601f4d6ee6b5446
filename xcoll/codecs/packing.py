"""How codes and scales lie in a slot, and two codes in a byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def joined(codes: jax.Array, scales: jax.Array, items: int) -> jax.Array:
    """Returns the slots of codes and scales: ``codes | scales | zeros``.

    Args:
      codes: of shape ``(..., num_blocks, codes_per_block)``.
      scales: same dtype, of shape ``(..., num_blocks, scale_items)``.
      items: length of a slot.

    Returns:
      Same dtype, of shape ``(..., items)``.
    """
    parts = [part.reshape(*part.shape[:-2], -1) for part in (codes, scales)]
    wire = jnp.concatenate(parts, axis=-1)
    rest = items - wire.shape[-1]
    return jnp.pad(wire, [(0, 0)] * (wire.ndim - 1) + [(0, rest)])


def split(
    wire: jax.Array, num_blocks: int, code_items: int, scale_items: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and scales that `joined` put together.

    Args:
      wire: of shape ``(..., items)``.
      num_blocks: number of blocks in a slot.
      code_items: items of one block's codes.
      scale_items: items of one block's scale.

    Returns:
      Codes ``(..., num_blocks, code_items)`` and scales ``(..., num_blocks, scale_items)``.
    """
    slots = wire.shape[:-1]
    end = num_blocks * code_items
    codes = wire[..., :end].reshape(*slots, num_blocks, code_items)
    scales = wire[..., end : end + num_blocks * scale_items]
    return codes, scales.reshape(*slots, num_blocks, scale_items)


def packed_nibbles(codes: jax.Array) -> jax.Array:
    """Returns 4-bit codes two to a byte: byte ``j`` holds ``q[j]`` and ``q[j + block / 2]``.

    Args:
      codes: int32 of shape ``(..., block)``, from -8 to 7.

    Returns:
      int8 of shape ``(..., block // 2)``.
    """
    half = codes.shape[-1] // 2
    return ((codes[..., :half] & 15) | (codes[..., half:] << 4)).astype(jnp.int8)


def unpacked_nibbles(packed: jax.Array) -> jax.Array:
    """Returns the codes that `packed_nibbles` packed, as int32."""
    both = packed.astype(jnp.int32)
    return jnp.concatenate([(both << 28) >> 28, both >> 4], axis=-1)
