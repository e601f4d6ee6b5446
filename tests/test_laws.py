"""Laws of the design that concern whole programs: bytes, never lose, never silent, NaN."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_table import TABLE
from jax import lax

import xcoll
from xcoll import hlo
from xcoll.hlo.auditing import audit
from xcoll.hlo.planned import against

P = jax.P
AXES = ("host", "device")
SLOW = "2*cpu:4@200Mbit"

COLLECTIVES = {
    "all_reduce": lambda x: lax.psum(x, AXES),
    "reduce_scatter": lambda x: lax.psum_scatter(x, AXES, tiled=True),
    "all_gather": lambda x: lax.all_gather(x, AXES, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXES, 0, 0, tiled=True),
    "broadcast": lambda x: xcoll.pbroadcast(x, AXES, 3),
    "reduce": lambda x: xcoll.preduce(x, AXES, 3),
    "gather": lambda x: xcoll.pgather(x, AXES, 3),
    "scatter": lambda x: xcoll.pscatter(x, AXES, 3, tiled=True),
}
FLAT = [(c, collective) for c, collectives, dims in TABLE if not dims for collective in collectives]
NESTED = [
    (xcoll.algorithms.hierarchical(), "all_reduce"),
    (xcoll.algorithms.hierarchical("ring", "recursive_doubling"), "all_reduce"),
    (xcoll.algorithms.hierarchical("ring", "ring"), "reduce_scatter"),
    (xcoll.algorithms.hierarchical("bruck", "native"), "all_gather"),
    (xcoll.algorithms.hierarchical("pairwise", "bruck"), "all_to_all"),
    (xcoll.algorithms.hierarchical(num_segments=3), "all_reduce"),
    (xcoll.algorithms.torus(), "all_reduce"),
    (xcoll.algorithms.torus(), "reduce_scatter"),
    (xcoll.algorithms.torus(), "all_gather"),
]


REDUCTIONS = [c for c in FLAT + NESTED if c[1] in ("all_reduce", "reduce_scatter")]


def mesh_2x4() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), AXES)


@functools.cache
def program(collective):
    return jax.shard_map(
        COLLECTIVES[collective], mesh=mesh_2x4(), in_specs=P(AXES), out_specs=P(AXES),
        check_vma=False,
    )  # fmt: skip


@functools.cache
def plain(collective):
    """XLA's own, for all cases of a shape and dtype compiled once."""
    return jax.jit(program(collective))


def small_integers(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).integers(-2, 3, shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("choice", "collective"), FLAT + NESTED, ids=str)
def test_bytes_and_numbers(choice, collective, dtype):
    """Operand bytes predicted by operation and axes are those that the audit finds."""
    x = small_integers((8 * 16, 67), dtype)
    ours = xcoll.optimize(program(collective), policy=xcoll.Policy(algorithm=choice))
    compiled = jax.jit(ours).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), plain(collective)(x))
    (site,) = ours.reports[-1].sites
    if choice.name == "native":
        assert site.plan is None or site.plan.is_native
    else:
        assert site.is_rewritten
    predicted, counted = Counter(), Counter()
    for op in site.plan.operations:
        predicted[op.kind, op.axes, op.operand_bytes] += op.count
    found = audit(compiled, mesh=mesh_2x4())
    for row in found.rows:
        counted[row.kind, row.axes, row.num_bytes] += row.executions
    assert predicted == counted
    assert against(ours.reports[-1], found, "cpu").is_equal
    counted_bytes = {a: b for a, b in hlo.wire_bytes(compiled, mesh_2x4()).items() if b}
    assert {a: b for a, b in site.plan.wire_bytes if b} == counted_bytes


