"""Flax among the arguments: NNX modules and optimizers, Linen's TrainState."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax

import xcoll

P = jax.P
RING = xcoll.Policy(algorithm="ring")


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def batch():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((16, 4)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.tied = self.dense  # shared: one variable under two paths
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.norm(self.tied(jax.nn.relu(self.dense(x)))))


def nnx_step(model, optimizer, x):
    def loss(model, x):
        return jnp.mean((model(x) - x) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model, x)
    mean = jax.shard_map(
        lambda v: lax.pmean(v, "data"), mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    optimizer.update(model, mean(gradient))
    return value


def make_nnx():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("wrap", ["bare", "nnx.jit"])
def test_nnx_module_and_optimizer_are_updated(wrap):
    plain_model, plain_optimizer = make_nnx()
    model, optimizer = make_nnx()
    ours = xcoll.optimize(nnx_step, policy=RING)
    step = nnx.jit(ours) if wrap == "nnx.jit" else ours
    plain = nnx.jit(nnx_step) if wrap == "nnx.jit" else nnx_step
    for _ in range(2):
        value = step(model, optimizer, batch())
        expected = plain(plain_model, plain_optimizer, batch())
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert int(model.calls[...]) == 2
    assert model.tied is model.dense
    for a, b in zip(
        jax.tree.leaves(nnx.state((model, optimizer))),
        jax.tree.leaves(nnx.state((plain_model, plain_optimizer))),
        strict=True,
    ):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ours.reports[-1].rewritten


def test_structural_change_is_refused_with_the_fix():
    def grow(model, x):
        model.extra = nnx.Param(jnp.zeros(3))
        return model(x)

    model, _ = make_nnx()
    with pytest.raises(xcoll.UnsupportedError, match=r"structure of an NNX argument.*nnx\.jit"):
        xcoll.optimize(grow)(model, batch())


def test_returned_module_is_refused_with_the_fix():
    model, _ = make_nnx()
    with pytest.raises(xcoll.UnsupportedError, match=r"returns an NNX module.*nnx\.state"):
        xcoll.optimize(lambda m: m)(model)


def test_explain_leaves_modules_alone():
    model, optimizer = make_nnx()
    report = xcoll.explain(nnx_step, model, optimizer, batch(), policy=RING)
    assert report.rewritten
    assert int(model.calls[...]) == 0


def test_linen_train_state():
    net = linen.Dense(4)
    state = TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), batch()), tx=optax.sgd(0.1)
    )

    def step(state, x):
        params = lax.pcast(state.params, "data", to="varying")
        gradient = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - x) ** 2))(params)
        return state.apply_gradients(grads=lax.pmean(gradient, "data"))

    fn = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    ours = xcoll.optimize(fn, policy=RING)
    out, expected = jax.jit(ours)(state, batch()), jax.jit(fn)(state, batch())
    assert isinstance(out, TrainState) and int(out.step) == 1
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert [len(g) for g in ours.reports[-1].groups()] == [2]


def test_functional_style_takes_and_returns_states():
    model, _ = make_nnx()
    graph, state = nnx.split(model)

    def step(state, x):
        model = nnx.merge(graph, state)
        out = jax.shard_map(
            lambda v: lax.pmean(v, "data"), mesh=mesh(), in_specs=P("data"), out_specs=P()
        )(model(x))
        return nnx.split(model)[1], out

    ours = xcoll.optimize(step, policy=RING)
    new_state, out = jax.jit(ours)(state, batch())
    expected_state, expected = jax.jit(step)(state, batch())
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert isinstance(new_state, nnx.State)
    assert int(new_state["calls"][...]) == int(expected_state["calls"][...]) == 1
    assert ours.reports[-1].rewritten
