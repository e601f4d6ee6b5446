"""Editing of programs: orders of axes, effects between sites, equal operands, odd functions."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_table import TABLE
from jax import lax
from jax.experimental import checkify

import xcoll

P = jax.P
AXES = ("host", "device")
SLOW = "2*cpu:4@200Mbit"
RING = xcoll.Policy(algorithm="ring")


def mesh_2x4() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), AXES)


def shard(body, out_specs=None):
    out_specs = P(AXES) if out_specs is None else out_specs
    return jax.shard_map(
        body, mesh=mesh_2x4(), in_specs=P(AXES), out_specs=out_specs, check_vma=False
    )


def operand(columns=3):
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, (64, columns)), jnp.float32)


CHOICES = [c for c, _, levels in TABLE] + [xcoll.algorithms.hierarchical("ring", "ring")]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_axes_in_another_order_than_the_mesh(choice):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))

    def body(x):
        out = []
        for axes in (("c", "a"), ("b", "a"), ("c", "a", "b")):
            out.append(lax.psum(x, axes))
            out.append(lax.psum_scatter(x, axes, tiled=True))
            out.append(lax.all_gather(x, axes, tiled=True))
            out.append(lax.all_to_all(x, axes, 0, 0, tiled=True))
        return out

    spec = P(("a", "b", "c"))
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = operand()
    ours = xcoll.optimize(fn, policy=xcoll.Policy(algorithm=choice))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ours)(x), jax.jit(fn)(x))


@pytest.mark.parametrize("policy", [RING, None])
def test_effects_between_sites_keep_their_places(policy):
    seen = []

    def body(x):
        a = lax.psum(x, AXES)
        jax.debug.callback(lambda v: seen.append("first"), a[0, 0])

        def inner(carry, _):
            jax.debug.callback(lambda v: seen.append("inner"), carry[0, 0])
            return carry * 2, None

        y, _ = lax.scan(inner, x, None, length=2)
        jax.debug.callback(lambda v: seen.append("last"), y[0, 0])
        return a + lax.psum(y, AXES)

    fn = shard(body)
    ours = xcoll.optimize(fn, policy=policy, topology=SLOW)
    out = jax.jit(ours)(operand())
    jax.effects_barrier()
    assert len(seen) == 8 * 4
    np.testing.assert_array_equal(
        out, 5 * np.tile(np.asarray(operand()).reshape(8, 8, 3).sum(0), (8, 1))
    )
    assert ours.reports[-1].rewritten


def test_calls_without_a_policy_are_grouped_like_jax_lax():
    def ours_20(x):
        return [xcoll.psum(k * x, AXES) for k in range(20)]

    def lax_20(x):
        return [lax.psum(k * x, AXES) for k in range(20)]

    texts = []
    for body in (ours_20, lax_20):
        report = xcoll.explain(shard(body, P()), operand(), topology=SLOW)
        assert [len(group) for group in report.groups()] == [20]
        assert all("test_rewrite.py:" in site.source for site in report.sites)
        texts.append([site.plan for site in report.sites])
    assert texts[0] == texts[1]


def test_a_call_with_a_policy_shows_its_source_bytes_and_plan():
    def body(x):
        own = xcoll.psum(x, AXES, policy=RING)
        return own + xcoll.psum(x, "device")

    ours = xcoll.optimize(shard(body), topology=SLOW)
    compiled = jax.jit(ours).lower(operand()).compile()
    own, other = ours.reports[-1].sites
    assert own.plan.name == "ring" and "inner policy" in own.kept_reason
    assert "test_rewrite.py:" in own.source and "test_rewrite.py:" in other.source
    counted = xcoll.hlo.wire_bytes(compiled, mesh_2x4())
    assert ours.reports[-1].wire_bytes() == counted


def test_the_topology_around_holds_for_calls_with_a_policy():
    big = jax.ShapeDtypeStruct((8 << 20,), "float32")
    fn = shard(lambda x: xcoll.psum(x, AXES, policy=xcoll.Policy()))
    (site,) = xcoll.explain(fn, big, topology=SLOW).sites
    assert site.plan.name == "hierarchical(native, native)"
    (site,) = xcoll.explain(fn, big).sites
    assert site.plan.is_native


def test_equal_operands_travel_once():
    def body(x):
        y = 2 * x
        return lax.psum(y, AXES) + lax.psum(y, AXES) * 3 + lax.psum(x, AXES)

    ours = xcoll.optimize(shard(body), policy=RING)
    x = operand()
    np.testing.assert_array_equal(jax.jit(ours)(x), jax.jit(shard(body))(x))
    sites = ours.reports[-1].sites
    assert len(sites) == 3 and len(sites[0].plan.request.shapes) == 2


def test_a_barrier_is_listed():
    ours = xcoll.optimize(shard(lambda x: xcoll.barrier(x, AXES)), policy=RING)
    np.testing.assert_array_equal(jax.jit(ours)(operand()), operand())
    (site,) = ours.reports[-1].sites
    assert site.collective == "barrier" and "barrier" in site.kept_reason


def test_symbolic_shapes_are_kept_and_say_so():
    fn = jax.shard_map(
        lambda x: lax.psum(x, "i"),
        mesh=jax.sharding.Mesh(np.array(jax.devices()), ("i",)),
        in_specs=P(None, "i"),
        out_specs=P(),
    )
    ours = xcoll.optimize(fn, policy=RING)
    shape = jax.export.symbolic_shape("b, 64")
    jax.export.export(jax.jit(ours))(jax.ShapeDtypeStruct(shape, jnp.float32))
    (site,) = ours.reports[-1].sites
    assert "symbolic" in site.kept_reason


def test_nans_of_recursive_doubling_are_the_same_bits_on_every_rank():
    quiet = np.array([0x7FC00001, 0xFFC00002, 0x7FC00003], np.uint32).view(np.float32)
    for num_ranks in (2, 3, 5, 8):
        x = np.ones((num_ranks, 12), np.float32)
        for rank, column in itertools.product(range(num_ranks), range(6)):
            if (rank + column) % 2:
                x[rank, column] = quiet[(rank + column) % 3]
        x[0, 7], x[num_ranks - 1, 7] = np.inf, -np.inf
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("i",))
        fn = jax.shard_map(
            lambda v: xcoll.psum(v, "i", policy=xcoll.Policy(algorithm="recursive_doubling")),
            mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False,
        )  # fmt: skip
        rows = np.asarray(jax.jit(fn)(x))
        assert np.isnan(rows[0, :6]).all()
        for row in rows:
            assert row.tobytes() == rows[0].tobytes(), num_ranks


def test_debug_nans_finds_the_operation():
    ours = xcoll.optimize(lambda x: jnp.log(x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(ours)(-jnp.ones(3))


def test_checkify_goes_inside():
    def body(x):
        checkify.check(x[0, 0] > 100, "too small: {}", x[0, 0])
        return jnp.sin(x)

    error, out = checkify.checkify(xcoll.optimize(body))(operand())
    assert "too small" in error.get()
    np.testing.assert_array_equal(out, jnp.sin(operand()))


class Stateful:
    """A callable whose attributes have the names of the wrapper's."""

    def __init__(self):
        self._count, self.reports, self.policy = 0, "mine", "mine"

    def __call__(self, x):
        return x + self._count

    @xcoll.optimize(policy=RING)
    def method(self, x):
        return shard(lambda v: lax.psum(v, AXES))(x)


