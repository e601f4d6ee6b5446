"""Keys of collectives that round at random: who needs one, and where it goes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import mesh_of
from test_marks import collectives, marked, shard

import xcoll
from xcoll import marks
from xcoll.sites import Scope, enter, read

P = jax.P
MESH = mesh_of(2, 2)
AXES = ("i", "j")
X = jnp.arange(1.0, 17.0).reshape(8, 2) / 16
SWAP = [(0, 1), (1, 0)]


RANDOM = xcoll.codecs.int8(rounding="stochastic")


CALLS = {
    "psum": (xcoll.psum, lax.psum, (AXES,), {}),
    "pmean": (xcoll.pmean, lax.pmean, (AXES,), {}),
    "psum_scatter": (xcoll.psum_scatter, lax.psum_scatter, ("i",), {}),
    "all_gather": (xcoll.all_gather, lax.all_gather, (AXES,), {"axis": 1}),
    "all_to_all": (xcoll.all_to_all, lax.all_to_all, ("i", 0, 1), {}),
    "ppermute": (xcoll.ppermute, lax.ppermute, ("i", SWAP), {}),
}


def keys_of(fn, *args):
    """The variable of the key of each collective of a sharded function, None where it has none."""
    jaxpr = jax.make_jaxpr(marked(fn, *args))(*args)
    (inner,) = [b for _, _, b, _ in enter(jaxpr.eqns[0], Scope())]
    known = marks.found(inner)
    return [known[e.invars[0]].key for e in inner.eqns if read(e) is not None]


@pytest.mark.parametrize("name", CALLS)
def test_a_key_reaches_the_collective_and_changes_no_value(name):
    ours, theirs, args, options = CALLS[name]

    def run(fn, **more):
        return shard(lambda x: fn(x, *args, **options, **more), False)

    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        keyed = run(ours, key=key)
        (found,) = keys_of(keyed, X)
        assert jnp.issubdtype(found.aval.dtype, jax.dtypes.prng_key) and found.aval.shape == ()
        np.testing.assert_array_equal(keyed(X), run(theirs)(X))
    (found,) = keys_of(run(ours), X)
    assert found is None


@pytest.mark.parametrize("name", CALLS)
def test_a_codec_that_rounds_at_random_needs_a_key(name):
    ours, theirs, args, options = CALLS[name]

    def run(**more):
        return shard(lambda x: ours(x, *args, **options, **more), False)

    with pytest.raises(ValueError, match=rf"{name}\(policy=...\): .*needs a key.*{name}\(.*key="):
        run(policy=xcoll.Policy(codec={name: RANDOM}))(X)
    with pytest.raises(ValueError, match="needs a key"):
        run(policy=xcoll.Policy(codec={"i": RANDOM}))(X)
    # Payloads as small as this stay exact.
    nearest = xcoll.Policy(codec={"i": "int8", "pmax": RANDOM, "other": RANDOM})
    want = shard(lambda x: theirs(x, *args, **options), False)(X)
    np.testing.assert_array_equal(run(policy=nearest)(X), want)
    np.testing.assert_array_equal(run(policy=nearest, key=jax.random.key(0))(X), want)
    with pytest.raises(TypeError, match=rf"{name}\(key=...\).*no PRNG key"):
        run(policy=nearest, key=jax.random.split(jax.random.key(0)))(X)


def test_the_key_goes_into_the_region():
    def fn(x, key):
        return xcoll.psum(x, AXES, policy=xcoll.Policy(codec=RANDOM), key=key)

    sharded = jax.shard_map(fn, mesh=MESH, in_specs=(P(AXES), P()), out_specs=P())
    jaxpr = jax.make_jaxpr(sharded)(X, jax.random.key(0))
    (body,) = [b for _, _, b, _ in enter(jaxpr.eqns[0], Scope())]
    (region,) = [e for e in body.eqns if e.primitive.name == "xcoll_region"]
    inner = region.params["call_jaxpr"]
    known = marks.found(inner)
    (key,) = [known[e.invars[0]].key for e in inner.eqns if read(e) is not None]
    assert region.invars[inner.invars.index(key)] is body.invars[1]


def test_leaves_have_keys_of_their_own():
    def body(a, b, key):
        return xcoll.psum([a, b], AXES, key=key)

    fn = jax.shard_map(body, mesh=MESH, in_specs=(P(AXES), P(AXES), P()), out_specs=P())
    one, two = keys_of(fn, X, X, jax.random.key(0))
    assert one is not None and two is not None and one is not two


def test_disabled_there_is_no_mark():
    fn = shard(lambda x: xcoll.psum(x, AXES, key=jax.random.key(0)), True, P())
    with xcoll.disable():
        assert "xcoll_mark" not in str(jax.make_jaxpr(fn)(X))
    assert "xcoll_mark" in str(jax.make_jaxpr(fn)(X))
    assert collectives(jax.make_jaxpr(fn)(X)) == [("psum", True)]


def test_constants_fold_as_in_jax_lax():
    fn = shard(lambda x: x * xcoll.psum(1, AXES, key=jax.random.key(0)), True)
    np.testing.assert_array_equal(fn(X), 4 * X)


def test_a_key_is_found_behind_what_jax_puts_in_between():
    key = jax.random.key(7)

    def body(x, key):
        a = lax.psum(marks.keyed(x, key), AXES)  # a cast to vary stands in between
        b = lax.all_to_all(marks.keyed(x.reshape(1, 2, 8), key), "i", 1, 0)
        return a, b

    spec = (P(), P())
    fn = jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=(P(), P("i")))
    jaxpr = jax.make_jaxpr(marked(fn, X, key))(X, key)
    (inner,) = [b for _, _, b, _ in enter(jaxpr.eqns[0], Scope())]
    known = marks.found(inner)
    sites = [e for e in inner.eqns if read(e) is not None]
    assert len(sites) == 2
    for eqn in sites:
        assert known[eqn.invars[0]].key is inner.invars[1]


def test_keys_in_derivatives_and_batches():
    key = jax.random.key(7)

    def fn(x, key):
        body = lambda x: lax.psum(marks.keyed(jnp.sin(x), key), AXES)  # noqa: E731
        return shard(body, True, P())(x)

    np.testing.assert_array_equal(
        fn(X, key), shard(lambda x: lax.psum(jnp.sin(x), AXES), True, P())(X)
    )
    gradient = jax.grad(lambda x: fn(x, key).sum())(X)
    np.testing.assert_array_equal(gradient, jnp.cos(X))
    batched = jax.vmap(fn, in_axes=(0, None))(jnp.stack([X, X]), key)
    assert batched.shape == (2, 2, 2)
    with pytest.raises(ValueError, match="key differs from element to element"):
        jax.vmap(fn, in_axes=(None, 0))(X, jax.random.split(key, 2))


@pytest.mark.parametrize(
    "key", [3, "seed", np.zeros(2, np.int32), np.zeros((1, 2), np.uint32), 1.5, [1, 2]]
)
def test_no_key(key):
    with pytest.raises(TypeError, match=r"psum\(key=...\).*no PRNG key.*jax.random.key"):
        marks.check_key("psum", key)


def test_several_keys_are_no_key():
    with pytest.raises(TypeError, match="not all"):
        marks.check_key("psum", jax.random.split(jax.random.key(0), 4))


def test_old_keys_are_wrapped():
    new = marks.check_key("psum", jax.random.PRNGKey(3))
    np.testing.assert_array_equal(jax.random.key_data(new), jax.random.PRNGKey(3))
