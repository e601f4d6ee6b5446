"""The state of compressors: shapes and specs, saving, other ranks, values that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from gradient_runs import COMPRESSORS, SLOW_TO_COMPILE, normal, residual_of, run_steps
from spmd import assert_same_bits, mesh_of

from xcoll import codecs, gradients
from xcoll.gradients import error_feedback, powersgd, reshard_residual, state_specs, sync, top_k

INT8 = error_feedback(codecs.int8())


def test_shapes_and_specs_of_a_chain():
    mesh = mesh_of(4, names=("data",))
    optimizer = optax.chain(sync("data", compressor=INT8, mesh=mesh), optax.adam(1e-3))
    params = {"w": jnp.zeros((100, 10)), "b": jnp.zeros(10)}
    state = jax.eval_shape(optimizer.init, params)
    (bucket,) = state[0].buckets
    # 1010 elements are four blocks of 256, one a rank.
    assert bucket.contributed.value.shape == (4, 1024)
    assert bucket.reduced.value.shape == (4, 256)
    assert bucket.contributed.value.dtype == bucket.reduced.value.dtype == jnp.float32
    # Filled from the last leaf to the first: dictionaries are ordered by key.
    assert bucket.layout.names == ("['w']", "['b']")
    model = {"w": jax.P("model"), "b": jax.P()}
    specs = state_specs(state, params, model)
    assert specs[0].buckets[0].contributed.value == jax.P("data")
    assert specs[0].step == jax.P()
    assert specs[1][0].mu == model and specs[1][0].nu == model and specs[1][0].count == jax.P()
    assert state_specs(state)[1][0].mu == {"w": jax.P(), "b": jax.P()}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_state_lies_on_its_ranks(kind):
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((4,), ("data",), kinds, devices=jax.devices()[:4])
    state = sync("data", compressor=INT8, mesh=mesh).init(jnp.zeros(1000))
    value = state.buckets[0].contributed.value
    assert {s.data.shape for s in value.addressable_shards} == {(1, 1024)}
    with jax.set_mesh(mesh):
        here = sync("data", compressor=INT8).init(jnp.zeros(1000))
        jitted = jax.jit(sync("data", compressor=INT8).init)(jnp.zeros(1000))
    for other in (here, jitted):
        assert_same_bits(other, state)
        assert other.buckets[0].contributed.value.sharding.is_equivalent_to(value.sharding, 2)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_init_inside_shard_map_is_init_outside(name):
    mesh = mesh_of(2, 2)
    transformation = sync(("i", "j"), compressor=COMPRESSORS[name], compress_axis="j", mesh=mesh)
    params = {"w": jnp.ones((20, 30)), "b": jnp.ones(7)}
    outside = transformation.init(params)
    specs = state_specs(outside)
    inside = jax.jit(
        jax.shard_map(transformation.init, mesh=mesh, in_specs=jax.P(), out_specs=specs)
    )(params)
    assert_same_bits(inside, outside)


def test_states_of_the_same_parameters_are_alike_however_they_are_wrapped():
    mesh = mesh_of(2)
    transformation = sync("i", compressor=INT8, mesh=mesh)
    wrapped = transformation.init({"w": nnx.Param(jnp.zeros(3))})
    plain = transformation.init({"w": jnp.zeros(3)})
    assert jax.tree.structure(wrapped) == jax.tree.structure(plain)


def test_the_number_of_ranks_must_be_known():
    with pytest.raises(ValueError, match=r"outside jax.shard_map.*pass mesh=.*jax.set_mesh"):
        sync("data", compressor=INT8).init(jnp.zeros(3))


def wrong(state_of, grads, mesh, specs=None):
    transformation = sync("i", compressor=INT8, mesh=mesh)
    state = transformation.init(state_of)
    specs = state_specs(state) if specs is None else specs
    return jax.shard_map(
        lambda g, s: transformation.update(jax.tree.map(lambda x: x[0], g), s)[0],
        mesh=mesh,
        in_specs=(jax.P("i"), specs),
        out_specs=jax.P(),
    )(grads, state)


def test_a_state_of_other_shapes_shows_both():
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match=r"state of \['w'\] has shape \(3, 4\).* \(4, 3\)"):
        wrong({"w": jnp.zeros((3, 4))}, {"w": jnp.zeros((2, 4, 3))}, mesh)
    with pytest.raises(ValueError, match=r"\['w'\] of shape \(5,\).*1 leaves"):
        wrong({"v": jnp.zeros(2), "w": jnp.zeros(5)}, {"v": jnp.zeros((2, 2))}, mesh)


def test_a_state_passed_as_replicated():
    with pytest.raises(ValueError, match=r"shape \(2, 512\).*\(1, 512\).*gradients.state_specs"):
        wrong({"w": jnp.zeros(3)}, {"w": jnp.zeros((2, 3))}, mesh_of(2), specs=jax.P())


def test_a_state_of_something_else():
    mesh = mesh_of(2)

    def body(g):
        return sync("i", compressor=INT8).update(g, optax.EmptyState())[0]

    with pytest.raises(TypeError, match="the state is a EmptyState"):
        jax.shard_map(body, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())(jnp.ones(4))


def test_a_state_of_fewer_leaves():
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match=r"of 2 leaves, the gradients have 3: \['u'\], \['v'\]"):
        grads = {name: jnp.zeros((2, 3)) for name in "uvw"}
        wrong({"u": jnp.zeros(3), "w": jnp.zeros(3)}, grads, mesh)


OTHERS = {
    "int8": gradients.error_feedback(codecs.int8()),
    "block": gradients.error_feedback(codecs.int8(block=64)),
    "stateless": gradients.error_feedback(codecs.int8(), feedback=False),
    "top_k": top_k(0.1),
    "powersgd": gradients.powersgd(2),
    "rank": gradients.powersgd(3),
}


@pytest.mark.parametrize(
    ("made_by", "used_by"),
    [(a, b) for a in OTHERS for b in OTHERS if a != b and "int8" in (a, b)]
    + [("powersgd", "rank"), ("rank", "powersgd"), ("top_k", "powersgd")],
)
def test_a_state_of_another_compressor(made_by, used_by):
    mesh, params = mesh_of(2), {"w": jnp.zeros((40, 24))}
    state = sync("i", compressor=OTHERS[made_by], mesh=mesh).init(params)
    specs = state_specs(state)
    run = jax.shard_map(
        lambda s: sync("i", compressor=OTHERS[used_by]).update(
            jax.lax.pcast(params, "i", to="varying"), s
        ),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(jax.P(), specs),
    )
    with pytest.raises(ValueError, match="made by another compressor than"):
        jax.eval_shape(run, state)


def test_a_state_of_other_axes_or_for_no_compressor():
    mesh, params = mesh_of(2, 2, names=("i", "j")), jnp.zeros(9)
    state = sync(("i", "j"), compressor=INT8, compress_axis="i", mesh=mesh).init(params)
    specs = state_specs(state)

    def run(transformation):
        jax.eval_shape(
            jax.shard_map(
                lambda s: transformation.update(jax.lax.pcast(params, ("i", "j"), to="varying"), s),
                mesh=mesh,
                in_specs=(specs,),
                out_specs=(jax.P(), specs),
            ),
            state,
        )

    with pytest.raises(ValueError, match=r"compress_axis=\('i',\).*\('i', 'j'\) and \('i', 'j'\)"):
        run(sync(("i", "j"), compressor=INT8))
    with pytest.raises(TypeError, match="and this one has none"):
        run(sync(("i", "j")))


def test_parameters_of_numpys_float64_are_compressed():
    state = sync("i", compressor=INT8, mesh=mesh_of(2)).init({"w": np.zeros(9)})
    assert [bucket.layout.names for bucket in state.buckets] == [("['w']",)]


def test_a_state_of_other_ranks():
    state = sync("i", compressor=INT8, mesh=mesh_of(4)).init(jnp.zeros(3))
    transformation = sync("i", compressor=INT8)
    run = jax.shard_map(
        lambda g, s: transformation.update(g[0], s),
        mesh=mesh_of(2),
        in_specs=(jax.P("i"), state_specs(state)),
        out_specs=(jax.P(), state_specs(state)),
    )
    with pytest.raises(ValueError, match=r"\{'i': 4\}.*\{'i': 2\}.*reshard_residual"):
        run(jnp.zeros((2, 3)), jax.tree.map(np.asarray, state))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, np.nan) for name in COMPRESSORS if name not in SLOW_TO_COMPILE),
        ("int8", np.inf),
        ("top_k", -np.inf),
    ],
)
def test_what_is_not_finite_shows_and_leaves_the_residual(name, value):
    ranks, bad = 4, 300
    mesh = mesh_of(ranks)
    transformation = sync("i", compressor=COMPRESSORS[name], mesh=mesh)
    grads = normal(np.random.default_rng(0), 3, ranks, {"w": (32, 64)})
    before = run_steps(transformation, {"w": grads["w"][:1]}, mesh)
    grads["w"][1, 2].reshape(-1)[bad] = value
    after = run_steps(
        transformation, {"w": grads["w"][1:2]}, mesh, state=jax.tree.map(jnp.asarray, before.state)
    )
    applied = after.applied["w"][0].reshape(ranks, -1)
    is_bad = ~np.isfinite(applied[0])
    assert is_bad[bad]
    for rank in range(ranks):
        assert applied[rank].tobytes() == applied[0].tobytes()
    block = before.state.buckets[0].layout.block
    if block:
        # Only the value's own block, counted from the bucket's start.
        assert not np.delete(
            is_bad, np.arange(bad // block * block, (bad // block + 1) * block)
        ).any()
    else:
        assert is_bad.all()
    old, new = before.state.buckets[0], after.state.buckets[0]
    np.testing.assert_array_equal(
        new.contributed.value[:, : is_bad.size][:, is_bad],
        old.contributed.value[:, : is_bad.size][:, is_bad],
    )
    if old.reduced is not None:
        np.testing.assert_array_equal(
            new.reduced.value.reshape(-1)[: is_bad.size][is_bad],
            old.reduced.value.reshape(-1)[: is_bad.size][is_bad],
        )
    for f, g in zip(old.factors, new.factors, strict=True):
        np.testing.assert_array_equal(f.value, g.value)
    # Elsewhere the step was an ordinary one, and all goes on afterwards.
    assert is_bad.all() or (new.contributed.value != old.contributed.value).any()
    last = run_steps(
        transformation, {"w": grads["w"][2:]}, mesh, state=jax.tree.map(jnp.asarray, after.state)
    )
    assert np.isfinite(last.applied["w"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.state))


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "top_k", "random_k", "powersgd"])
def test_tiny_and_huge_gradients(name):
    mesh = mesh_of(2)
    transformation = sync("i", compressor=COMPRESSORS[name], mesh=mesh)
    x = np.random.default_rng(1).uniform(-1, 1, (1, 2, 20, 30))
    for scale in (0.0, 1e-42, 1e-30, 1e30, 3e38):
        grads = {"w": (x * scale).astype(np.float32)}
        applied = np.float64(run_steps(transformation, grads, mesh).applied["w"])
        if name == "powersgd":
            # It multiplies gradients by factors, which may overflow, and then it says so.
            assert np.isfinite(applied).all() or scale > 1e38
            continue
        # The mean is finite, and so is all that makes it. Nothing is applied beyond the largest
        # mean of magnitudes, rounded up twice by at most as much again.
        assert np.abs(applied).max() <= 4 * np.abs(np.float64(grads["w"])).max()


@pytest.mark.parametrize("name", ["int8", "random_k", "powersgd"])
def test_orbax_saves_and_restores_bit_for_bit(name, tmp_path):
    mesh = mesh_of(4, names=("data",))
    optimizer = sync("data", compressor=COMPRESSORS[name], mesh=mesh)
    grads = normal(np.random.default_rng(2), 4, 4, {"b": (5,), "w": (20, 30)})
    first = run_steps(optimizer, {k: v[:2] for k, v in grads.items()}, mesh)
    specs = state_specs(first.state)
    placed = jax.device_put(first.state, jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", placed)
        checkpointer.wait_until_finished()
        target = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), placed
        )
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_same_bits(restored, placed)
    assert jax.tree.structure(restored) == jax.tree.structure(
        optimizer.init({k: jnp.zeros(v.shape[2:]) for k, v in grads.items()})
    )
    rest = {k: v[2:] for k, v in grads.items()}
    on = run_steps(optimizer, rest, mesh, state=restored)
    whole = run_steps(optimizer, grads, mesh)
    assert_same_bits(on.state, whole.state)
    assert_same_bits(on.applied, {k: v[2:] for k, v in whole.applied.items()})


@pytest.mark.parametrize(
    ("name", "new"),
    [("int8", 1), ("int8", 3), ("int8", 8), ("top_k", 3), ("powersgd", 1), ("powersgd", 5)],
)
def test_resharding_conserves_the_sum_over_ranks(name, new):
    mesh = mesh_of(4)
    grads = normal(np.random.default_rng(3), 3, 4, {"b": (5,), "w": (20, 31)})
    optimizer = optax.chain(sync("i", compressor=COMPRESSORS[name], mesh=mesh), optax.scale(1.0))
    steps = run_steps(optimizer, grads, mesh)
    names = sorted(grads)
    old = residual_of(steps.state[0], names)
    resharded = reshard_residual(steps.state, new)
    got = residual_of(resharded[0], names)
    for leaf, want in old.items():
        # One rounding of the first rank's part for each of the two residuals; a part is at most
        # the sum.
        bound = 2 * 2**-24 * (np.abs(want).max() + 2 * 4 * np.abs(grads[leaf]).max())
        assert np.abs(got[leaf] - want).max() <= bound
        assert np.abs(want).max() > 10 * bound
    # It is a state of the new mesh, and goes on there.
    more = normal(np.random.default_rng(4), 1, new, {"b": (5,), "w": (20, 31)})
    there = mesh_of(new)
    fresh = optax.chain(sync("i", compressor=COMPRESSORS[name], mesh=there), optax.scale(1.0))
    expected = jax.eval_shape(fresh.init, {k: jnp.zeros(v.shape[2:]) for k, v in more.items()})
    assert jax.tree.structure(resharded) == jax.tree.structure(expected)
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(resharded)]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(expected)]
    assert np.isfinite(run_steps(fresh, more, there, state=resharded).applied["w"]).all()


@pytest.mark.parametrize("name", ["int4", "top_k", "powersgd"])
def test_resharding_a_hierarchy(name):
    mesh = mesh_of(4, 2, names=("device", "host"))
    options = {"compressor": COMPRESSORS[name], "compress_axis": "host"}
    grads = normal(np.random.default_rng(5), 3, 8, {"b": (5,), "w": (20, 31)})
    steps = run_steps(sync(("device", "host"), mesh=mesh, **options), grads, mesh)
    names = sorted(grads)
    old = residual_of(steps.state, names)
    resharded = reshard_residual(steps.state, {"device": 3, "host": 1})
    got = residual_of(resharded, names)
    for leaf, want in old.items():
        bound = 2 * 2**-24 * (np.abs(want).max() + 2 * 8 * np.abs(grads[leaf]).max())
        assert np.abs(got[leaf] - want).max() <= bound
    there = jax.sharding.AbstractMesh((3, 1), ("device", "host"))
    fresh = sync(("device", "host"), mesh=there, **options)
    expected = jax.eval_shape(fresh.init, {k: jnp.zeros(v.shape[2:]) for k, v in grads.items()})
    assert jax.tree.structure(resharded) == jax.tree.structure(expected)
    assert [x.shape for x in jax.tree.leaves(resharded)] == [
        x.shape for x in jax.tree.leaves(expected)
    ]


def test_resharding_says_what_it_cannot():
    mesh = jax.sharding.AbstractMesh((2, 2), ("i", "j"))
    state = sync(("i", "j"), compressor=top_k(0.1), mesh=mesh).init(jnp.zeros(9))
    with pytest.raises(ValueError, match=r"several axes, \{'i': 2, 'j': 2\}"):
        reshard_residual(state, 3)
    with pytest.raises(ValueError, match="no axis 'k'"):
        reshard_residual(state, {"k": 3})
    with pytest.raises(ValueError, match="positive"):
        reshard_residual(state, {"i": 0})
    with pytest.raises(TypeError, match="number of ranks"):
        reshard_residual(state, "3")
    with pytest.raises(ValueError, match="no feedback"):
        reshard_residual(optax.adam(1.0).init(jnp.zeros(3)), 3)


def test_a_compressor_of_ones_own():
    import dataclasses

    from xcoll.gradients.compressor import Reduced

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half(gradients.Compressor):
        """Applies half of everything, and keeps the other half."""

        def reduce(self, x, carried, factors, layout, channel):
            return Reduced(jax.lax.psum(x / 2, channel.axes), x / 2)

    mesh = mesh_of(2)
    grads = {"w": np.ones((3, 2, 4), np.float32)}
    steps = run_steps(sync("i", compressor=Half(), mesh=mesh), grads, mesh)
    np.testing.assert_array_equal(steps.applied["w"][:, 0, 0], [0.5, 0.75, 0.875])
    assert powersgd(1) != top_k(1.0) and powersgd(1) == powersgd(1)
