"""Payloads for the kernels, and what comes of them in plain NumPy with float64 and integers.

Nothing here shares a formula with `xcoll_kernels`: exponents are searched for, codes are rounded
quotients in float64 (exact: scales are powers of two), sums are NumPy's float32.
"""

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

SATURATE = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items()}
"""Largest finite value of each dtype."""

LIMIT = {
    "float32": SATURATE["float32"],
    # Half a unit in the last place above the largest value is a tie that rounds to infinity, being
    # even; the largest float32 below it still rounds down. 8 bits of significand, 11 of float16.
    "bfloat16": float(np.nextafter(np.float32((2 - 2**-8) * 2.0**127), np.float32(0))),
    "float16": float(np.nextafter(np.float32((2 - 2**-11) * 2.0**15), np.float32(0))),
}
"""Largest float32 that rounds to a finite value of each dtype."""

TINY = 2.0**-126
"""Smallest normal float32: below it numbers count as zero, and no scale is smaller."""

QMAX = {8: 127, 4: 7}


def encode(x, *, bits, limit):
    """Codes as integers ``[num_blocks, block]`` and exponent bytes ``[num_blocks]``."""
    values = np.asarray(x).astype(np.float64)
    exponents = np.empty(len(values), np.int64)
    codes = np.zeros(values.shape, np.int64)
    for index, block in enumerate(values):
        largest = np.max(np.abs(block))
        if not largest <= limit:  # NaN compares false
            exponents[index] = 255
            continue
        exponent = next(b for b in range(1, 255) if largest <= QMAX[bits] * 2.0 ** (b - 127))
        normal = np.where(np.abs(block) < TINY, 0.0, block)
        exponents[index] = exponent
        codes[index] = np.rint(normal / 2.0 ** (exponent - 127))
    return codes, exponents


def decode(codes, exponents, *, saturate):
    """float32 ``[num_blocks, block]``, from `encode`'s form."""
    scales = np.array([0.0 if b == 0 else 2.0 ** (int(b) - 127) for b in exponents])[:, None]
    values = np.clip(codes * scales, -saturate, saturate)
    return np.where(exponents[:, None] == 255, np.nan, values).astype(np.float32)


def packed(codes, *, bits):
    """Codes as they travel: int8, two codes of four bits a byte, the halves of a block paired."""
    if bits == 8:
        return codes.astype(np.int8)
    half = codes.shape[1] // 2
    low, high = codes[:, :half] % 16, codes[:, half:] % 16
    return (low + 16 * high).astype(np.uint8).view(np.int8)


def unpacked(wire, *, bits):
    """Undoes `packed`."""
    if bits == 8:
        return wire.astype(np.int64)
    unsigned = wire.view(np.uint8).astype(np.int64)
    both = np.concatenate([unsigned % 16, unsigned // 16], axis=1)
    return np.where(both >= 8, both - 16, both)


def added(first, second):
    """Sum of two float32 arrays as IEEE says, infinite where it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return first.astype(np.float32) + second.astype(np.float32)


def payload(num_blocks, block, dtype, seed=0):
    """Blocks of every kind in turn, ``[num_blocks, block]`` of a dtype.

    In turn, not at random, so that the smallest payload of the tests' tables has most kinds.
    """
    random = np.random.default_rng(seed)
    top = np.log2(SATURATE[dtype])
    bottom = -24.0 if dtype == "float16" else -149.0
    values = random.standard_normal((num_blocks, block))
    for index, row in enumerate(values):
        kind = index % 11
        if kind == 1:
            row *= 2.0 ** random.uniform(bottom, top - 3)
        elif kind == 2:  # thirty orders of magnitude, or as many as there are
            row *= 2.0 ** random.uniform(max(bottom, -50.0), min(top - 3, 50.0), block)
        elif kind == 3:
            row[:] = 0.0
            row[::2] = -0.0
        elif kind == 4:  # subnormal float32 (float16: its own subnormal numbers)
            row *= 2.0 ** (-15 if dtype == "float16" else -130)
        elif kind == 5:
            row[:] = np.where(row > 0, 1.0, -1.0) * SATURATE[dtype]
        elif kind == 6:
            row[random.integers(block)] = np.nan
        elif kind == 7:
            row[random.integers(block)] = np.inf * random.choice([-1.0, 1.0])
        elif kind == 8:  # ties: odd multiples of half a step, under a largest value of qmax steps
            row[:] = random.integers(-6, 6, block) + 0.5
            row[0] = 7.0 if index % 2 else 127.0
        elif kind == 9:  # just above and below what needs the next power of two
            row[:] = 0.25
            row[-1] = (7.0, 127.0)[index % 2] * (1 + 2.0**-7 * random.integers(-1, 2))
        elif kind == 10:  # a smallest normal number, and what lies below it
            row[:] = TINY * random.choice([1.0, 0.75, 0.5, 1.5, -1.25], block)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(DTYPES[dtype])


def wire(num_blocks, block, bits, seed=0):
    """Any bytes: codes and exponents that no encoder makes are decoded too, zero bytes to zeros."""
    random = np.random.default_rng(seed)
    codes = random.integers(-128, 128, (num_blocks, block * bits // 8)).astype(np.int8)
    exponents = random.integers(0, 256, num_blocks).astype(np.uint8)
    exponents[::5] = random.choice([0, 1, 2, 253, 254, 255], len(exponents[::5]))
    codes[::7] = 0
    return codes, exponents