def test_callables_and_methods():
    ours = xcoll.optimize(Stateful())
    np.testing.assert_array_equal(ours(operand()), operand())
    assert ours.reports[-1].sites == ()
    instance = Stateful()
    instance.method(operand())
    assert instance.method.reports[-1].rewritten and instance.method.policy == RING


def test_one_layer_called_often_in_one_program_is_no_retrace():
    layer = xcoll.optimize(shard(lambda x: lax.psum(x, AXES)), policy=RING)

    @jax.jit
    def model(x):
        for _ in range(6):
            x = layer(x) / 8
        return x

    model(operand())


def test_programs_of_a_new_jit_each_time_are_retraces():
    step = xcoll.optimize(shard(lambda x: lax.psum(x, AXES)), policy=RING)
    for _ in range(3):
        jax.jit(lambda x: step(x))(operand())
    with pytest.warns(xcoll.XcollWarning, match="traced 4 times"):
        jax.jit(lambda x: step(x))(operand())


def test_nnx_jit_inside():
    from flax import nnx

    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, x):
        return shard(lambda v: lax.psum(v, AXES))(model(x))

    ours = xcoll.optimize(step, policy=RING)
    np.testing.assert_allclose(ours(model, operand()), step(model, operand()), rtol=1e-5, atol=1e-5)
    assert ours.reports[-1].rewritten


