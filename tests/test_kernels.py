"""Every implementation of the four operations gives the bits that plain NumPy gives.

One suite for the reference, for its form for XLA:CPU, and for the TPU and GPU kernels, which run in
Pallas's interpreter.
"""

import doctest
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
import xcoll_kernels
from xcoll_kernels import cpu, gpu, reference, tiling, tpu

RANKS = (1, 2, 3, 5, 8)
NUM_BLOCKS = (1, 131)
"""One block, and more than a TPU chunk of 128: odd, the second with blocks of every kind."""

BLOCKS = {
    "reference": ((8, 256), (4, 64), (8, 1), (4, 2), (8, 96), (8, 384)),
    "cpu": ((8, 256), (4, 64), (8, 1), (4, 2), (8, 97), (4, 100)),
    "tpu": ((8, 256), (4, 64), (8, 32), (8, 64), (8, 384), (4, 128), (4, 256), (4, 512)),
    "gpu": ((8, 256), (4, 64), (8, 32), (8, 1024), (4, 32), (4, 256), (4, 4096)),
}
"""Code bits and block sizes, the defaults first."""

CASES = [(backend, *sizes) for backend, table in BLOCKS.items() for sizes in table]
DEFAULTS = ((8, 256), (4, 64))
XLA = {"reference": reference, "cpu": cpu}
"""What is no kernel: XLA compiles it."""

