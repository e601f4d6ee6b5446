"""Residuals of padded buckets: what a code makes of the padding must not come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xcoll import codecs, gradients

RANKS, WIDTH, STEPS = 4, 300, 100


@pytest.mark.parametrize(
    "compressor",
    [
        gradients.sign(),
        gradients.sign(block=64),
        gradients.error_feedback(codecs.int4()),
        gradients.error_feedback(codecs.int4(rounding="stochastic")),
    ],
    ids=["sign", "sign(block=64)", "int4", "int4 by chance"],
)
def test_residuals_stay_bounded_and_are_zero_on_padding(compressor):
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    transformation = gradients.sync("data", compressor=compressor, mesh=mesh)
    params = jnp.zeros(WIDTH)
    state = transformation.init(params)
    specs = gradients.state_specs(state)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(jax.P("data"), specs), out_specs=(jax.P(), specs))
    def update(grads, state):
        return transformation.update(grads[0], state)

    rng = np.random.default_rng(0)
    applied, contributed = np.zeros(WIDTH), np.zeros(WIDTH)
    for _ in range(STEPS):
        grads = rng.standard_normal((RANKS, WIDTH)).astype(np.float32)
        total, state = update(grads, state)
        applied += np.asarray(total, np.float64)
        contributed += grads.astype(np.float64).mean(0)
    (bucket,) = state.buckets
    reduced = np.asarray(bucket.reduced.value).reshape(-1)
    # The shares of all ranks in turn are the bucket and its padding, which fills whole blocks.
    assert reduced.size > WIDTH and not reduced[WIDTH:].any()
    assert reduced[:WIDTH].any()
    # A code leaves at most (1 - 1 / block) of a block's sum of squares, so that a residual that is
    # fed values of norm |g| stays under 2 * block * |g|; |g| is about sqrt(ranks * width).
    largest = 2 * compressor.block * np.sqrt(RANKS * WIDTH)
    assert np.abs(reduced).max() < largest
    # What was applied lags behind by residuals only, which do not grow with the steps.
    assert np.abs(applied - contributed).max() < largest
