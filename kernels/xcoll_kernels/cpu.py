"""The four operations in a form that XLA:CPU vectorises: the bits of `xcoll_kernels.reference`.

XLA:CPU writes a fusion as a loop over the shape of its result, and LLVM vectorises the innermost
dimension where it is long, contiguous and free of branches. So results keep the shape that they
are computed in behind a fence (a reshape fused into them makes a flat loop that divides each index
by the block), halves of a block are a dimension of their own and not a concatenation, and what is
made once a block is made before the loop over its elements.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from xcoll_kernels import arithmetic, reference

_LANES = 8
"""Int32 lanes of a register of 256 bits: running maxima of a block, before they are one."""


def quantize(x: jax.Array, *, bits: int, limit: float) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.quantize`; arguments as there."""
    limit_bits = arithmetic.bits_of(limit)
    values = x.astype(jnp.float32)
    largest = _largest(values)
    exponent = arithmetic.finite_exponent(largest, bits=bits, limit_bits=limit_bits)
    stored = arithmetic.marked_exponent(exponent, largest, limit_bits=limit_bits)
    stored, inverse = lax.optimization_barrier((stored, arithmetic.inverse_scale(exponent)))
    finite = stored != arithmetic.NAN_EXPONENT
    codes = reference.pack(arithmetic.code(values, inverse, finite), bits=bits)
    return lax.optimization_barrier((codes, stored[:, 0].astype(jnp.uint8)))


def dequantize(codes: jax.Array, exponents: jax.Array, *, bits: int, saturate: float) -> jax.Array:
    """`xcoll_kernels.reference.dequantize`; arguments as there."""
    values = _values(codes, exponents, bits=bits, saturate=saturate)
    return _rows(values)


def reduce_and_quantize(
    codes: jax.Array, exponents: jax.Array, *, bits: int, limit: float, saturate: float
) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.reduce_and_quantize`; arguments as there."""
    total = reference.rank_sum(
        lambda rank: _values(codes[rank], exponents[rank], bits=bits, saturate=saturate),
        codes.shape[0],
    )
    return quantize(_rows(total), bits=bits, limit=limit)


def accumulate_and_quantize(
    x: jax.Array,
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    limit: float,
    saturate: float,
) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.accumulate_and_quantize`; arguments as there."""
    values = _values(codes, exponents, bits=bits, saturate=saturate)
    own = arithmetic.flushed(x.astype(jnp.float32)).reshape(values.shape)
    return quantize(_rows(own + values), bits=bits, limit=limit)


def _largest(values: jax.Array) -> jax.Array:
    """Returns each block's largest `magnitude_bits`: int32 ``[num_blocks, 1]``."""
    num_blocks, block = values.shape
    lanes = math.gcd(block, _LANES)
    magnitudes = arithmetic.magnitude_bits(values).reshape(num_blocks, block // lanes, lanes)
    largest = lax.optimization_barrier(jnp.max(magnitudes, axis=1))
    while lanes > 1:
        lanes //= 2
        largest = jnp.maximum(largest[:, :lanes], largest[:, lanes:])
    return largest


def _values(codes: jax.Array, exponents: jax.Array, *, bits: int, saturate: float) -> jax.Array:
    """Returns what codes stand for: float32 ``[num_blocks, codes in a byte, bytes of a block]``."""
    wide = codes.astype(jnp.int32)[:, None]
    if bits == 4:
        left = 28 - 4 * lax.broadcasted_iota(jnp.int32, (1, 2, 1), 1)
        wide = (wide << left) >> 28
    return arithmetic.value(wide, exponents.astype(jnp.int32)[:, None, None], saturate=saturate)


def _rows(values: jax.Array) -> jax.Array:
    """Returns ``[num_blocks, block]``."""
    num_blocks, codes_in_byte, code_bytes = values.shape
    # Not reshape(..., -1): there may be no blocks.
    return lax.optimization_barrier(values).reshape(num_blocks, codes_in_byte * code_bytes)
