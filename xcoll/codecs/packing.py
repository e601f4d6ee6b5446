"""How codes and scales lie in a slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def padded(items: int) -> int:
    """Returns the length of a slot: whole tiles where that adds little.

    >>> [padded(items) for items in (257, 4097, 70000)]
    [257, 4224, 73728]
    """
    unit = 1 if items < 4096 else 128 if items < 65536 else 4096
    return -(-items // unit) * unit


def joined(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns slots: ``codes | scales | zeros``.

    Args:
      codes: of shape ``(..., num_blocks, code_items)``.
      scales: same dtype, of shape ``(..., num_blocks, scale_items)``.

    Returns:
      Same dtype, of shape ``(..., padded(num_blocks * (code_items + scale_items)))``.
    """
    # Not reshape(..., -1): there may be no blocks, or no slots.
    parts = [
        part.reshape(*part.shape[:-2], part.shape[-2] * part.shape[-1]) for part in (codes, scales)
    ]
    return padded_with_zeros(jnp.concatenate(parts, axis=-1))


def padded_with_zeros(wire: jax.Array) -> jax.Array:
    """Returns slots of the length that `padded` says."""
    rest = padded(wire.shape[-1]) - wire.shape[-1]
    return jnp.pad(wire, [(0, 0)] * (wire.ndim - 1) + [(0, rest)]) if rest else wire


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
    scales = wire[..., end : end + num_blocks * scale_items]
    return (
        wire[..., :end].reshape(*slots, num_blocks, code_items),
        scales.reshape(*slots, num_blocks, scale_items),
    )