def test_hierarchy_crosses_hosts_with_at_most_four_sevenths_of_the_flat_ring():
    """Counted by the pairs of the compiled permutes whose ends lie on different hosts.

    Flat ring over 2 x 4 ranks: 14 steps, two pairs of hosts cross in each, an eighth of the payload
    each: 28/8 payloads. Hierarchy: a ring between the hosts for each of four quarters, 2 steps of
    an eighth, both ways: 4 * 2 * 2 / 8 = 16/8 payloads. 16/28 = 4/7.
    """
    x = small_integers((8 * 1024,), "float32")
    crossing = {}
    for choice in (xcoll.algorithms.ring(), xcoll.algorithms.hierarchical("ring", "ring")):
        ours = xcoll.optimize(program("all_reduce"), policy=xcoll.Policy(algorithm=choice))
        compiled = jax.jit(ours).lower(x).compile()
        assert {row.kind for row in hlo.collectives(compiled)} == {"collective-permute"}
        crossing[choice.name] = hlo.crossing_bytes(compiled, mesh_2x4(), "host")
    payload = 1024 * 4
    assert crossing == {"ring": 28 * payload // 8, "hierarchical": 16 * payload // 8}


@pytest.mark.parametrize("given", [None, "cpu:8"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_never_lose_leaves_the_program_unchanged(collective, given):
    fn = program(collective)
    x = small_integers((8 * 16, 64), "float32")
    ours = xcoll.optimize(fn, topology=given)
    theirs = jax.jit(fn).lower(x).compile().as_text()
    assert hlo.canonical(jax.jit(ours).lower(x).compile().as_text()) == hlo.canonical(theirs)
    (site,) = ours.reports[-1].sites
    assert site.kept_reason and site.plan.is_native


def test_a_plan_is_only_chosen_at_a_tenth_gained():
    for num_bytes in (256, 1 << 14, 1 << 20, 1 << 24):
        x = jax.ShapeDtypeStruct((8 * num_bytes // 4,), "float32")
        (site,) = xcoll.explain(program("all_reduce"), x, topology=SLOW).sites
        plan = site.plan
        assert plan.is_native or 10 * plan.predicted_time_ps <= 9 * plan.native_time_ps


def step_with_everything(x):
    def body(carry, _):
        return carry + lax.psum_scatter(lax.all_gather(carry, AXES), AXES), lax.pmax(carry, "host")

    y, stacked = lax.scan(body, x, None, length=2)
    y = y + lax.cond(lax.pmax(y[0, 0], AXES) > 0, lambda v: lax.psum(v, AXES), lambda v: 2 * v, y)
    groups = lax.psum(y, "device", axis_index_groups=[[0, 1], [2, 3]])
    return y + groups + stacked.sum(0) + lax.ppermute(y, AXES, [(0, 1)]) + lax.pmean(y, AXES)


def test_nothing_silent():
    """Rewritten and kept sites are all collective equations that a plain count finds."""
    fn = jax.shard_map(
        step_with_everything, mesh=mesh_2x4(), in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    x = small_integers((64, 3), "float32")
    text = str(jax.make_jaxpr(fn)(x))
    names = ("psum", "all_gather", "reduce_scatter", "pmax", "ppermute")
    expected = sum(text.count(f" {name}[") for name in names)
    assert expected == 8
    for policy in (xcoll.Policy(), xcoll.Policy(algorithm="ring"), xcoll.Policy.native()):
        ours = xcoll.optimize(fn, policy=policy, topology=SLOW)
        out = jax.jit(ours)(x)
        np.testing.assert_array_equal(out, jax.jit(fn)(x))
        report = ours.reports[-1]
        assert len(report.rewritten) + len(report.kept) == len(report.sites) == expected
        assert all(site.kept_reason for site in report.kept)
        assert len(json.loads(report.to_json())["sites"]) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("choice", "collective"), REDUCTIONS, ids=str)
def test_non_finite_values_stay_where_they_are(choice, collective, bad):
    """An element is non-finite exactly where the exact sum is: padding leaks nothing."""
    x = np.array(small_integers((8 * 16, 67), "float32"))
    x[17, 5] = bad
    x[16 * 6 + 1, 5] = -bad  # the same element of another rank's shard: inf - inf is nan
    x[3, 66] = bad
    ours = xcoll.optimize(program(collective), policy=xcoll.Policy(algorithm=choice))
    np.testing.assert_array_equal(jax.jit(ours)(x), plain(collective)(x))


def test_deterministic_sums_are_in_rank_order_on_any_mesh():
    rng = np.random.default_rng(3)
    for dtype in ("float32", "bfloat16", "float16"):
        x = rng.standard_normal((8, 1031)).astype(jnp.dtype(dtype))
        expected = x[0]
        for rank in range(1, 8):
            expected = (expected + x[rank]).astype(x.dtype)  # each addition rounds
        for shape in ((8,), (2, 4), (4, 2), (2, 2, 2)):
            names = ("a", "b", "c")[: len(shape)]
            mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)
            fn = jax.shard_map(
                lambda v, names=names: lax.psum(v[0], names),
                mesh=mesh, in_specs=P(names), out_specs=P(),
            )  # fmt: skip
            ours = xcoll.optimize(fn, policy=xcoll.Policy(deterministic=True))
            out = np.asarray(jax.jit(ours)(x))
            assert out.tobytes() == expected.tobytes(), (dtype, shape)
            (site,) = ours.reports[-1].sites
            assert site.plan.name.startswith("direct")


def test_deterministic_covers_scatter_and_refuses_what_it_cannot_order():
    policy = xcoll.Policy(deterministic=True)
    x = np.random.default_rng(4).standard_normal((64, 3)).astype("float32")
    scatter = jax.jit(xcoll.optimize(program("reduce_scatter"), policy=policy))(x)
    shards = x.reshape(8, 8, 3)
    expected = shards[0]
    for rank in range(1, 8):
        expected = expected + shards[rank]
    assert np.asarray(scatter).tobytes() == expected.tobytes()

    def grouped(v):
        return lax.psum(v, "device", axis_index_groups=[[0, 1], [2, 3]])

    fn = jax.shard_map(
        grouped, mesh=mesh_2x4(), in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    with pytest.raises(ValueError, match=r"deterministic=True.*axis_index_groups"):
        jax.jit(xcoll.optimize(fn, policy=policy))(x)
    integers = jax.jit(xcoll.optimize(fn, policy=policy))(x.astype("int32"))
    np.testing.assert_array_equal(integers, jax.jit(fn)(x.astype("int32")))


def count_equations(choice, collective, num_ranks):
    """Counts the equations of a lowered schedule, without devices."""
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("x",))
    from xcoll.lower import run_stage
    from xcoll.plan import Span, Stage

    stage = Stage(collective, Span(("x",), num_ranks), choice)
    whole = collective in ("all_reduce", "broadcast", "reduce", "all_gather", "gather")
    shape = (num_ranks * 4,) if whole else (num_ranks, 4)

    def body(x):
        return run_stage(x, stage, {"x": num_ranks}, "sum", 0).reshape(-1)

    fn = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False)
    return _equations(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, "float32")))


def _equations(jaxpr):
    from jax.extend.core import jaxprs_in_params

    return sum(
        1 + sum(_equations(inner) for inner in jaxprs_in_params(eqn.params)) for eqn in jaxpr.eqns
    )


@pytest.mark.parametrize(("choice", "collective"), FLAT, ids=str)
def test_program_size(choice, collective):
    """O(1) in the number of ranks for rings and one-shot forms past 16, O(log n) for the rest."""
    sizes = {n: count_equations(choice, collective, n) for n in (17, 32, 64, 128)}
    if choice.name in ("ring", "bidirectional_ring", "native", "direct"):
        assert sizes[32] == sizes[64] == sizes[128], sizes
        assert sizes[17] <= sizes[32] + 8
    elif choice.name == "pairwise":
        # Each of its n - 1 steps is another permutation, which no loop can hold.
        assert sizes[128] - sizes[64] <= 64 * (sizes[64] - sizes[32]) / 32
    else:
        # Linear in the logarithm; half as much again for radices that do not divide it evenly.
        assert sizes[128] / 7 <= 1.5 * sizes[32] / 5, sizes
