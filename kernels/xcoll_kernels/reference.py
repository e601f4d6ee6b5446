"""The four operations in `jax.numpy`: the specification that every kernel is held to, bit for bit.

A payload is ``[num_blocks, block]``: each row shares one scale (`xcoll_kernels.arithmetic`). The
order of summation is written out, scales are powers of two and nothing divides, so that the same
bits come out of every backend and however a compiler fuses.

Codes of eight bits are int8. Codes of four bits travel two a byte, split by halves of the block:
byte ``j`` holds code ``j`` in its low and code ``j + block / 2`` in its high four bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xcoll_kernels import arithmetic

_UNROLLED_RANKS = 32  # beyond, a loop keeps the program small


def quantize(x: jax.Array, *, bits: int, limit: float) -> tuple[jax.Array, jax.Array]:
    """Encodes blocks: codes rounded to nearest even, and an exponent byte a block.

    Args:
      x: ``[num_blocks, block]``, float32, bfloat16 or float16.
      bits: 8 or 4 (``block`` even).
      limit: largest finite float32 that counts as finite: a block with a magnitude above it, or a
        NaN, becomes a NaN block (codes 0, exponent 255).

    Returns:
      Codes int8 ``[num_blocks, block * bits // 8]`` and exponents uint8 ``[num_blocks]``.

    Example:
      >>> codes, exponents = quantize(jnp.array([[1.0, -0.5, 0.25, 3.0]]), bits=8, limit=3e38)
      >>> codes.tolist(), exponents.tolist()  # the scale is 2**(122 - 127) = 1/32
      ([[32, -16, 8, 96]], [122])
    """
    limit_bits = arithmetic.bits_of(limit)
    values = x.astype(jnp.float32)
    largest = jnp.max(arithmetic.magnitude_bits(values), axis=1)
    exponent = arithmetic.finite_exponent(largest, bits=bits, limit_bits=limit_bits)
    finite = (largest <= limit_bits)[:, None]
    codes = arithmetic.code(values, arithmetic.inverse_scale(exponent)[:, None], finite)
    stored = arithmetic.marked_exponent(exponent, largest, limit_bits=limit_bits)
    return pack(codes, bits=bits), stored.astype(jnp.uint8)


def dequantize(codes: jax.Array, exponents: jax.Array, *, bits: int, saturate: float) -> jax.Array:
    """Decodes blocks: ``code * scale``, held within ``±saturate``; NaN for a NaN block.

    Args:
      codes: int8 ``[num_blocks, block * bits // 8]``.
      exponents: uint8 ``[num_blocks]``.
      bits: 8 or 4.
      saturate: largest magnitude to return: the largest finite value of the payload's dtype.

    Returns:
      float32 ``[num_blocks, block]``. Codes and exponents of all zero bits give zeros.

    Example:
      >>> codes, exponents = jnp.array([[32, -16, 8, 96]], jnp.int8), jnp.array([122], jnp.uint8)
      >>> dequantize(codes, exponents, bits=8, saturate=3e38).tolist()
      [[1.0, -0.5, 0.25, 3.0]]
    """
    exponent = exponents.astype(jnp.int32)[:, None]
    return arithmetic.value(unpack(codes, bits=bits), exponent, saturate=saturate)


def reduce_and_quantize(
    codes: jax.Array, exponents: jax.Array, *, bits: int, limit: float, saturate: float
) -> tuple[jax.Array, jax.Array]:
    """Decodes one contribution a rank, sums them in rank order and encodes the sum.

    The sum is ``((d0 + d1) + d2) + …`` in float32.

    Args:
      codes: int8 ``[num_ranks, num_blocks, block * bits // 8]``.
      exponents: uint8 ``[num_ranks, num_blocks]``.
      bits: as `quantize`.
      limit: as `quantize`, for the sum.
      saturate: as `dequantize`, for each contribution.

    Returns:
      As `quantize`.
    """
    total = rank_sum(
        lambda rank: dequantize(codes[rank], exponents[rank], bits=bits, saturate=saturate),
        codes.shape[0],
    )
    return quantize(total, bits=bits, limit=limit)


def accumulate_and_quantize(
    x: jax.Array,
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    limit: float,
    saturate: float,
) -> tuple[jax.Array, jax.Array]:
    """Adds an encoded contribution to ``x`` in float32 and encodes the sum: a hop of a ring.

    Args:
      x: as `quantize`; its subnormal numbers count as zero.
      codes: as `dequantize`.
      exponents: as `dequantize`.
      bits: as `quantize`.
      limit: as `quantize`, for the sum.
      saturate: as `dequantize`, for the contribution.

    Returns:
      As `quantize`.
    """
    decoded = dequantize(codes, exponents, bits=bits, saturate=saturate)
    total = arithmetic.flushed(x.astype(jnp.float32)) + decoded
    return quantize(total, bits=bits, limit=limit)


def rank_sum(value_of: Callable[[Any], jax.Array], num_ranks: int) -> jax.Array:
    """Returns ``((v0 + v1) + v2) + …``, of what ``value_of`` gives for each rank."""
    total = value_of(0)
    for rank in range(1, min(num_ranks, _UNROLLED_RANKS)):
        total = total + value_of(rank)
    if num_ranks > _UNROLLED_RANKS:
        total = lax.fori_loop(
            _UNROLLED_RANKS, num_ranks, lambda rank, sum_: sum_ + value_of(rank), total
        )
    return total


def pack(codes: jax.Array, *, bits: int) -> jax.Array:
    """Returns int32 codes ``[..., block]`` as int8 ``[..., block * bits // 8]``."""
    if bits == 8:
        return codes.astype(jnp.int8)
    half = codes.shape[-1] // 2
    return arithmetic.packed_nibbles(codes[..., :half], codes[..., half:]).astype(jnp.int8)


def unpack(codes: jax.Array, *, bits: int) -> jax.Array:
    """Returns int8 codes ``[..., block * bits // 8]`` as int32 ``[..., block]``."""
    wide = codes.astype(jnp.int32)
    if bits == 8:
        return wide
    halves = (arithmetic.low_nibble(wide), arithmetic.high_nibble(wide))
    return jnp.concatenate(halves, axis=-1)
