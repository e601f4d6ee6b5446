"""What codecs do to numbers, in float64 with numpy alone: the expectations of their tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
LARGEST = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items()}
LARGEST_CODE = {"int8": 127, "int4": 7}
TINY = 2.0**-126


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < TINY, 0.0, x)


def is_finite_in(x: np.ndarray, dtype: str) -> np.ndarray:
    """Whether float64 values that are float32 numbers round to finite values of ``dtype``."""
    with np.errstate(over="ignore"):
        return np.isfinite(x.astype(np.float32).astype(DTYPES[dtype]).astype(np.float32))


def power_of_two(magnitude: float, largest: float) -> float:
    """The smallest power of two, 2**-126 at least, that ``magnitude / largest`` does not exceed."""
    scale = TINY
    while largest * scale < magnitude:
        scale *= 2
    return scale


def decoded(codec, x: np.ndarray, dtype: str) -> np.ndarray:
    """``decode(encode(x))`` in float64, for rounding to nearest and power-of-two scales."""
    blocks = flushed(x.astype(np.float64)).reshape(-1, codec.block)
    values = np.empty_like(blocks)
    for into, block in zip(values, blocks, strict=True):
        if not is_finite_in(block, dtype).all():
            into[:] = np.nan
            continue
        magnitude = float(np.abs(block).max())
        if codec.kind in LARGEST_CODE:
            scale = power_of_two(magnitude, LARGEST_CODE[codec.kind])
            into[:] = np.rint(block / scale) * scale
        elif codec.dtype == "bfloat16":
            with np.errstate(over="ignore"):
                into[:] = block.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        else:
            scale = power_of_two(magnitude, LARGEST[codec.dtype])
            into[:] = (block / scale).astype(DTYPES[codec.dtype]).astype(np.float64) * scale
    return flushed(np.clip(values, -LARGEST[dtype], LARGEST[dtype])).reshape(x.shape)


def block_magnitudes(x: np.ndarray, block: int) -> np.ndarray:
    """The largest magnitude of every element's block, in the shape of ``x``."""
    blocks = np.abs(x.astype(np.float64)).reshape(-1, block)
    return np.repeat(blocks.max(axis=1, initial=0.0), block).reshape(x.shape)


def hard_block(kind: str, size: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """A block of numbers that codecs find hard, as values of ``dtype``.

    Kinds are those of `HARD`.
    """
    signs = rng.choice([-1.0, 1.0], size)
    largest = LARGEST[dtype]
    spread = {
        "normal": lambda: rng.normal(size=size),
        "30 orders": lambda: 10.0 ** rng.uniform(-15, 15, size),
        "every order": lambda: 2.0 ** rng.uniform(-149, np.log2(largest), size),
        "zeros": lambda: np.zeros(size),
        "negative zeros": lambda: np.full(size, -0.0),
        "subnormal": lambda: TINY * rng.uniform(0, 1, size),
        "smallest normal": lambda: TINY * rng.uniform(0.5, 4, size),
        "near the largest": lambda: largest * (1 - rng.uniform(0, 1, size) * 2.0**-6),
        "the largest": lambda: np.full(size, largest),
        "integers": lambda: np.floor(rng.uniform(0, 128, size)),
        # Ties of formats with fewer bits.
        "halves": lambda: np.floor(rng.uniform(0, 2.0 ** rng.integers(3, 13), size)) + 0.5,
    }
    values = np.clip(spread[kind]() * signs, -largest, largest)
    return values.astype(np.float32).astype(DTYPES[dtype])


HARD = (
    "normal", "30 orders", "every order", "zeros", "negative zeros", "subnormal",
    "smallest normal", "near the largest", "the largest", "integers", "halves",
)  # fmt: skip
