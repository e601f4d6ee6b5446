"""Errors as measured: of known roundings, of every kind of collective, and what is not measured."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xcoll
from xcoll import codecs
from xcoll.measure import Measured

P = jax.P
AXES = ("a", "b")
SPLIT = P(AXES)
ELEMENTS = 8 * 512


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), AXES)


def shard(body, out_specs=SPLIT):
    return jax.shard_map(body, mesh=mesh(), in_specs=SPLIT, out_specs=out_specs, check_vma=False)


def operand(seed=0):
    return np.random.default_rng(seed).normal(size=(8 * ELEMENTS,)).astype(np.float32)


def policy(codec="int8", algorithm="direct", **options):
    return xcoll.Policy(codec=codec, algorithm=algorithm, min_bytes=0, **options)


def by_block(x, block):
    return np.abs(np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, block)).max(-1)


def test_a_sum_is_compared_with_the_exact_one():
    """The same figure from NumPy, of the results that the program gives."""
    x, chosen = operand(), policy()
    fn = shard(lambda x: lax.psum(x, "a"))
    (row,) = xcoll.measure_error(fn, x, policy=chosen)
    got = np.asarray(jax.jit(xcoll.optimize(fn, policy=chosen))(x)).reshape(4, 2, ELEMENTS)
    ranks = x.reshape(4, 2, ELEMENTS)
    error = np.abs(got.astype(np.float64) - ranks.astype(np.float64).sum(0))
    size = by_block(ranks, 256).sum(0)
    want = (error.reshape(4, 2, -1, 256).max(-1) / size).max()
    assert want > 1e-4, "int8 rounds"
    np.testing.assert_allclose(row.measured, want, rtol=1e-12)
    assert row.measured <= row.bound < 0.02
    assert (row.collective, row.axes, row.dtype, row.plan) == (
        "psum", ("a",), "float32", "direct/int8"
    )  # fmt: skip
    assert "test_measure.py:" in row.source and row.reason is None


MOVES = {
    "psum_scatter": lambda x: lax.psum_scatter(x, "a", tiled=True),
    "psum_scatter dimension 1": lambda x: lax.psum_scatter(
        x.reshape(2, -1), "a", scatter_dimension=1, tiled=True
    ),
    "all_gather": lambda x: lax.all_gather(x, AXES),
    "all_gather tiled": lambda x: lax.all_gather(x.reshape(-1, 8), "a", axis=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x.reshape(8, -1), AXES, 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "a", [(0, 1), (1, 3)]),
    "pmean": lambda x: lax.pmean(x, AXES),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("codec", ["int8", "bfloat16", codecs.int4(block=32)], ids=str)
def test_every_collective_rounds_and_keeps_its_bound(name, codec):
    fn = shard(lambda x: MOVES[name](x).reshape(-1))
    (row,) = xcoll.measure_error(fn, operand(), policy=policy(codec))
    assert row.measured is not None, row
    # One rounding of a bell curve comes within a factor of ten of the worst case.
    assert row.bound / 50 < row.measured <= row.bound


def test_moved_data_counts_one_rank():
    """A rank whose values are large has no share in the error of another's."""
    scale = np.repeat([1e-3, 1e3, 1, 1, 1, 1, 1, 1], ELEMENTS).astype(np.float32)
    fn = shard(lambda x: lax.all_gather(x, AXES))
    (row,) = xcoll.measure_error(fn, operand() * scale, policy=policy())
    assert 0 < row.measured <= row.bound


@pytest.mark.parametrize("rows", [1, 3])
def test_groups_loops_and_copies(rows):
    def body(x):
        def step(carry, _):
            a = lax.psum(carry, "a")
            b = lax.psum(carry[:512] * 2, "a")
            return jnp.sin(a + b.sum()), lax.psum(carry, "a")[:1]

        x, firsts = lax.scan(step, x, None, length=rows)
        return x + firsts.sum()

    found = xcoll.measure_error(shard(body), operand(), policy=policy())
    assert len(found) == 3 and len({row.source for row in found}) == 3
    assert found[0].measured == found[2].measured != found[1].measured
    for row in found:
        assert 0 < row.measured <= row.bound


