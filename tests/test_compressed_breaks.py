"""What codecs share with other fields of a policy, with jax's modes, and with the report."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import mesh_of, on_ranks, sharded

import xcoll
from xcoll import Policy, codecs

P = jax.P


def ones_after_256(dtype="bfloat16"):
    """Eight ranks whose sum in bfloat16, one after the other, is 256; in float32, 263."""
    x = np.ones((8, 4096), np.float32)
    x[0] = 256
    return x.astype(jnp.dtype(dtype))


ROUNDED = np.float32(263).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    "more",
    [
        {"deterministic": True},
        {"codec": "int8"},  # permitted, and not worth it
        {"codec": {"j": "int8"}},
        {"codec": {"all_gather": "int8"}},
        {"codec": "int8", "over_budget": "exact", "max_error": 1e-2},
        {"codec": "int8", "max_error": 1e-9, "over_budget": "exact"},
    ],
    ids=str,
)
def test_sums_in_float32_whatever_else_the_policy_says(more):
    x = ones_after_256()
    policy = Policy(accumulate="float32", min_bytes=0, **more)

    def body(v):
        return lax.psum(v, ("i", "j")), lax.psum_scatter(v, ("i", "j"), tiled=True)

    ours = xcoll.optimize(body, policy=policy)
    summed, scattered = on_ranks(ours, mesh_of(2, 4), x)
    plans = [site.plan for site in ours.reports[-1].sites]
    assert all(not plan.is_native for plan in plans), plans
    assert (summed == ROUNDED).all() and (scattered == ROUNDED).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bound_of_a_scattered_sum_in_float32_counts_the_last_rounding(dtype):
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(jnp.dtype(dtype))
    fn = sharded(lambda v: lax.psum_scatter(v, "i", tiled=True), mesh_of(8))
    (row,) = xcoll.measure_error(fn, x, policy=Policy(accumulate="float32", min_bytes=0))
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert 0 < row.measured <= row.bound and unit < row.bound < 1.01 * unit


def test_a_codec_that_sums_in_float32_is_left_alone():
    x = ones_after_256()
    policy = Policy(accumulate="float32", codec="int8", algorithm="ring", min_bytes=0)
    ours = xcoll.optimize(lambda v: lax.psum(v, "i"), policy=policy)
    on_ranks(ours, mesh_of(8), x)
    assert ours.reports[-1].sites[0].plan.name == "ring/int8"


CODECS = (
    codecs.int8(),
    codecs.int8(rounding="stochastic"),
    codecs.int8(scale="exact", rounding="stochastic"),
    codecs.int4(),
    codecs.int4(scale="exact"),
    codecs.cast("bfloat16", rounding="stochastic"),
    codecs.cast("float16"),
    codecs.cast("float8_e4m3fn", rounding="stochastic"),
    codecs.fixed_point(16),
    codecs.fixed_point(32, rounding="stochastic"),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_jax_promotes_nothing(dtype):
    """Every codec is lowered to the same program as in jax's usual mode."""

    def body(v):
        key = jax.random.key(3)
        policies = [Policy(codec=codec, algorithm="ring", min_bytes=0) for codec in CODECS]
        policies += [Policy(codec=codec, algorithm="direct", min_bytes=0) for codec in CODECS]
        return [xcoll.psum(v, "i", policy=policy, key=key) for policy in policies]

    def text():
        fn = jax.jit(sharded(body, mesh_of(4)))
        return fn.lower(jax.ShapeDtypeStruct((4, 300), dtype)).as_text()

    usual = text()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert text() == usual


def test_the_report_says_why_what_is_rewritten_stays_exact():
    def body(v):
        return lax.psum(v.astype(jnp.int32), "i"), lax.psum(v, "i")

    fn = jax.shard_map(body, mesh=mesh_of(8), in_specs=P("i"), out_specs=P())
    policy = Policy(codec="int8", algorithm="ring", min_bytes=0)
    text = str(xcoll.explain(fn, np.ones((8, 300), np.float32), policy=policy))
    assert "# 0: exact: int32 values are never sent through a lossy codec" in text
    assert "# 1: |error| <=" in text and "# 1: exact" not in text
