"""Which implementation runs: a kernel of the platform, or the reference, and why."""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from xcoll_kernels import cpu, reference

OPS = ("quantize", "dequantize", "reduce_and_quantize", "accumulate_and_quantize")
"""The operations, by the names of their functions."""

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a payload."""

MAX_BLOCK = 65536
"""Largest block, in elements, that any operation takes. Kernels stop earlier: see `why_not`."""

_PACKAGES = {
    "tpu": "xcoll_kernels.tpu",
    "gpu": "xcoll_kernels.gpu",
    "cuda": "xcoll_kernels.gpu",
}


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
      dtype: name of the payload's dtype.
      num_ranks: contributions, for ``"reduce_and_quantize"``.
      platform: what the program is lowered for: ``"tpu"``, ``"cuda"`` (``"gpu"`` is the same),
        ``"cpu"`` or another one.

    Returns:
      A reason in words, or None where a kernel runs.

    Raises:
      ValueError: ``op`` is none of `OPS`.

    Example:
      >>> why_not("quantize", num_blocks=8, block=256, bits=8, platform="tpu")
      >>> why_not("quantize", num_blocks=8, block=256, bits=8, platform="cpu")
      'there are no kernels for cpu'
      >>> why_not("quantize", num_blocks=8, block=96, bits=8, platform="cuda")
      'GPU kernels take blocks of a power of two from 32 to 4096, not 96'
    """
    if op not in OPS:
        raise ValueError(f"why_not({op!r}): no such operation; valid: {', '.join(OPS)}")
    if platform not in _PACKAGES:
        return f"there are no kernels for {platform}"
    if dtype not in DTYPES:
        return f"kernels take {', '.join(DTYPES)}, not {dtype}"
    if bits not in (8, 4):
        return f"kernels take codes of 8 or 4 bits, not {bits}"
    if num_blocks == 0:
        return "there is nothing to do for no blocks"
    reason: str | None = _kernels_for(platform).why_not(
        num_blocks=num_blocks, block=block, bits=bits, num_ranks=num_ranks
    )
    return reason