def test_exact_and_kept_sites():
    def body(x):
        counts = lax.psum(jnp.int8(100) + x[:64].astype(jnp.int8), AXES)  # wraps around
        total = lax.psum(x, AXES)
        return (
            lax.pmax(x, AXES),
            counts,
            total,
            lax.psum(x[:8], "a", axis_index_groups=[[0, 1], [2, 3]]),
        )

    fn = shard(body, P())
    ring = xcoll.Policy(algorithm="ring")
    counts, total, largest, kept = xcoll.measure_error(fn, operand(), policy=ring)
    assert largest.measured == counts.measured == 0.0 and largest.plan == "ring"
    # Seven additions in float32, each off by half a unit at most: 7 * 2**-24 (1 + small).
    assert 0 < total.measured <= total.bound < 7.1 * 2.0**-24
    assert kept.measured is None and "axis_index_groups" in kept.reason


def test_what_is_not_finite_is_left_out():
    x = operand()
    x[3], x[ELEMENTS + 700], x[5 * ELEMENTS :] = np.nan, np.inf, 0
    (row,) = xcoll.measure_error(shard(lambda x: lax.psum(x, AXES)), x, policy=policy())
    assert 0 < row.measured <= row.bound


def test_inner_policies_are_measured_and_what_does_not_run_is_not():
    def body(x):
        own = xcoll.psum(x, "a", policy=policy())
        never = lax.cond(x[0] > 1e30, lambda v: lax.psum(v, "b"), lambda v: v, x)
        return own + never

    own, never = xcoll.measure_error(shard(body), operand(), policy=policy())
    assert own.plan == "direct/int8" and 0 < own.measured <= own.bound
    assert never.measured is None and never.reason == "it did not run"


def test_beside_the_partitioners_axes():
    def body(x):
        return lax.psum(lax.with_sharding_constraint(x, P("b")), "a")

    fn = jax.shard_map(body, mesh=mesh(), in_specs=P("a"), out_specs=P(), axis_names={"a"})
    (row,) = xcoll.measure_error(fn, operand(), policy=policy())
    assert 0 < row.measured <= row.bound


def test_gradients_taken_inside():
    def body(x):
        return jax.grad(lambda x: (lax.psum(jnp.sin(x), "a") * x).sum())(x)

    found = xcoll.measure_error(shard(body), operand(), policy=policy())
    assert [row.collective for row in found] == ["psum", "psum"]
    assert all(0 < row.measured <= row.bound for row in found)


def test_stochastic_rounding():
    chosen = policy(codecs.int8(rounding="stochastic"))
    fn = shard(lambda x: xcoll.psum(x, "a", key=jax.random.key(0)))
    (row,) = xcoll.measure_error(fn, operand(), policy=chosen)
    assert 0 < row.measured <= row.bound


def test_nothing_is_left_behind():
    fn = xcoll.optimize(shard(lambda x: lax.psum(x, "a")), policy=policy())
    before = jax.jit(fn).lower(operand()).as_text()
    xcoll.measure_error(fn, operand(), policy=policy())
    assert jax.jit(lambda x: fn(x)).lower(operand()).as_text().count("callback") == 0
    assert "callback" not in before


def test_it_prints():
    def body(x):
        return lax.psum(x, "a"), lax.psum(x[:8].astype(jnp.int32), "b", axis_index_groups=[[0, 1]])

    found = xcoll.measure_error(shard(body), operand(), policy=policy())
    text = str(found)
    assert "direct/int8" in text and f"{found[0].measured:.2e}" in text
    assert "not measured: axis_index_groups" in text
    rows = json.loads(found.to_json())
    assert rows[0]["measured"] == found[0].measured and rows[1]["measured"] is None
    assert set(rows[0]) == set(Measured.__dataclass_fields__)


def test_bad_input():
    fn = shard(lambda x: lax.psum(x, "a"))
    with pytest.raises(TypeError, match="measure_error: it runs the function.*no values"):
        xcoll.measure_error(fn, jax.ShapeDtypeStruct((64,), "float32"))
    with pytest.raises(TypeError, match="outside jax.jit"):
        jax.jit(lambda x: xcoll.measure_error(fn, x) and x)(operand())
    with pytest.raises(TypeError, match=r"measure_error\(policy='int8'\)"):
        xcoll.measure_error(fn, operand(), policy="int8")
    with pytest.raises(TypeError, match=r"measure_error\(topology=3\)"):
        xcoll.measure_error(fn, operand(), topology=3)
