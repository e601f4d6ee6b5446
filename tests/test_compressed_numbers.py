"""Sums and moves through codecs at the edges of the numbers: NaN, overflow, subnormals, order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_table import TABLE
from jax import lax
from lossy import FLOOR, Call, same_replicas
from spmd import assert_same_bits, mesh_of, on_ranks, sharded

import xcoll
from xcoll import Policy, codecs
from xcoll.algorithms import direct, hierarchical

P = jax.P
N, BLOCK = 3, 32

CODECS = {
    "int8": codecs.int8(block=BLOCK),
    "int4": codecs.int4(block=BLOCK),
    "int8 exact": codecs.int8(block=BLOCK, scale="exact"),
    "bfloat16": codecs.cast("bfloat16"),
    "float16": codecs.cast("float16", block=BLOCK),
    "fp8": codecs.cast("float8_e4m3fn", block=BLOCK),
}
DTYPES = ("float32", "bfloat16", "float16")
CALLS = [
    Call("psum"),
    Call("psum_scatter"),
    Call("all_gather"),
    Call("all_to_all"),
    Call("ppermute", partial=True),
]


def made(codec, algorithm, calls, n=N):
    """A compiled function of all ranks' values, one operand a call, and what was optimized."""

    def fn(xs):
        return [c.run(("i",), n)(x) for c, x in zip(calls, xs, strict=True)]

    ours = xcoll.optimize(fn, policy=Policy(codec=codec, algorithm=algorithm, min_bytes=0))
    run = jax.jit(sharded(ours, mesh_of(n)))
    return lambda xs: jax.tree.map(np.asarray, run(xs)), ours


def run_all(codec, xs, algorithm, calls):
    """The results of all ranks of each call, and the report."""
    run, ours = made(codec, algorithm, calls)
    return run(xs), ours.reports[-1]


def as_float64(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_in_its_block(name, dtype):
    """An element whose exact result is not finite is not finite, and nothing outside its block."""
    codec = CODECS[name]
    block = codec.block
    rng = np.random.default_rng(0)
    clean = rng.standard_normal((N, 4 * 3 * BLOCK)).astype(jnp.dtype(dtype))
    dirty = clean.copy()
    # In one block infinities of both signs, in others one NaN, one infinity; one is the last.
    dirty[0, 1], dirty[1, 1], dirty[2, 5 * BLOCK + 2], dirty[1, -1] = (
        np.inf,
        -np.inf,
        np.nan,
        np.inf,
    )
    by_collective = {"psum": "ring", "psum_scatter": "bidirectional_ring", "all_gather": "ring",
                     "all_to_all": "direct"}  # fmt: skip
    run, _ = made(codec, by_collective, CALLS)
    outs = zip(CALLS, run([clean] * len(CALLS)), run([dirty] * len(CALLS)), strict=True)
    for call, a, b in outs:
        with np.errstate(invalid="ignore"):
            exact = call.exact(dirty)
        touched = call.exact(call.block_magnitudes(~np.isfinite(dirty.astype(np.float64)), block))
        assert not np.isfinite(b[~np.isfinite(exact)]).any(), call
        assert_same_bits(b[touched == 0], a[touched == 0], str(call))
        assert np.isfinite(as_float64(a)).all(), call
        if call.is_replicated:
            assert same_replicas(b), call


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_fixed_point_is_nan_in_the_whole_leaf_and_no_other(bits):
    x = np.ones((N, 7), np.float32)
    bad = x.copy()
    bad[1, 3] = np.inf

    def fn(x, bad):
        return lax.psum([x, bad], "i")

    ours = xcoll.optimize(fn, policy=Policy(codec=codecs.fixed_point(bits), algorithm="ring",
                                            min_bytes=0))  # fmt: skip
    good, nan = on_ranks(ours, mesh_of(N), x, bad)
    assert len(list(ours.reports[-1].groups())) == 1
    np.testing.assert_array_equal(good, np.full((N, 7), 3.0))
    assert np.isnan(nan).all()


OVERFLOW = {
    # Algorithms that only add, those that encode partial sums, and sums of partial sums.
    "direct": "direct",
    "one shot": direct(shots=1),
    "ring": "ring",
    "recursive_doubling": "recursive_doubling",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "bfloat16", "fp8"])
