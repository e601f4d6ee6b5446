"""Ring kernels over remote DMA: values against the ring's sums written out in numpy, many runs.

Run by the TPU interpreter on virtual devices, which raises where it sees a race. As it does not
see each race in each run, runs are repeated in several modes and all values compared. What the TPU
compiler says is in `test_remote_dma_aot`.
"""

import doctest
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from xcoll_kernels.tpu import remote_dma

BLOCK = 256
BFLOAT16 = ml_dtypes.bfloat16
LARGEST = {np.dtype(np.float32): 0x7F7FFFFF, np.dtype(BFLOAT16): 0x7F7F0000}  # finite values
LIMIT = {np.dtype(np.float32): 0x7F7FFFFF, np.dtype(BFLOAT16): 0x7F7F7FFF}  # round to finite ones


def floats(bits):
    return np.asarray(bits, np.int32).view(np.float32)


def through_int8(rows, dtype):
    """Decodes the encoding of float32 [rows, 256] for a payload of ``dtype``, by the formulas."""
    bits = rows.view(np.int32) & 0x7FFFFFFF
    largest = bits.max(axis=1, keepdims=True)
    finite = largest <= LIMIT[dtype]
    exponent = np.maximum(((np.where(finite, largest, 0) + 0x1FFFF) >> 23) - 6, 1)
    normal = np.where(finite & (bits >= 0x00800000), rows, np.float32(0))
    codes = np.rint(normal * floats((254 - exponent) << 23)).astype(np.int32)
    assert abs(codes).max() <= 127
    with np.errstate(over="ignore"):
        values = codes.astype(np.float32) * floats(exponent << 23)
    bound = floats(LARGEST[dtype])
    return np.where(finite, np.clip(values, -bound, bound), np.float32(np.nan))


