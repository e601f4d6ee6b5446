"""Every size that a kernel is cut into, for TPU and GPU."""

from __future__ import annotations

LANES = 128
"""Lanes of a TPU vector register: the last dimension of every view on a TPU."""

TPU_MAX_BLOCK = 1024
"""Largest block of the TPU kernels: 8 rows of 128 exponents make a tile of `_TPU_TILE` elements."""

GPU_MAX_BLOCK = 4096
"""Largest block of the GPU kernels: one program holds a block's values in registers."""

GPU_MIN_BLOCK = 32
"""Smallest block of the GPU kernels: below, a row of packed codes is no whole load of 16 bytes."""

GPU_MAX_ELEMENTS = 2**31
"""The GPU kernels count elements in int32; a payload has to have fewer."""

# As float32, 4 MiB: two buffers of it, two of the codes and their exponents stay below the 16 MiB
# of vector memory that a kernel may take by default, and reading a tile of codes (1 MiB) takes
# longer than the third of a microsecond that a step of the grid costs.
_TPU_TILE = 1 << 20

# Two to four registers of 16 bytes for each of 128 threads.
_GPU_TILE = 4096
_GPU_WARP_ELEMENTS = 1024


def tpu_exponent_rows(*, num_blocks: int, block: int) -> int:
    """Returns the rows of 128 exponents, each with its blocks, of one step of a TPU kernel.

    A multiple of 8 (a tile of memory has 8 rows), or all rows there are.
    """
    rows = -(-num_blocks // LANES)
    return min(rows, max(1, _TPU_TILE // (LANES * block * 8)) * 8)


def gpu_blocks(*, num_blocks: int, block: int) -> int:
    """Returns the blocks, a power of two and at most ``num_blocks``, of one GPU program."""
    return 1 << (min(num_blocks, max(1, _GPU_TILE // block)).bit_length() - 1)


def gpu_warps(*, num_blocks: int, block: int) -> int:
    """Returns the warps of 32 threads of one GPU program."""
    elements = gpu_blocks(num_blocks=num_blocks, block=block) * block
    return max(1, elements // _GPU_WARP_ELEMENTS)
