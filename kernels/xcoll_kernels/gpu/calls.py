"""The GPU kernels as functions of arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xcoll_kernels import outputs, tiling
from xcoll_kernels.gpu import kernels


def why_not(*, num_blocks: int, block: int, bits: int, num_ranks: int = 1) -> str | None:
    """Says why these kernels do not take blocks of that size or number, or returns None."""
    low, high = tiling.GPU_MIN_BLOCK, tiling.GPU_MAX_BLOCK
    if block & (block - 1) or not low <= block <= high:
        return f"GPU kernels take blocks of a power of two from {low} to {high}, not {block}"
    elements = num_ranks * num_blocks * block
    if elements >= tiling.GPU_MAX_ELEMENTS:
        return f"GPU kernels count elements in int32, and there are {elements:,}"
    return None


def quantize(
    x: jax.Array, *, bits: int, limit: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """`xcoll_kernels.reference.quantize` as a GPU kernel.

    Args:
      x: ``[num_blocks, block]``, float32, bfloat16 or float16.
      bits: 8 or 4.
      limit: largest magnitude that counts as finite.
      interpret: as `pl.pallas_call`: True runs anywhere.

    Returns:
      Codes int8 ``[num_blocks, block * bits // 8]`` and exponents uint8 ``[num_blocks]``.
    """
    num_blocks, block = x.shape
    program = _program(num_blocks, block, bits, limit=limit)
    return _call(kernels.quantize, (x,), _encoded(program, x), program, interpret)


def dequantize(
    codes: jax.Array,
    exponents: jax.Array,
    *,
    bits: int,
    saturate: float,
    interpret: Any = False,
) -> jax.Array:
    """`xcoll_kernels.reference.dequantize` as a GPU kernel; arguments as there."""
    num_blocks, block = codes.shape[0], codes.shape[1] * 8 // bits
    program = _program(num_blocks, block, bits, saturate=saturate)
    out = outputs.like((num_blocks, block), jnp.float32, codes)
    return _call(kernels.dequantize, (codes, exponents), out, program, interpret)


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
    """`xcoll_kernels.reference.accumulate_and_quantize` as a GPU kernel; arguments as there."""
    num_blocks, block = x.shape
    program = _program(num_blocks, block, bits, limit=limit, saturate=saturate)
    operands = (x, codes, exponents)
    return _call(
        kernels.accumulate_and_quantize, operands, _encoded(program, x), program, interpret
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
    """`xcoll_kernels.reference.reduce_and_quantize` as a GPU kernel; arguments as there.

    Reads each contribution once and writes the sum once; the sum stays in registers, as float32.
    """
    _, num_blocks, code_bytes = codes.shape
    block = code_bytes * 8 // bits
    program = _program(num_blocks, block, bits, limit=limit, saturate=saturate)
    operands = (codes, exponents)
    return _call(
        kernels.reduce_and_quantize, operands, _encoded(program, codes), program, interpret
    )


def _program(
    num_blocks: int, block: int, bits: int, *, limit: float = 0.0, saturate: float = 0.0
) -> kernels.Program:
    return kernels.Program(
        bits=bits,
        block=block,
        blocks=tiling.gpu_blocks(num_blocks=num_blocks, block=block),
        num_blocks=num_blocks,
        limit=limit,
        saturate=saturate,
    )


def _encoded(program: kernels.Program, operand: jax.Array) -> list[jax.ShapeDtypeStruct]:
    code_bytes = program.block * program.bits // 8
    return [
        outputs.like((program.num_blocks, code_bytes), jnp.int8, operand),
        outputs.like((program.num_blocks,), jnp.uint8, operand),
    ]


def _call(
    kernel: Any,
    operands: tuple[jax.Array, ...],
    out_shape: Any,
    program: kernels.Program,
    interpret: Any,
) -> Any:
    warps = tiling.gpu_warps(num_blocks=program.num_blocks, block=program.block)
    return pl.pallas_call(
        functools.partial(kernel, program=program),
        grid=(pl.cdiv(program.num_blocks, program.blocks),),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=f"xcoll_{kernel.__name__}",
    )(*operands)
