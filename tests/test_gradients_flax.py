"""Training Flax models with compressed gradients: NNX and Linen, in an `optax.chain`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from gradient_runs import COMPRESSORS
from spmd import mesh_of

from xcoll import codecs, gradients
from xcoll.gradients import accumulate, state_specs, sync

AXES = ("host", "device")


def data(steps):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((16, 4)).astype(np.float32)
    x = rng.standard_normal((steps, 64, 16)).astype(np.float32)
    return x, np.tanh(x @ weights)


def train(loss, params, optimizer, mesh, steps=60, check_vma=True):
    """Trains data-parallel in one jitted step, whose state is donated; returns the losses."""
    state = optimizer.init(params)
    specs = state_specs(state, params)

    def step(params, state, x, y):
        own = jax.lax.pcast(params, AXES, to="varying")
        value, grads = jax.value_and_grad(loss)(own, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, AXES)

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(jax.P(), specs, jax.P(AXES), jax.P(AXES)),
            out_specs=(jax.P(), specs, jax.P()),
            check_vma=check_vma,
        ),
        donate_argnums=(0, 1),
    )
    losses = []
    for x, y in zip(*data(steps), strict=True):
        params, state, value = run(params, state, x, y)
        losses.append(float(value))
    return np.array(losses)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.out = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.inner(x)))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(linen.relu(linen.Dense(32)(x)))


def nnx_model():
    graph, params = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)
    return params, lambda p, x, y: jnp.mean((nnx.merge(graph, p)(x) - y) ** 2)


def linen_model():
    model = Linen()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))
    return params, lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2)


MODELS = {"nnx": nnx_model, "linen": linen_model}


def optimizer(**options):
    return optax.chain(sync(AXES, **options), optax.clip_by_global_norm(1.0), optax.sgd(0.2))


@functools.cache
def exact_losses(model):
    """What training without compression loses: the same for every compressor."""
    params, loss = MODELS[model]()
    return train(loss, params, optimizer(), mesh_of(2, 4, names=AXES))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["int8", "int4", "sign", "top_k", "powersgd"])
def test_training_with_a_compressor(model, name):
    params, loss = MODELS[model]()
    mesh = mesh_of(2, 4, names=AXES)
    options = {"compressor": COMPRESSORS[name], "compress_axis": "host", "mesh": mesh}
    if name == "top_k":
        options["compressor"] = gradients.top_k(0.25)
    exact = exact_losses(model)
    got = train(loss, params, optimizer(**options), mesh, check_vma=model == "nnx")
    assert exact[-10:].mean() < exact[:3].mean() / 2, "the model does not learn"
    # What is not sent now is sent later: the loss is not far off, at these few steps.
    assert got[-10:].mean() < 1.25 * exact[-10:].mean()
    assert (got != exact).any()


def test_nnx_optimizer_and_accumulation():
    mesh = mesh_of(2, 4, names=AXES)
    model = Nnx(nnx.Rngs(0))
    compressor = gradients.error_feedback(codecs.int8())
    optimizer = accumulate(
        2,
        optax.chain(sync(AXES, compressor=compressor, mesh=mesh), optax.adam(1e-2)),
        axis_name=AXES,
        mesh=mesh,
    )
    body, params = nnx.split(model, nnx.Param)
    # The specs are of the state as optax made it: nnx.split would take it apart by name.
    opt_state = nnx.as_pure(nnx.Optimizer(model, optimizer, wrt=nnx.Param).opt_state)
    specs = state_specs(opt_state)

    def step(params, opt_state, x, y):
        model = nnx.merge(body, params)
        wrapped = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        nnx.update(wrapped.opt_state, nnx.state(opt_state))
        own = jax.lax.pcast(params, AXES, to="varying")
        grads = jax.grad(lambda p: jnp.mean((nnx.merge(body, p)(x) - y) ** 2))(own)
        wrapped.update(model, grads)
        return nnx.state(model, nnx.Param), nnx.as_pure(wrapped.opt_state)

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(jax.P(), specs, jax.P(AXES), jax.P(AXES)),
            out_specs=(jax.P(), specs),
        )
    )
    before = jax.tree.map(np.array, params)
    x, y = data(2)
    params, opt_state = run(params, opt_state, x[0], y[0])
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)
    params, opt_state = run(params, opt_state, x[1], y[1])
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
        # Adam's first step is as long as the learning rate, in float32 of values up to one.
        moved = np.abs(np.float64(a) - b)
        assert (moved <= 1e-2 + 2**-23).all() and moved.max() > 0.9e-2


def test_masked_and_labelled_transformations():
    mesh = mesh_of(2, 4, names=AXES)
    params = {"frozen": jnp.ones(3), "w": jnp.ones(500)}
    compressor = gradients.error_feedback(codecs.int8())
    optimizer = optax.chain(
        optax.masked(sync(AXES, compressor=compressor, mesh=mesh), {"frozen": False, "w": True}),
        optax.masked(sync(AXES), {"frozen": True, "w": False}),
    )
    state = optimizer.init(params)
    specs = state_specs(state)
    run = jax.shard_map(
        lambda g, s: optimizer.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(jax.P(AXES), specs),
        out_specs=(jax.P(), specs),
    )
    grads = {"frozen": jnp.arange(24.0).reshape(8, 3), "w": jnp.ones((8, 500))}
    updates, _ = jax.jit(run)(grads, state)
    np.testing.assert_array_equal(updates["frozen"], np.arange(24.0).reshape(8, 3).mean(0))
    np.testing.assert_array_equal(updates["w"], 1)