def as_rows(flat):
    """Float32 rows of 256, an even number of them: each direction of the ring takes half."""
    num_rows = -(-flat.size // BLOCK)
    num_rows += num_rows % 2
    rows = np.zeros((num_rows, BLOCK), np.float32)
    rows.reshape(-1)[: flat.size] = flat
    return rows


def ring_sum(chunks, home, dtype, encoded):
    """The sum of one chunk [num_ranks, elements] that ends at rank ``home``, float32, in rows."""
    num_ranks = len(chunks)
    rows = [as_rows(chunk) for chunk in chunks]
    half = len(rows[0]) // 2
    halves = []
    for part, hop in ((slice(None, half), 1), (slice(half, None), -1)):
        order = [(home + hop * distance) % num_ranks for distance in range(1, num_ranks + 1)]
        total = rows[order[0]][part]
        for rank in order[1:]:
            sent = through_int8(total, dtype) if encoded else total.astype(dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                total = sent.astype(np.float32) + rows[rank][part]
        halves.append(total)
    return np.concatenate(halves)


def all_gather(x, encoded):
    """What every rank gets from x [num_ranks, m, ...]: [num_ranks * m, ...]."""
    if encoded:
        flat = [through_int8(as_rows(shard.reshape(-1)), x.dtype) for shard in x]
        x = np.stack([f.reshape(-1)[: x[0].size].reshape(x[0].shape) for f in flat]).astype(x.dtype)
    return x.reshape(-1, *x.shape[2:])


def reduce_scatter(x, encoded):
    """What the ranks get, one after the other."""
    num_ranks = len(x)
    chunks = x.reshape(num_ranks, num_ranks, -1)
    sums = [ring_sum(chunks[:, c], c, x.dtype, encoded) for c in range(num_ranks)]
    flat = np.stack([s.reshape(-1)[: chunks.shape[2]] for s in sums])
    return flat.astype(x.dtype).reshape(x.shape[1:])


def all_reduce(x, encoded):
    """What every rank gets."""
    num_ranks, size = len(x), x[0].size
    elements = -(-size // num_ranks)
    padded = np.zeros((num_ranks, num_ranks * elements), x.dtype)
    padded[:, :size] = x.reshape(num_ranks, size)
    chunks = padded.reshape(num_ranks, num_ranks, elements)
    sums = [ring_sum(chunks[:, c], c, x.dtype, encoded) for c in range(num_ranks)]
    if encoded:
        sums = [through_int8(s, x.dtype) for s in sums]
    flat = np.concatenate([s.reshape(-1)[:elements] for s in sums])[:size]
    return flat.astype(x.dtype).reshape(x.shape[1:])


EXPECTED = {
    remote_dma.ring_all_gather: all_gather,
    remote_dma.ring_reduce_scatter: reduce_scatter,
    remote_dma.ring_all_reduce: all_reduce,
}
COLLECTIVES = ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = list(EXPECTED)


@functools.cache
def compiled(fn, num_ranks, encoded, mode, tile_rows=32, outer=1):
    """The collective over "x" of a mesh ("outer", "x", "inner"), jitted, under the interpreter."""
    devices = np.array(jax.devices()[: outer * num_ranks]).reshape(outer, num_ranks, 1)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    call = functools.partial(
        fn, axis_name="x", encoded=encoded, interpret=interpret, tile_rows=tile_rows
    )
    spec = P(("outer", "x"))
    mesh = jax.sharding.Mesh(devices, ("outer", "x", "inner"))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def values(rng, shape, dtype):
    """Magnitudes over 30 orders, signs, zeros; all sums are far from the largest float."""
    spread = rng.standard_normal(shape) * 10.0 ** rng.uniform(-15, 15, (*shape[:2], 1))
    return np.where(rng.random(shape) < 0.1, 0.0, spread).astype(dtype)


def check(fn, x, encoded, result):
    """Compares a result with what the formulas say for x [num_ranks, m, ...], bit for bit."""
    expected = EXPECTED[fn](x, encoded)
    copies = 1 if fn is remote_dma.ring_reduce_scatter else len(x)
    got = np.asarray(result).reshape(copies, *expected.shape)
    assert got.dtype == expected.dtype
    for copy in got:
        np.testing.assert_array_equal(np.isnan(copy), np.isnan(expected))
        bits = f"u{copy.itemsize}"
        np.testing.assert_array_equal(
            np.where(np.isnan(copy), 0, copy).astype(copy.dtype).view(bits),
            np.where(np.isnan(expected), 0, expected).astype(copy.dtype).view(bits),
        )


def run(fn, x, encoded, mode, **options):
    call = compiled(fn, len(x), encoded, mode, **options)
    check(fn, x, encoded, call(x.reshape(-1, *x.shape[2:])))


# Runs at 8 devices of each kernel, with DMA executed when waited for and at once. Those with int8
# take the interpreter longest.
RUNS = {
    ("ring_all_gather", False): {"on_wait": 8, "eager": 6},
    ("ring_reduce_scatter", False): {"on_wait": 5, "eager": 3},
    ("ring_all_reduce", False): {"on_wait": 4, "eager": 2},
    ("ring_all_gather", True): {"on_wait": 3, "eager": 1},
    ("ring_reduce_scatter", True): {"on_wait": 4, "eager": 2},
    ("ring_all_reduce", True): {"on_wait": 1, "eager": 1},
}


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("fn", COLLECTIVES)
def test_eight_ranks_again_and_again(fn, encoded, mode, capfd):
    # 40 rows of 256 elements a chunk, 20 a direction: one tile, which is padded. In an all-gather
    # x is one chunk.
    shape = (8, 5, 2000) if fn is ALL_GATHER else (8, 40, 2000)
    for seed in range(RUNS[fn.__name__, encoded][mode]):
        x = values(np.random.default_rng(seed), shape, np.float32)
        run(fn, x, encoded, mode)
    # The interpreter does not raise but print where a semaphore is not zero in the end.
    assert "non-zero" not in capfd.readouterr().out


def test_at_least_forty_runs_at_eight_ranks():
    assert sum(sum(modes.values()) for modes in RUNS.values()) >= 40


@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(
    ("fn", "num_ranks", "mode", "rows", "dtype"),
    [
        # Tiles of 32 rows, two directions: 2, 8 (of which 4 are in flight), 4, 1 and 1 in each.
        (ALL_REDUCE, 3, "on_wait", 340, np.float32),
        (REDUCE_SCATTER, 2, "eager", 470, BFLOAT16),
        (ALL_GATHER, 2, "on_wait", 250, BFLOAT16),
        (ALL_REDUCE, 5, "on_wait", 3, BFLOAT16),
        (ALL_REDUCE, 1, "on_wait", 5, np.float32),
        (REDUCE_SCATTER, 1, "on_wait", 5, np.float32),
    ],
)
def test_any_number_of_ranks_tiles_and_elements(fn, encoded, num_ranks, mode, rows, dtype, capfd):
    num_parts = num_ranks if fn is REDUCE_SCATTER else 1
    shape = (num_ranks, num_parts * rows, 251)  # prime: neither rows nor tiles are filled
    x = values(np.random.default_rng(num_ranks), shape, dtype)
    run(fn, x, encoded, mode)
    assert "non-zero" not in capfd.readouterr().out


def test_one_axis_of_a_mesh_of_several():
    rng = np.random.default_rng(0)
    x = np.stack([values(rng, (4, 8, 33), np.float32) for _ in range(2)])
    result = compiled(ALL_REDUCE, 4, False, "on_wait", outer=2)(x.reshape(-1, 33))
    for ring, part in zip(x, np.split(np.asarray(result), 2), strict=True):
        check(ALL_REDUCE, ring, False, part)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [(ALL_REDUCE, np.float32), (REDUCE_SCATTER, BFLOAT16)],
    ids=["all-reduce-float32", "reduce-scatter-bfloat16"],
)
def test_int8_of_what_is_not_finite_or_nearly_so(fn, dtype):
    """A block with such a value is NaN, its neighbours are not; near the largest it saturates."""
    x = np.ones((2, 8, 3 * BLOCK), np.float32)
    x[0, 0, 5] = np.inf
    x[1, 1, BLOCK] = np.nan
    x[0, 2] = floats(LARGEST[np.dtype(dtype)])
    x[1, 3] = -floats(LARGEST[np.dtype(dtype)])
    x[:, 4] = floats(0x00000001)  # subnormal: flushed
    x[:, 5] = -0.0
    x = x.astype(dtype)
    expected = EXPECTED[fn](x, True).astype(np.float32)
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    run(fn, x, True, "on_wait")


def test_other_shapes():
    call = compiled(ALL_REDUCE, 3, False, "eager")
    assert call(jnp.ones((3, 0, 4))).shape == (3, 0, 4)
    assert call(jnp.arange(3.0)).tolist() == [3.0, 3.0, 3.0]


def mapped(fn, x, **options):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    call = functools.partial(fn, **({"axis_name": "x"} | options))
    return jax.eval_shape(
        jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False), x
    )


@pytest.mark.parametrize(
    ("fn", "shape", "options", "error", "message"),
    [
        (0, (4,), {"axis_name": "y"}, ValueError, "axis_name='y'.*no such mesh axis.*x"),
        (0, (4,), {"axis_name": ("x",)}, NotImplementedError, "one mesh axis"),
        (1, (4,), {"tile_rows": 33}, ValueError, "tile_rows=33.*multiple of 32"),
        (1, (4,), {"tile_rows": 0}, ValueError, "tile_rows=0"),
        (1, (4,), {"tile_rows": 544}, ValueError, "tile_rows=544.*to 512"),
        (1, (3, 2), {}, ValueError, r"shape \(3, 2\).*multiple of the 2 ranks"),
        (0, (), {}, ValueError, "scalar"),
    ],
)
def test_bad_calls_say_what_is_wrong(fn, shape, options, error, message):
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        mapped(COLLECTIVES[fn], jnp.zeros(shape), **options)


@pytest.mark.parametrize("fn", COLLECTIVES)
def test_other_dtypes_are_refused(fn):
    with pytest.raises(NotImplementedError, match="float16.*float32 and bfloat16"):
        mapped(fn, jnp.zeros(4, jnp.float16))


def test_the_example():
    assert doctest.testmod(remote_dma) == (0, 6)
