"""Which implementation runs: a kernel of the platform, or the reference, and why."""

from __future__ import annotations

import jax

from xcoll_kernels import reference

OPS = ("quantize", "dequantize", "reduce_and_quantize", "accumulate_and_quantize")
"""The operations, by the names of their functions."""

MAX_BLOCK = 65536
"""Largest block, in elements, that any operation takes."""


def why_not(
    op: str,
    *,
    num_blocks: int,
    block: int,
    bits: int,
    dtype: str = "float32",
    num_ranks: int = 1,
    platform: str,
) -> str | None:
    """Says why the reference runs instead of a kernel.

    Args:
      op: one of `OPS`.
      num_blocks: blocks of one contribution.
      block: elements that share a scale.
      bits: 8 or 4.
      dtype: name of the dtype of ``x`` (of the result, for `dequantize`).
      num_ranks: contributions, for ``"reduce_and_quantize"``.
      platform: ``"cpu"``, ``"tpu"``, ``"cuda"`` or ``"gpu"``.

    Returns:
      A reason in words, or None where a kernel runs.

    Raises:
      ValueError: ``op`` is none of `OPS`.

    Example:
      >>> why_not("quantize", num_blocks=8, block=256, bits=8, platform="cpu")
      'no kernels for cpu'
    """
    if op not in OPS:
        raise ValueError(f"why_not({op!r}): no such operation; valid: {', '.join(OPS)}")
    return f"no kernels for {platform}"


def quantize(
    x: jax.Array, *, bits: int, limit: float, platform: str, kernels: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Encodes blocks, by a kernel where there is one: see `reference.quantize`.

    Args:
      x: ``[num_blocks, block]``, float32, bfloat16 or float16.
      bits: 8 or 4.
      limit: largest magnitude that counts as finite.
      platform: what the program is lowered for; see `why_not`.
      kernels: False runs the reference everywhere.

    Returns:
      Codes int8 ``[num_blocks, block * bits // 8]`` and exponents uint8 ``[num_blocks]``.

    Raises:
      ValueError: of shapes, dtypes or ``bits`` that the operation does not take.
    """
    return reference.quantize(x, bits=bits, limit=limit)


def dequantize(
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    saturate: float,
    platform: str,
    kernels: bool = True,
) -> jax.Array:
    """Decodes blocks, by a kernel where there is one: see `reference.dequantize`."""
    return reference.dequantize(codes, exponents, bits=bits, saturate=saturate)


def reduce_and_quantize(
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    limit: float,
    saturate: float,
    platform: str,
    kernels: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Sums contributions, by a kernel where there is one: see `reference.reduce_and_quantize`."""
    return reference.reduce_and_quantize(
        codes, exponents, bits=bits, limit=limit, saturate=saturate
    )


def accumulate_and_quantize(
    x: jax.Array,
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    limit: float,
    saturate: float,
    platform: str,
    kernels: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """A hop of a ring, by a kernel where there is one: `reference.accumulate_and_quantize`."""
    return reference.accumulate_and_quantize(
        x, codes, exponents, bits=bits, limit=limit, saturate=saturate
    )