def test_bad_permutations_and_policies():
    with pytest.raises(TypeError, match=r"ppermute\(perm=\[\(0, 1, 2\)\]\).*pairs"):
        shard(lambda x: xcoll.ppermute(x, AXES, [(0, 1, 2)]))(operand())
    with pytest.raises(TypeError, match="pbroadcast.*integer"):
        shard(lambda x: xcoll.pbroadcast(x, AXES, x[0, 0]))(operand())
    with pytest.raises(ValueError, match="a pmean is a psum"):
        xcoll.Policy(algorithm={"psum": "ring", "pmean": "tree"})


def test_hints_know_the_mesh_around_a_region():
    def step(w, x):
        gradient = jax.grad(lambda w: (w * x).sum())(w)
        return lax.pmean(gradient, AXES)

    inside = jax.shard_map(
        xcoll.optimize(step), mesh=mesh_2x4(), in_specs=(P(), P(AXES)), out_specs=P()
    )
    with pytest.warns(xcoll.XcollWarning, match="all 8 ranks"):
        jax.jit(inside).lower(jnp.ones(3), operand())


def test_bytes_of_a_program_are_exact_rank_by_rank():
    """Sites of sizes that ranks do not divide, trees with other busiest ranks, a permutation."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(3, 2), AXES)

    def body(x):
        sums = [lax.psum(x[:n], AXES) for n in (5, 7, 10)]
        tree = xcoll.Policy(algorithm="tree")
        sent = [xcoll.pbroadcast(x[:9], AXES, root, policy=tree) for root in (0, 3, 5)]
        return sums, sent, lax.ppermute(x, AXES, [(0, 5), (2, 1)])

    spec = P(AXES)
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    ours = xcoll.optimize(fn)
    compiled = jax.jit(ours).lower(jnp.ones(6 * 11)).compile()
    assert ours.reports[-1].wire_bytes() == xcoll.hlo.wire_bytes(compiled, mesh)


def test_bytes_of_what_is_kept_are_in_the_report():
    def body(x):
        groups = lax.psum(x, "device", axis_index_groups=[[0, 1], [2, 3]])
        gathered = lax.all_gather(x, "device", axis_index_groups=[[0, 1], [2, 3]])
        small = lax.all_gather(x.astype(jnp.int4), "device")
        never = lax.scan(lambda c, _: (c + lax.psum(c, "device"), None), x, None, length=0)[0]
        return groups, gathered, small.astype(jnp.int8), xcoll.barrier(x, AXES), never

    ours = xcoll.optimize(shard(body))
    compiled = jax.jit(ours).lower(jnp.ones(8 * 40)).compile()
    assert ours.reports[-1].wire_bytes() == xcoll.hlo.wire_bytes(compiled, mesh_2x4())


def test_bytes_where_bodies_are_manual_over_different_axes():
    mesh = mesh_2x4()

    def f(x):
        part = jax.shard_map(
            lambda v: lax.psum(v, "host"),
            mesh=mesh,
            in_specs=P("host"),
            out_specs=P(),
            axis_names={"host"},
        )
        whole = jax.shard_map(
            lambda v: lax.psum(v, AXES), mesh=mesh, in_specs=P(AXES), out_specs=P()
        )
        return part(x).sum() + whole(x).sum()

    ours = xcoll.optimize(f)
    jax.jit(ours).lower(jnp.ones((8, 8)))
    # 4 x 8 floats over host (2 ranks: a payload each), 8 floats over a ring of 8 ranks (14/8 each).
    assert ours.reports[-1].wire_bytes() == {"host": 128 + 56, "device": 56}