def quantize(
    x: jax.Array, *, bits: int, limit: float, platform: str, kernels: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Encodes blocks: codes rounded to nearest even, and an exponent byte a block.

    `reference.quantize` is the specification.

    Args:
      x: ``[num_blocks, block]``, float32, bfloat16 or float16.
      bits: 8 or 4.
      limit: largest float32 that counts as finite; beyond it a block becomes a NaN block.
      platform: as `why_not`.
      kernels: False runs what XLA compiles everywhere.

    Returns:
      Codes int8 ``[num_blocks, block * bits // 8]`` and exponents uint8 ``[num_blocks]``.

    Raises:
      ValueError: of shapes, dtypes, ``bits`` or ``limit`` that the operation does not take.

    Example:
      >>> codes, exponents = quantize(
      ...     jnp.array([[1.0, -0.5, 0.25, 3.0]]), bits=4, limit=3e38, platform="cpu"
      ... )
      >>> codes.tolist(), exponents.tolist()  # codes 2, -1, 0 (a tie), 6; the scale is 1/2
      ([[2, 111]], [126])
    """
    call = "quantize"
    _check_values(call, x, bits)
    _check_magnitude(call, "limit", limit)
    num_blocks, block = x.shape
    chosen = _choose(call, num_blocks, block, bits, x.dtype.name, 1, platform, kernels)
    encoded: tuple[jax.Array, jax.Array] = chosen.quantize(x, bits=bits, limit=limit)
    return encoded


def dequantize(
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    saturate: float,
    platform: str,
    kernels: bool = True,
) -> jax.Array:
    """Decodes blocks: ``code * scale``, held within ``±saturate``; NaN for a NaN block.

    `reference.dequantize` is the specification.

    Args:
      codes: int8 ``[num_blocks, block * bits // 8]``.
      exponents: uint8 ``[num_blocks]``.
      bits: 8 or 4.
      saturate: largest magnitude to return.
      platform: as `why_not`.
      kernels: as `quantize`.

    Returns:
      float32 ``[num_blocks, block]``.

    Raises:
      ValueError: as `quantize`.
    """
    call = "dequantize"
    block = _check_codes(call, codes, exponents, bits, 2)
    _check_magnitude(call, "saturate", saturate)
    chosen = _choose(call, codes.shape[0], block, bits, "float32", 1, platform, kernels)
    decoded: jax.Array = chosen.dequantize(codes, exponents, bits=bits, saturate=saturate)
    return decoded


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
    """Sums one encoded contribution a rank, in float32 and rank order, and encodes the sum.

    `reference.reduce_and_quantize` is the specification. A kernel reads every contribution once
    and writes the sum once.

    Args:
      codes: int8 ``[num_ranks, num_blocks, block * bits // 8]``.
      exponents: uint8 ``[num_ranks, num_blocks]``.
      bits: 8 or 4.
      limit: as `quantize`, for the sum.
      saturate: as `dequantize`, for each contribution.
      platform: as `why_not`.
      kernels: as `quantize`.

    Returns:
      As `quantize`.

    Raises:
      ValueError: as `quantize`.
    """
    call = "reduce_and_quantize"
    block = _check_codes(call, codes, exponents, bits, 3)
    _check_magnitude(call, "limit", limit)
    _check_magnitude(call, "saturate", saturate)
    num_ranks, num_blocks, _ = codes.shape
    chosen = _choose(call, num_blocks, block, bits, "float32", num_ranks, platform, kernels)
    encoded: tuple[jax.Array, jax.Array] = chosen.reduce_and_quantize(
        codes, exponents, bits=bits, limit=limit, saturate=saturate
    )
    return encoded


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
    """Adds an encoded contribution to ``x`` in float32 and encodes the sum: a hop of a ring.

    `reference.accumulate_and_quantize` is the specification.

    Args:
      x: as `quantize`.
      codes: as `dequantize`, for blocks of the same shape.
      exponents: as `dequantize`.
      bits: 8 or 4.
      limit: as `quantize`, for the sum.
      saturate: as `dequantize`, for the contribution.
      platform: as `why_not`.
      kernels: as `quantize`.

    Returns:
      As `quantize`.

    Raises:
      ValueError: as `quantize`.
    """
    call = "accumulate_and_quantize"
    _check_values(call, x, bits)
    block = _check_codes(call, codes, exponents, bits, 2)
    _check_magnitude(call, "limit", limit)
    _check_magnitude(call, "saturate", saturate)
    if x.shape != (codes.shape[0], block):
        raise ValueError(
            f"{call}: x is {x.shape}, but the codes {codes.shape} of {bits} bits stand for"
            f" {(codes.shape[0], block)}"
        )
    chosen = _choose(call, codes.shape[0], block, bits, x.dtype.name, 1, platform, kernels)
    encoded: tuple[jax.Array, jax.Array] = chosen.accumulate_and_quantize(
        x, codes, exponents, bits=bits, limit=limit, saturate=saturate
    )
    return encoded


def _choose(
    op: str,
    num_blocks: int,
    block: int,
    bits: int,
    dtype: str,
    num_ranks: int,
    platform: str,
    kernels: bool,
) -> Any:
    reason = why_not(
        op,
        num_blocks=num_blocks,
        block=block,
        bits=bits,
        dtype=dtype,
        num_ranks=num_ranks,
        platform=platform,
    )
    if kernels and reason is None:
        return _kernels_for(platform)
    return cpu if platform == "cpu" else reference


def _kernels_for(platform: str) -> Any:
    # Imported where one is asked for: Pallas takes a third of a second.
    return importlib.import_module(_PACKAGES[platform])


def _check_values(call: str, x: jax.Array, bits: int) -> None:
    _check_bits(call, bits)
    if x.ndim != 2 or x.dtype.name not in DTYPES:
        raise ValueError(
            f"{call}(x={x.dtype.name}{list(x.shape)}): x is [num_blocks, block] of"
            f" {', '.join(DTYPES)}; reshape or cast it"
        )
    _check_block(call, x.shape[1], bits)


def _check_codes(
    call: str, codes: jax.Array, exponents: jax.Array, bits: int, num_dims: int
) -> int:
    """Returns the block that the codes stand for."""
    _check_bits(call, bits)
    wanted = "[num_ranks, num_blocks, bytes]" if num_dims == 3 else "[num_blocks, bytes]"
    if codes.ndim != num_dims or codes.dtype != jnp.int8 or 0 in codes.shape[:-2]:
        raise ValueError(
            f"{call}(codes={codes.dtype.name}{list(codes.shape)}): codes are int8 {wanted}"
        )
    if exponents.shape != codes.shape[:-1] or exponents.dtype != jnp.uint8:
        raise ValueError(
            f"{call}(exponents={exponents.dtype.name}{list(exponents.shape)}): exponents are uint8"
            f" {list(codes.shape[:-1])}, one for each block of the codes"
        )
    block: int = codes.shape[-1] * 8 // bits
    _check_block(call, block, bits)
    return block


def _check_bits(call: str, bits: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"{call}(bits={bits!r}): codes have 8 or 4 bits")


def _check_block(call: str, block: int, bits: int) -> None:
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"{call}: a block of {block} elements; blocks have 1 to {MAX_BLOCK}")
    if bits == 4 and block % 2:
        raise ValueError(f"{call}: a block of {block} elements of 4 bits; it must be even")


def _check_magnitude(call: str, name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{call}({name}={value!r}): it must be positive and finite")
