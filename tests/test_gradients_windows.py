"""Accumulation over windows of steps, and clipping by the norm of sharded gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradient_runs import conservation_bound, normal, residual_of
from spmd import CHECK_VMA, mesh_of

from xcoll import codecs, gradients
from xcoll.errors import UnknownAxisError
from xcoll.gradients import accumulate, clip_by_global_norm, reshard_residual, state_specs, sync

INT8 = gradients.error_feedback(codecs.int8())


def run_windows(optimizer, grads, mesh, check_vma, state=None):
    """Runs one jitted step after another; returns updates of rank 0 and the states between."""
    params = {k: jnp.zeros(v.shape[2:], v.dtype) for k, v in grads.items()}
    state = optimizer.init(params) if state is None else state
    specs = state_specs(state)
    step = jax.jit(
        jax.shard_map(
            lambda g, s: optimizer.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh,
            in_specs=(jax.P(mesh.axis_names), specs),
            out_specs=(jax.P(), specs),
            check_vma=check_vma,
        ),
        donate_argnums=1,
    )
    updates, states = [], []
    for number in range(len(next(iter(grads.values())))):
        update, state = step({k: v[number] for k, v in grads.items()}, state)
        updates.append(jax.tree.map(np.asarray, update))
        states.append(jax.tree.map(np.array, state))
    return updates, states


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_window_is_one_step_on_the_mean(ranks, check_vma):
    mesh = mesh_of(ranks)
    # Small integers, and windows of four: sums and their quarter are exact in any order.
    rng = np.random.default_rng(0)
    grads = {
        "b": rng.integers(-8, 8, (8, ranks, 3)).astype(np.float32),
        "w": rng.integers(-8, 8, (8, ranks, 4, 5)).astype(np.float32),
    }
    optimizer = accumulate(
        4, optax.chain(sync("i", op="sum"), optax.scale(-1.0)), axis_name="i", mesh=mesh
    )
    updates, states = run_windows(optimizer, grads, mesh, check_vma)
    for number, update in enumerate(updates):
        for name, value in update.items():
            window = grads[name][number - 3 : number + 1]
            want = -window.sum(1).mean(0) if number % 4 == 3 else np.zeros(value.shape)
            np.testing.assert_array_equal(value, want)
    # In between every rank has sums of its own.
    np.testing.assert_array_equal(states[1].sums[0].value, grads["b"][:2].sum(0))
    assert [int(s.count) for s in states] == [1, 2, 3, 0] * 2
    np.testing.assert_array_equal(states[3].sums[1].value, 0)


def test_the_inner_state_moves_once_in_a_window():
    mesh = mesh_of(2)
    grads = normal(np.random.default_rng(1), 6, 2, {"w": (7,)})
    optimizer = accumulate(3, optax.chain(sync("i"), optax.adam(0.1)), axis_name="i", mesh=mesh)
    updates, states = run_windows(optimizer, grads, mesh, True)
    assert [int(s.inner[1][0].count) for s in states] == [0, 0, 1, 1, 1, 2]
    # Adam's first step is the learning rate against the gradient's sign, epsilon apart.
    mean = np.float64(grads["w"][:3]).mean((0, 1))
    np.testing.assert_allclose(updates[2]["w"], -0.1 * np.sign(mean), rtol=1e-5)


def test_ranks_communicate_once_in_a_window():
    # The collective is in one branch of a conditional; nothing is outside.
    mesh = mesh_of(4)
    optimizer = accumulate(3, sync("i"), axis_name="i", mesh=mesh)
    state = optimizer.init(jnp.zeros(10))
    specs = state_specs(state)
    update = jax.shard_map(
        optimizer.update, mesh=mesh, in_specs=(jax.P("i"), specs), out_specs=(jax.P(), specs)
    )
    outside, inside = [], []

    def walk(jaxpr, found):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith(("psum", "all_", "reduce_scatter")):
                found.append(eqn.primitive.name)
            for key, value in eqn.params.items():
                bodies = value if isinstance(value, tuple) else (value,)
                for body in bodies:
                    if hasattr(body, "eqns"):
                        walk(body, inside if key == "branches" else found)

    walk(jax.make_jaxpr(update)(jnp.ones(40), state).jaxpr, outside)
    assert outside == [] and len(inside) == 1


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_feedback_inside_a_window(check_vma):
    ranks, every, steps = 4, 2, 12
    mesh = mesh_of(ranks)
    grads = normal(np.random.default_rng(2), steps, ranks, {"w": (300,)})
    optimizer = accumulate(every, sync("i", compressor=INT8, mesh=mesh), axis_name="i", mesh=mesh)
    updates, states = run_windows(optimizer, grads, mesh, check_vma)
    applied = np.sum([np.float64(u["w"]) for u in updates], 0)
    left = residual_of(states[-1].inner, ["w"])["w"]
    contributed = np.float64(grads["w"]).sum((0, 1)) / ranks / every
    # The windows' law, and the addition and the division in each of the windows.
    largest = (
        np.abs(grads["w"]).max() / ranks + np.abs(states[-1].inner.buckets[0].reduced.value).max()
    )
    bound = conservation_bound(steps // every, ranks, 2 * largest)
    bound += steps * 2 * 2**-24 * np.abs(grads["w"]).max()
    assert np.abs(applied + left - contributed).max() <= bound < np.abs(left).max() / 10


def test_narrow_gradients_are_summed_in_float32():
    mesh = mesh_of(2)
    # 256 + 1 is no bfloat16: added one by one in bfloat16 the ones would be lost.
    grads = {"w": np.ones((9, 2, 1), jnp.bfloat16)}
    grads["w"][0] = 256
    updates, states = run_windows(
        accumulate(9, sync("i"), axis_name="i", mesh=mesh), grads, mesh, True
    )
    assert states[0].sums[0].value.dtype == np.float32
    assert updates[-1]["w"].dtype == jnp.bfloat16
    assert float(updates[-1]["w"][0]) == float(jnp.bfloat16(264 / 9))


def test_resharding_between_windows():
    mesh = mesh_of(4)
    grads = normal(np.random.default_rng(3), 3, 4, {"w": (10,)})
    optimizer = accumulate(2, sync("i", compressor=INT8, mesh=mesh), axis_name="i", mesh=mesh)
    _, states = run_windows(optimizer, grads, mesh, True)
    with pytest.raises(ValueError, match="a window of accumulate is open, 1 steps in"):
        reshard_residual(states[2], 2)
    state = reshard_residual(states[1], 2)
    there = mesh_of(2)
    smaller = accumulate(2, sync("i", compressor=INT8, mesh=there), axis_name="i", mesh=there)
    updates, _ = run_windows(smaller, {"w": grads["w"][:, :2]}, there, True, state)
    assert np.isfinite(updates[1]["w"]).all() and (updates[1]["w"] != 0).any()
    with pytest.raises(ValueError, match=r"ranks \{'i': 4\}.*\{'i': 2\}.*reshard_residual"):
        run_windows(smaller, {"w": grads["w"][:, :2]}, there, True, states[1])


def test_what_accumulate_refuses():
    with pytest.raises(ValueError, match=r"accumulate\(every=0\): must be positive"):
        accumulate(0, sync("i"), axis_name="i")
    with pytest.raises(TypeError, match="must be an integer"):
        accumulate(2.0, sync("i"), axis_name="i")
    with pytest.raises(TypeError, match="must be an optax.GradientTransformation"):
        accumulate(2, "adam", axis_name="i")
    mesh = mesh_of(2)
    optimizer = accumulate(2, sync("i"), axis_name="i", mesh=mesh)
    specs = state_specs(optimizer.init(jnp.zeros(3)))

    def run(grad, spec, state):
        return jax.shard_map(
            optimizer.update, mesh=mesh, in_specs=(spec, specs), out_specs=(jax.P(), specs)
        )(grad, state)

    with pytest.raises(ValueError, match=r"accumulate: .*summed already"):
        run(jnp.ones(3), jax.P(), optimizer.init(jnp.zeros(3)))
    with pytest.raises(ValueError, match=r"\[\(1, 3\)\].*\[\(1, 4\)\]"):
        run(jnp.ones(8), jax.P("i"), optimizer.init(jnp.zeros(3)))


def test_integers_in_a_window():
    mesh = mesh_of(2)
    grads = {"n": np.full((1, 2, 3), 2**24 + 1, np.int32)}  # Float32 does not hold it.
    updates, _ = run_windows(
        accumulate(1, sync("i", op="sum"), axis_name="i", mesh=mesh), grads, mesh, True
    )
    np.testing.assert_array_equal(updates[0]["n"], 2**25 + 2)
    optimizer = accumulate(2, sync("i", op="sum"), axis_name="i", mesh=mesh)
    with pytest.raises(ValueError, match=r"\['n'\] has dtype int32, and a window's mean"):
        run_windows(optimizer, grads, mesh, True)


def test_further_arguments_reach_the_inner_transformation():
    mesh, params = mesh_of(2), jnp.full(3, 2.0)
    optimizer = accumulate(1, optax.chain(sync("i"), optax.polyak_sgd()), axis_name="i", mesh=mesh)
    state = optimizer.init(params)
    specs = state_specs(state)
    updates, _ = jax.shard_map(
        lambda g, s: optimizer.update(g[0], s, params, value=jnp.float32(0.5)),
        mesh=mesh,
        in_specs=(jax.P("i"), specs),
        out_specs=(jax.P(), specs),
    )(jnp.ones((2, 3)), state)
    # The value over the squared norm, times the gradient.
    np.testing.assert_allclose(updates, -0.5 / 3, rtol=4 * 2**-23)


def clipped(grads, specs, max_norm, mesh, axes, check_vma=True):
    clip = clip_by_global_norm(max_norm, axis_name=axes)
    return jax.jit(
        jax.shard_map(
            lambda g: clip.update(g, clip.init(g))[0],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=check_vma,
        )
    )(grads)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_sharded_gradients(max_norm, check_vma):
    mesh = mesh_of(4, 2, names=("data", "model"))
    rng = np.random.default_rng(4)
    grads = {"a": rng.standard_normal((8, 6)).astype(np.float32), "b": rng.standard_normal(16)}
    grads["b"] = grads["b"].astype(jnp.bfloat16)
    axes = ("data", "model")
    specs = {"a": jax.P("data", "model"), "b": jax.P(axes)}
    got = clipped(grads, specs, max_norm, mesh, axes, check_vma)
    norm = math.sqrt(sum((np.float64(g) ** 2).sum() for g in grads.values()))
    factor = min(1, max_norm / norm)
    for name, value in got.items():
        assert value.dtype == grads[name].dtype
        # The norm is a float32 sum of 64 squares; then two roundings, and one in the dtype.
        u = 2.0**-24 * 70 + (2.0**-8 if name == "b" else 0)
        np.testing.assert_allclose(np.float64(value), np.float64(grads[name]) * factor, rtol=u)
    if factor == 1:
        np.testing.assert_array_equal(got["a"], grads["a"])


def test_a_leaf_that_is_the_same_everywhere_counts_once():
    mesh = mesh_of(4, names=("data",))
    grads = {"cut": np.full(4, 2.0, np.float32), "same": np.full(1, 3.0, np.float32)}
    got = clipped(grads, {"cut": jax.P("data"), "same": jax.P()}, 1.0, mesh, "data")
    # 4 * 2^2 + 3^2 = 5^2.
    np.testing.assert_allclose(got["cut"], 0.4, rtol=1e-6)
    np.testing.assert_allclose(got["same"], 0.6, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_clipping_hides_nothing(value):
    mesh = mesh_of(2)
    grads = np.array([1.0, value], np.float32)
    assert np.isnan(clipped(grads, jax.P("i"), 1.0, mesh, "i")).any()


def test_what_clipping_refuses():
    for bad in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive and finite"):
            clip_by_global_norm(bad, axis_name="i")
    with pytest.raises(TypeError, match="must be a number"):
        clip_by_global_norm("1", axis_name="i")
    with pytest.raises(UnknownAxisError, match="'k'"):
        clipped(np.ones(2, np.float32), jax.P("i"), 1.0, mesh_of(2), "k")


def test_zero_gradients_stay_zero():
    got = clipped(np.zeros(4, np.float32), jax.P("i"), 1.0, mesh_of(2), "i")
    np.testing.assert_array_equal(got, 0)