def test_sums_that_overflow_and_sums_that_do_not(name, dtype):
    """A sum past the largest number is not finite; a value near it alone is sent and finite.

    The second block is near the largest on one rank only, so that its sum is finite.
    """
    codec = CODECS[name]
    largest = float(jnp.finfo(dtype).max)
    x = np.zeros((N, 2 * BLOCK), jnp.dtype(dtype))
    x[:, :BLOCK] = largest
    x[1, BLOCK:] = -largest
    for algorithm in OVERFLOW.values():
        (total, moved), report = run_all(
            codec, [x, x], algorithm, [Call("psum"), Call("ppermute", partial=True)]
        )
        assert all(site.plan.is_lossy for site in report.sites)
        assert not np.isfinite(as_float64(total[:, :BLOCK])).any(), algorithm
        assert same_replicas(total)
        rest = as_float64(total[:, BLOCK:])
        # At most as far off as the bound says; saturated, so never infinite.
        assert np.isfinite(rest).all(), algorithm
        bound = report.sites[0].plan.max_error * largest
        assert (np.abs(rest + largest) <= bound * (1 + 1e-6)).all(), algorithm
        assert np.isfinite(as_float64(moved)).all()


def test_a_mean_of_float16_whose_sum_overflows():
    x = np.full((N, 2 * BLOCK), 60000.0, np.float16)
    for codec in (CODECS["int8"], codecs.fixed_point(16)):
        (mean,), report = run_all(codec, [x], "direct", [Call("pmean")])
        assert report.sites[0].plan.is_lossy and mean.dtype == np.float16
        bound = report.sites[0].plan.max_error * 60000 + 60000 * 2.0**-11
        assert (np.abs(as_float64(mean) - 60000) <= bound).all()


SPECIALS = {
    "zeros": lambda rng, s: np.zeros(s),
    "negative zeros": lambda rng, s: np.full(s, -0.0),
    "subnormal": lambda rng, s: rng.uniform(-1, 1, s) * 2.0**-127,
    "least normal": lambda rng, s: np.full(s, 2.0**-126),
    "one large beside small": lambda rng, s: np.where(
        np.arange(s[-1]) % BLOCK == 0, 1e15, rng.uniform(-1e-15, 1e-15, s)
    ),
    "30 orders": lambda rng, s: 10.0 ** rng.uniform(-15, 15, s),
    "one element": lambda rng, s: np.where(np.arange(s[-1]) == 5, 3e38 / N, np.zeros(s)),
}


@pytest.mark.parametrize("row", TABLE[::3], ids=str)
def test_special_blocks_keep_the_law(row):
    """All kinds side by side: each is a leaf, so that none shares a block with another."""
    codec, key = row.codec, jax.random.key(3)
    rng = np.random.default_rng(1)
    xs = {k: make(rng, (N, 2 * BLOCK)).astype(np.float32) for k, make in SPECIALS.items()}
    call = Call("psum")
    policy = Policy(codec=codec, algorithm="direct", min_bytes=0)
    ours = xcoll.optimize(call.run(("i",), N, key=key), policy=policy)
    out = on_ranks(ours, mesh_of(N), xs)
    for kind, x in xs.items():
        bound = call.bound(x, codec.block, ours.reports[-1].sites[0].plan.max_error)
        assert (np.abs(as_float64(out[kind]) - call.exact(x)) <= bound).all(), kind
        assert same_replicas(out[kind])
    assert (out["zeros"] == 0).all() and (out["negative zeros"] == 0).all()
    assert (np.abs(out["subnormal"]) <= 2 * N * FLOOR).all()