# Compiling for the interpreter takes its time: dtypes and numbers of ranks are crossed with the
# default blocks; other blocks take them in turn. What XLA runs, which is cheap, takes them all.
DTYPE_CASES, RANK_CASES = (
    [
        (*case, value)
        for index, case in enumerate(CASES)
        for turn, value in enumerate(values)
        if case[0] in XLA or case[1:] in DEFAULTS or index % len(values) == turn
    ]
    for values in (cases.DTYPES, RANKS)
)
PLATFORM = {"reference": "rocm", "cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}


def call(backend, op, *args, **options):
    """Runs one implementation of an operation, compiled."""
    if backend in XLA:
        fn = jax.jit(functools.partial(getattr(XLA[backend], op), **options))
    else:
        kernel = getattr({"tpu": tpu, "gpu": gpu}[backend], op)
        fn = jax.jit(
            functools.partial(kernel, interpret=True, **options),
            compiler_options={"xla_backend_optimization_level": 0},  # compiles twice as fast
        )
    out = fn(*args)
    return jax.tree.map(np.asarray, out)


def check_encoded(got, want, bits):
    codes, exponents = got
    want_codes, want_exponents = want
    assert (codes.dtype, exponents.dtype) == (np.int8, np.uint8)
    np.testing.assert_array_equal(exponents, want_exponents)
    np.testing.assert_array_equal(codes, cases.packed(want_codes, bits=bits))


@pytest.mark.parametrize(("backend", "bits", "block", "dtype"), DTYPE_CASES)
def test_quantize(backend, bits, block, dtype):
    limit = cases.LIMIT[dtype]
    for num_blocks in NUM_BLOCKS:
        x = cases.payload(num_blocks, block, dtype)
        got = call(backend, "quantize", x, bits=bits, limit=limit)
        check_encoded(got, cases.encode(x, bits=bits, limit=limit), bits)


@pytest.mark.parametrize(("backend", "bits", "block"), CASES)
def test_dequantize(backend, bits, block):
    for num_blocks, dtype in zip(NUM_BLOCKS, ("float32", "float16"), strict=True):
        saturate = cases.SATURATE[dtype]
        codes, exponents = cases.wire(num_blocks, block, bits)
        got = call(backend, "dequantize", codes, exponents, bits=bits, saturate=saturate)
        want = cases.decode(cases.unpacked(codes, bits=bits), exponents, saturate=saturate)
        assert got.dtype == np.float32
        # As bits: negative zero is not zero, and NaN has its canonical bits.
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(("backend", "bits", "block", "dtype"), DTYPE_CASES)
def test_accumulate_and_quantize(backend, bits, block, dtype):
    limit, saturate = cases.LIMIT[dtype], cases.SATURATE[dtype]
    for num_blocks in NUM_BLOCKS:
        x = cases.payload(num_blocks, block, dtype)
        other = cases.payload(num_blocks, block, dtype, seed=1)
        # Every kind meets every kind, except in the smallest payloads.
        other = np.roll(other, np.arange(num_blocks) // 11, axis=0)
        sent, exponents = cases.encode(other, bits=bits, limit=limit)
        decoded = cases.decode(sent, exponents, saturate=saturate)
        got = call(
            backend,
            "accumulate_and_quantize",
            x,
            cases.packed(sent, bits=bits),
            exponents.astype(np.uint8),
            bits=bits,
            limit=limit,
            saturate=saturate,
        )
        # A sum may be subnormal; what is below TINY in x itself counts as zero before.
        own = x.astype(np.float32)
        own = np.where(np.abs(own) < cases.TINY, np.float32(0), own)
        check_encoded(got, cases.encode(cases.added(own, decoded), bits=bits, limit=limit), bits)


@pytest.mark.parametrize(("backend", "bits", "block", "num_ranks"), RANK_CASES)
def test_reduce_and_quantize(backend, bits, block, num_ranks):
    dtype = list(cases.DTYPES)[num_ranks % 3]
    limit, saturate = cases.LIMIT[dtype], cases.SATURATE[dtype]
    for num_blocks in NUM_BLOCKS if num_ranks == 3 else NUM_BLOCKS[1:]:
        sent, exponents, total = [], [], None
        for rank in range(num_ranks):
            x = np.roll(cases.payload(num_blocks, block, dtype, seed=rank), 4 * rank, axis=0)
            codes, scales = cases.encode(x, bits=bits, limit=limit)
            decoded = cases.decode(codes, scales, saturate=saturate)
            total = decoded if total is None else cases.added(total, decoded)
            sent.append(cases.packed(codes, bits=bits))
            exponents.append(scales.astype(np.uint8))
        got = call(
            backend,
            "reduce_and_quantize",
            np.stack(sent),
            np.stack(exponents),
            bits=bits,
            limit=limit,
            saturate=saturate,
        )
        check_encoded(got, cases.encode(total, bits=bits, limit=limit), bits)


@pytest.mark.parametrize("backend", BLOCKS)
def test_the_order_of_summation_is_that_of_ranks(backend):
    # 2**24 + 1 is no float32, so in rank order both ones are lost, and in any other order, or
    # pairwise, one of them or both survive.
    values = np.zeros((4, 1, 256), np.float32)
    values[0, 0, 0], values[1:3, 0, 0], values[3, 0, 0] = 2.0**24, 1.0, -(2.0**24)
    encoded = [cases.encode(v, bits=8, limit=cases.LIMIT["float32"]) for v in values]
    codes = np.stack([cases.packed(c, bits=8) for c, _ in encoded])
    exponents = np.stack([e.astype(np.uint8) for _, e in encoded])
    options = dict(bits=8, limit=cases.LIMIT["float32"], saturate=cases.SATURATE["float32"])
    got, _ = call(backend, "reduce_and_quantize", codes, exponents, **options)
    assert not got.any()
    got, _ = call(backend, "reduce_and_quantize", codes[[1, 2, 0, 3]], exponents[[1, 2, 0, 3]],
                  **options)  # fmt: skip
    assert got[0, 0]


@pytest.mark.parametrize("backend", XLA)
@pytest.mark.parametrize(("bits", "block"), DEFAULTS)
def test_no_blocks(backend, bits, block):
    """Kernels refuse them, so that they are left to XLA."""
    codes, exponents = call(backend, "quantize", np.zeros((0, block)), bits=bits, limit=1.0)
    assert (codes.shape, exponents.shape) == ((0, block * bits // 8), (0,))
    got = call(backend, "dequantize", codes, exponents, bits=bits, saturate=1.0)
    assert got.shape == (0, block)


@pytest.mark.parametrize("backend", BLOCKS)
def test_many_ranks(backend):
    """More than are unrolled: a loop adds the others."""
    num_ranks, num_blocks, block = 40, 3, 64
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, (num_ranks, num_blocks, block)).astype(np.int8)
    exponents = random.integers(100, 140, (num_ranks, num_blocks)).astype(np.uint8)
    limit = saturate = cases.SATURATE["float32"]
    total = np.zeros((num_blocks, block), np.float32)
    for code, exponent in zip(codes, exponents, strict=True):
        total = cases.added(total, cases.decode(code.astype(int), exponent, saturate=saturate))
    got = call(
        backend, "reduce_and_quantize", codes, exponents, bits=8, limit=limit, saturate=saturate
    )
    check_encoded(got, cases.encode(total, bits=8, limit=limit), 8)


@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 64), (8, 256)])
def test_several_tpu_tiles_with_a_ragged_end(bits, block, monkeypatch):
    monkeypatch.setattr(tiling, "_TPU_TILE", 8 * 128 * block)  # the smallest: 8 rows of exponents
    num_blocks, limit = 2 * 8 * 128 + 131, cases.LIMIT["float32"]
    assert tiling.tpu_exponent_rows(num_blocks=num_blocks, block=block) == 8
    x = cases.payload(num_blocks, block, "float32")
    want = cases.encode(x, bits=bits, limit=limit)
    got = call("tpu", "quantize", x, bits=bits, limit=limit)
    check_encoded(got, want, bits)
    saturate = cases.SATURATE["float32"]
    decoded = cases.decode(*want, saturate=saturate)
    options = dict(bits=bits, limit=limit, saturate=saturate)
    total = cases.added(decoded, decoded)
    got = call("tpu", "reduce_and_quantize", *(np.stack([a, a]) for a in got), **options)
    check_encoded(got, cases.encode(total, bits=bits, limit=limit), bits)


