"""The TPU kernels as functions of arrays: views, grid and scratch memory.

A flat array viewed as rows of 128 lanes keeps its order in memory, so the views are free where
the payload was flat before. Nothing is padded but the exponents, to a multiple of 128, and the
payload where its last row of codes would not be whole: the last tile may reach over the end, and
what it computes there is not written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xcoll_kernels import outputs, tiling
from xcoll_kernels.tpu import kernels, units

LANES = tiling.LANES


def why_not(*, num_blocks: int, block: int, bits: int, num_ranks: int = 1) -> str | None:
    """Says why these kernels do not take blocks of that size, or returns None: any number does."""
    if block > tiling.TPU_MAX_BLOCK:
        return f"TPU kernels take blocks of up to {tiling.TPU_MAX_BLOCK} elements, not {block}"
    found = units.unit(block=block, bits=bits)
    return found if isinstance(found, str) else None


def quantize(
    x: jax.Array, *, bits: int, limit: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.quantize` as a TPU kernel.

    Args:
      x: ``[num_blocks, block]``, float32, bfloat16 or float16.
      bits: 8 or 4.
      limit: largest magnitude that counts as finite.
      interpret: as `pl.pallas_call`: True runs anywhere.

    Returns:
      Codes int8 ``[num_blocks, block * bits // 8]`` and exponents uint8 ``[num_blocks]``.
    """
    num_blocks, block = x.shape
    tile = _tile(num_blocks, block, bits, limit=limit)
    return _encoded(
        kernels.quantize,
        [_values_view(x, tile)],
        [_rows(tile.rows)],
        tile,
        num_blocks,
        scratch=[_values(tile)],
        interpret=interpret,
    )


def dequantize(
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    saturate: float,
    interpret: Any = False,
) -> jax.Array:
    """`xcoll_kernels.reference.dequantize` as a TPU kernel; arguments as there."""
    num_blocks, block = codes.shape[0], codes.shape[1] * 8 // bits
    tile = _tile(num_blocks, block, bits, saturate=saturate)
    operands = [_codes_view(codes, tile), _exponents_view(exponents)]
    out = pl.pallas_call(
        functools.partial(kernels.dequantize, tile=tile),
        grid=(pl.cdiv(operands[1].shape[0], tile.chunks),),
        in_specs=[_rows(tile.code_rows), _rows(tile.chunks)],
        out_specs=_rows(tile.rows),
        out_shape=outputs.like((operands[0].shape[0] * 8 // bits, LANES), jnp.float32, *operands),
        scratch_shapes=[_wide(tile), _exponents(tile)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="xcoll_dequantize",
    )(*operands)
    return out.reshape(-1, block)[:num_blocks]


def accumulate_and_quantize(
    x: jax.Array,
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    limit: float,
    saturate: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.accumulate_and_quantize` as a TPU kernel; arguments as there."""
    num_blocks, block = x.shape
    tile = _tile(num_blocks, block, bits, limit=limit, saturate=saturate)
    return _encoded(
        kernels.accumulate_and_quantize,
        [_values_view(x, tile), _codes_view(codes, tile), _exponents_view(exponents)],
        [_rows(tile.rows), _rows(tile.code_rows), _rows(tile.chunks)],
        tile,
        num_blocks,
        scratch=[_values(tile)],
        interpret=interpret,
    )


def reduce_and_quantize(
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    limit: float,
    saturate: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.reduce_and_quantize` as a TPU kernel; arguments as there.

    Reads each contribution once and writes the sum once; the sum of a tile stays in vector
    memory, as float32, while the grid goes over the ranks.
    """
    num_ranks, num_blocks, code_bytes = codes.shape
    tile = _tile(num_blocks, code_bytes * 8 // bits, bits, limit=limit, saturate=saturate)
    of_rank = [
        pl.BlockSpec((1, rows, LANES), lambda step, rank: (rank, step, 0))
        for rows in (tile.code_rows, tile.chunks)
    ]
    return _encoded(
        kernels.reduce_and_quantize,
        [_codes_view(codes, tile), _exponents_view(exponents)],
        of_rank,
        tile,
        num_blocks,
        ranks=(num_ranks,),
        scratch=[pltpu.VMEM((tile.rows, LANES), jnp.float32)],
        interpret=interpret,
    )


def _encoded(
    kernel: Any,
    operands: list[jax.Array],
    in_specs: Sequence[pl.BlockSpec],
    tile: kernels.Tile,
    num_blocks: int,
    *,
    ranks: tuple[int, ...] = (),
    scratch: list[Any],
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Calls a kernel that writes codes and exponents of ``num_blocks`` blocks."""
    u = tile.unit
    whole = pl.cdiv(num_blocks, u.blocks) * u.blocks
    exponent_rows = pl.cdiv(num_blocks, LANES)
    codes, exponents = pl.pallas_call(
        functools.partial(kernel, tile=tile),
        grid=(pl.cdiv(exponent_rows, tile.chunks), *ranks),
        in_specs=in_specs,
        out_specs=[_rows(tile.code_rows), _rows(tile.chunks)],
        out_shape=[
            outputs.like((whole // u.blocks * u.code_rows, LANES), jnp.int8, *operands),
            outputs.like((exponent_rows, LANES), jnp.uint8, *operands),
        ],
        scratch_shapes=[*scratch, _wide(tile), _exponents(tile)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary") if ranks else ("parallel",)
        ),
        interpret=interpret,
        name=f"xcoll_{kernel.__name__}",
    )(*operands)
    code_bytes = u.block * u.bits // 8
    return codes.reshape(-1, code_bytes)[:num_blocks], exponents.reshape(-1)[:num_blocks]


def _tile(
    num_blocks: int, block: int, bits: int, *, limit: float = 0.0, saturate: float = 0.0
) -> kernels.Tile:
    found = units.unit(block=block, bits=bits)
    if isinstance(found, str):
        raise ValueError(f"a TPU kernel was given blocks of {block}: {found}; ask why_not first")
    chunks = tiling.tpu_exponent_rows(num_blocks=num_blocks, block=block)
    return kernels.Tile(unit=found, chunks=chunks, limit=limit, saturate=saturate)


def _rows(rows: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, LANES), lambda step, *_: (step, 0))


def _values(tile: kernels.Tile) -> Any:
    return pltpu.VMEM((tile.unit.chunk_rows, LANES), jnp.float32)


def _wide(tile: kernels.Tile) -> Any:
    return pltpu.VMEM((tile.unit.chunk_code_rows, LANES), jnp.int32)


def _exponents(tile: kernels.Tile) -> Any:
    return pltpu.VMEM((tile.chunks, LANES), jnp.int32)


def _values_view(x: jax.Array, tile: kernels.Tile) -> jax.Array:
    """Views ``[num_blocks, block]`` as rows of 128, float16 as its bits: Mosaic has no float16."""
    if x.dtype == jnp.float16:
        x = lax.bitcast_convert_type(x, jnp.int16)
    return _padded(x, tile.unit.blocks, axis=0).reshape(-1, LANES)


def _codes_view(codes: jax.Array, tile: kernels.Tile) -> jax.Array:
    padded = _padded(codes, tile.unit.blocks, axis=codes.ndim - 2)
    return padded.reshape(*codes.shape[:-2], -1, LANES)


def _exponents_view(exponents: jax.Array) -> jax.Array:
    padded = _padded(exponents, LANES, axis=exponents.ndim - 1)
    return padded.reshape(*exponents.shape[:-1], -1, LANES)


def _padded(x: jax.Array, multiple: int, *, axis: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(x.ndim)])