def test_leaves_share_no_block():
    """A huge or a bad leaf changes no bit of the others, whatever the group they travel in."""
    rng = np.random.default_rng(2)
    small = {k: rng.standard_normal((N, m)).astype(np.float32) for k, m in [("a", 5), ("b", 33)]}
    huge = {"z": np.full((N, 3), 1e30, np.float32), "y": np.full((N, 70), np.nan, np.float32)}
    for codec, algorithm in ((CODECS["int8"], "ring"), (CODECS["float16"], "direct")):
        policy = Policy(codec=codec, algorithm=algorithm, min_bytes=0)

        def fn(x, policy=policy):
            return xcoll.psum(x, "i", policy=policy)

        alone = on_ranks(fn, mesh_of(N), small)
        together = on_ranks(fn, mesh_of(N), small | huge)
        # Where a leaf stands in a ring decides in which order its blocks are summed.
        first = on_ranks(fn, mesh_of(N), small | {k: np.zeros_like(v) for k, v in huge.items()})
        for k in small:
            assert_same_bits(together[k], first[k])
            np.testing.assert_allclose(together[k], alone[k], atol=0.2)
        assert np.isnan(together["y"]).all() and np.isfinite(together["z"]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_accumulate_rounds_a_float32_sum_once(dtype, check_vma):
    """``((x0 + x1) + x2) + ...`` in float32, rounded to the dtype at the end; NaN and Inf kept."""
    n = 8
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((n, 8 * 37)) * 10.0 ** rng.uniform(-3, 3, (n, 8 * 37))).astype(
        jnp.dtype(dtype)
    )
    x[0, 3], x[1, 3], x[2, 4], x[3, 5] = np.inf, -np.inf, np.nan, np.inf
    total = x[0].astype(np.float32)
    for rank in range(1, n):
        with np.errstate(invalid="ignore"):
            total = total + x[rank].astype(np.float32)
    want = total.astype(x.dtype)

    for shape in ((8,), (2, 4)):
        mesh = mesh_of(*shape)
        names = mesh.axis_names

        def body(x, names=names):
            return lax.psum(x, names), lax.psum_scatter(x, names, tiled=True)

        ours = xcoll.optimize(body, policy=Policy(accumulate="float32"))
        summed, scattered = on_ranks(ours, mesh, x, check_vma=check_vma)
        finite = np.isfinite(total)
        for got in (summed, np.stack([scattered.reshape(-1)] * n)):
            np.testing.assert_array_equal(got[:, finite], np.stack([want[finite]] * n))
            np.testing.assert_array_equal(
                as_float64(got[:, ~finite]), np.stack([as_float64(want[~finite])] * n)
            )
        assert all(site.plan.name.startswith("direct") for site in ours.reports[-1].sites)
    # float32 and integers are none of its business.
    for other in (x.astype(np.float32), np.arange(8 * 37 * 8, dtype=np.int32).reshape(8, -1)):
        ours = xcoll.optimize(lambda v: lax.psum(v, "i"), policy=Policy(accumulate="float32"))
        plain = on_ranks(lambda v: lax.psum(v, "i"), mesh_of(8), other)
        assert_same_bits(on_ranks(ours, mesh_of(8), other), plain)


FIXED_FORMS: list[tuple[Any, tuple[int, ...]]] = [
    ("ring", (8,)),
    ("direct", (2, 4)),
    (direct(shots=1), (4, 2)),
    ("recursive_doubling", (8,)),
    ("halving_doubling", (4, 2)),
    ("tree", (2, 4)),
    ("torus", (2, 4)),
    (hierarchical("ring", "recursive_doubling"), (2, 4)),
    (hierarchical("direct", "ring"), (4, 2)),
]


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_fixed_point_has_the_same_bits_for_every_algorithm_order_and_mesh(bits):
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((8, 1031)) * 10.0 ** rng.uniform(-6, 6, (8, 1031))).astype("float32")
    first = None
    for number, (choice, shape) in enumerate(FIXED_FORMS):
        if bits != 16 and number % 3:
            continue
        mesh = mesh_of(*shape)
        names = mesh.axis_names
        policy = Policy(codec=codecs.fixed_point(bits), algorithm=choice, min_bytes=0)
        ours = xcoll.optimize(lambda v, names=names: lax.psum(v, names), policy=policy)
        for order in (np.arange(8), rng.permutation(8)):
            out = on_ranks(ours, mesh, x[order])
            assert same_replicas(out)
            first = out if first is None else first
            assert_same_bits(out, first, f"{choice} {shape}")
        assert ours.reports[-1].sites[0].plan.is_lossy, choice
    assert first is not None and (first[0] != x.astype(np.float64).sum(0)).any()


BY_CHANCE = [
    codecs.fixed_point(8, rounding="stochastic"),
    codecs.int8(block=BLOCK, rounding="stochastic"),
]


@pytest.mark.parametrize("codec", BY_CHANCE, ids=str)
def test_leaves_of_the_same_values_are_rounded_independently(codec):
    x = np.random.default_rng(6).standard_normal((N, 8 * BLOCK)).astype(np.float32)
    policy = Policy(codec=codec, algorithm="direct", min_bytes=0)

    def fn(x, y):
        return xcoll.psum([x, y], "i", policy=policy, key=jax.random.key(0))

    a, b = on_ranks(fn, mesh_of(N), x, x.copy())
    assert same_replicas(a) and same_replicas(b)
    assert (a != b).any()