@pytest.mark.parametrize("backend", ("tpu", "gpu"))
def test_kernels_with_64_bit_integers(backend):
    with jax.enable_x64(True):
        limit, saturate = cases.LIMIT["float32"], cases.SATURATE["float32"]
        x = cases.payload(11, 64, "float32")
        sent, exponents = cases.encode(x, bits=4, limit=limit)
        got = call(backend, "quantize", jnp.asarray(x), bits=4, limit=limit)
        check_encoded(got, (sent, exponents), 4)
        decoded = call(backend, "dequantize", *got, bits=4, saturate=saturate)
        np.testing.assert_array_equal(decoded, cases.decode(sent, exponents, saturate=saturate))


@pytest.mark.parametrize("backend", BLOCKS)
@pytest.mark.parametrize("op", xcoll_kernels.OPS)
def test_what_the_table_tests_is_what_a_kernel_takes(backend, op):
    for bits, block in BLOCKS[backend]:
        reason = xcoll_kernels.why_not(
            op, num_blocks=3, block=block, bits=bits, num_ranks=8, platform=PLATFORM[backend]
        )
        assert (reason is None) == (backend not in XLA), reason


@pytest.mark.parametrize(
    ("platform", "options", "reason"),
    [
        ("cpu", {}, "no kernels for cpu"),
        ("rocm", {}, "no kernels for rocm"),
        ("tpu", {"block": 2048}, "TPU kernels take blocks of up to 1024 elements, not 2048"),
        ("tpu", {"block": 320}, "above 128, TPU kernels take blocks of a multiple of 128"),
        ("tpu", {"block": 16}, "below 128, TPU kernels take blocks of 32 or 64"),
        ("tpu", {"block": 32, "bits": 4}, "below 128, TPU kernels take blocks of 64"),
        ("tpu", {"block": 384, "bits": 4}, "of four bits of a multiple of 256"),
        ("cuda", {"block": 384}, "a power of two from 32 to 4096, not 384"),
        ("cuda", {"block": 16}, "a power of two from 32 to 4096, not 16"),
        ("cuda", {"block": 8192}, "a power of two from 32 to 4096, not 8192"),
        ("cuda", {"num_blocks": 2**21, "num_ranks": 4}, "int32, and there are 2,147,483,648"),
        ("gpu", {"dtype": "float64"}, "kernels take float32, bfloat16, float16, not float64"),
        ("tpu", {"bits": 2}, "8 or 4 bits, not 2"),
        ("tpu", {"num_blocks": 0}, "nothing to do"),
    ],
)
def test_why_not(platform, options, reason):
    call = {"num_blocks": 8, "block": 256, "bits": 8, **options}
    assert reason in xcoll_kernels.why_not("reduce_and_quantize", platform=platform, **call)


def test_an_unknown_operation_lists_the_valid_ones():
    with pytest.raises(ValueError, match="'quantise'.*valid: quantize, dequantize, reduce_and"):
        xcoll_kernels.why_not("quantise", num_blocks=1, block=256, bits=8, platform="tpu")


@pytest.mark.parametrize("module", ("dispatch", "reference"))
def test_docstrings(module):
    found = importlib.import_module(f"xcoll_kernels.{module}")
    result = doctest.testmod(found, extraglobs={"jnp": jnp})
    assert result.attempted and not result.failed


X = jnp.ones((2, 64))
CODES, EXPONENTS = jnp.ones((2, 64), jnp.int8), jnp.ones(2, jnp.uint8)


@pytest.mark.parametrize(
    ("op", "args", "options", "message"),
    [
        ("quantize", (X[0],), {}, r"x=float32\[64\].*is \[num_blocks, block\]"),
        ("quantize", (X.astype(int),), {}, r"x=int32\[2, 64\].*float32, bfloat16, float16"),
        ("quantize", (X,), {"bits": 3}, "bits=3.*8 or 4"),
        ("quantize", (X,), {"limit": float("inf")}, "limit=inf.*positive and finite"),
        ("quantize", (X[:, :63],), {"bits": 4}, "63 elements of 4 bits; it must be even"),
        ("quantize", (jnp.ones((1, 65537)),), {}, "65537 elements; blocks have 1 to 65536"),
        ("quantize", (X[:, :0],), {}, "0 elements"),
        ("dequantize", (X, EXPONENTS), {}, r"codes=float32\[2, 64\].*int8"),
        ("dequantize", (CODES, EXPONENTS[:1]), {}, r"exponents=uint8\[1\].*uint8 \[2\]"),
        ("dequantize", (CODES, EXPONENTS), {"saturate": -1.0}, "saturate=-1.0"),
        ("reduce_and_quantize", (CODES, EXPONENTS), {}, r"\[num_ranks, num_blocks, bytes\]"),
        ("reduce_and_quantize", (CODES[None][:0], EXPONENTS[None][:0]), {}, "codes=int8.0, 2, 64"),
        ("accumulate_and_quantize", (X[:1], CODES, EXPONENTS), {}, r"\(1, 64\).*for.*\(2, 64"),
    ],
)  # fmt: skip
def test_bad_input(op, args, options, message):
    needed = {"quantize": ("limit",), "dequantize": ("saturate",)}.get(op, ("limit", "saturate"))
    call = {"bits": 8, **dict.fromkeys(needed, 1.0), **options}
    with pytest.raises(ValueError, match=message):
        getattr(xcoll_kernels, op)(*args, platform="cpu", **call)


@pytest.mark.parametrize("platform", ("tpu", "cuda"))
def test_kernels_are_chosen_by_platform_and_switched_off(platform):
    def pallas_calls(**options):
        fn = functools.partial(xcoll_kernels.quantize, bits=8, limit=1.0, **options)
        return str(jax.make_jaxpr(fn)(X)).count("pallas_call[")

    assert pallas_calls(platform=platform) == 1
    assert pallas_calls(platform=platform, kernels=False) == 0
    assert pallas_calls(platform="cpu") == 0


@pytest.mark.parametrize(("bits", "block"), DEFAULTS)
def test_on_cpu_no_loop_but_the_joins_divides_an_index_by_the_block(bits, block):
    """A flat loop over blocks does not vectorise: codes and values keep the shape of blocks."""

    def results(op, *args, **options):
        fn = functools.partial(getattr(xcoll_kernels, op), bits=bits, platform="cpu", **options)
        entry = jax.jit(fn).lower(*args).compile().as_text().split("ENTRY")[1]
        return re.findall(r"= (\w+\[[\d,]*\])\S* fusion\(", entry)

    byte = block * bits // 8
    x = jnp.zeros((16 * block,))
    codes, exponents = jnp.zeros((16, byte), jnp.int8), jnp.zeros(16, jnp.uint8)
    assert f"s8[16,{byte}]" in results("quantize", x.reshape(16, block), limit=1.0)
    assert f"f32[16,{8 // bits},{byte}]" in results("dequantize", codes, exponents, saturate=1.0)


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU")
def test_on_the_gpu_of_this_machine():
    bench = Path(__file__).parent.parent / "bench" / "kernels.py"
    subprocess.run(
        [sys.executable, str(bench), "--check"], check=True, env={**os.environ, "JAX_PLATFORMS": ""}
    )
