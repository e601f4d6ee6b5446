"""`sync` without a compressor: buckets, dtypes, what comes back, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradient_runs import as_varying, normal, run_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd import mesh_of, sum_bound

from xcoll import Policy, codecs, gradients
from xcoll.errors import UnknownAxisError
from xcoll.gradients import sync
from xcoll.gradients.buckets import fill_buckets
from xcoll.gradients.leaves import Leaf

SIZES = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from(["float32", "bfloat16", "int32"])), max_size=30
)


@settings(deadline=None)
@given(SIZES, st.integers(1, 300))
def test_buckets_hold_every_leaf_once_in_reverse_order(sizes, bucket_bytes):
    leaves = [Leaf(str(i), (n,), dtype, frozenset()) for i, (n, dtype) in enumerate(sizes)]
    buckets = fill_buckets(leaves, range(len(leaves)), ("data",), bucket_bytes)
    assert sorted(m for bucket in buckets for m in bucket) == list(range(len(leaves)))
    for bucket in buckets:
        assert list(bucket) == sorted(bucket, reverse=True)
        assert len({leaves[m].dtype for m in bucket}) == 1
        width = np.dtype(np.int32).itemsize if leaves[bucket[0]].dtype != "bfloat16" else 2
        total = sum(leaves[m].shape[0] * width for m in bucket)
        assert total <= bucket_bytes or len(bucket) == 1
    # Leaves of one dtype are not spread over more buckets than need be: two neighbouring buckets
    # of a dtype would not fit into one together with the next leaf.
    for dtype in ("float32", "bfloat16", "int32"):
        order = [m for b in buckets if leaves[b[0]].dtype == dtype for m in b]
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("compressor", [gradients.top_k(1e-12), gradients.random_k(1e-12)])
def test_the_smallest_fraction_sends_one_element(compressor):
    mesh = mesh_of(2)
    steps = run_steps(
        sync("i", compressor=compressor, mesh=mesh), {"w": np.ones((1, 2, 9), np.float32)}, mesh
    )
    assert np.count_nonzero(steps.applied["w"][0, 0]) == 1


def test_leaves_that_vary_over_other_axes_do_not_share_a_bucket():
    leaves = [
        Leaf("a", (4,), "float32", frozenset({"data"})),
        Leaf("b", (4,), "float32", frozenset({"data", "model"})),
        Leaf("c", (4,), "float32", frozenset({"data"})),
    ]
    assert fill_buckets(leaves, range(3), ("data",), 1000) == [(1,), (2, 0)] or fill_buckets(
        leaves, range(3), ("data",), 1000
    ) == [(2, 0), (1,)]


MIXED = {
    "bias": ((3,), "bfloat16"),
    "empty": ((0, 4), "float32"),
    "kernel": ((5, 7), "float32"),
    "long": ((1009,), "float32"),
    "one": ((1,), "float16"),
    "scalar": ((), "float32"),
    "wide": ((2, 2, 2), "bfloat16"),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 32 * 2**20])
def test_means_of_mixed_leaves(ranks, check_vma, bucket_bytes):
    mesh = mesh_of(ranks)
    rng = np.random.default_rng(0)
    grads = {
        k: rng.standard_normal((1, ranks, *shape)).astype(jnp.dtype(dtype))
        for k, (shape, dtype) in MIXED.items()
    }
    transformation = sync("i", bucket_bytes=bucket_bytes)
    steps = run_steps(transformation, grads, mesh, check_vma=check_vma)
    assert list(steps.applied) == list(MIXED)
    for name, got in steps.applied.items():
        shape, dtype = MIXED[name]
        assert got.shape == (1, ranks, *shape) and got.dtype == jnp.dtype(dtype)
        terms = grads[name][0]
        want = np.float64(terms).mean(0)
        # The sum's bound over n, and one rounding each of the division and of the result.
        u = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        slack = sum_bound(terms, dtype) / ranks + 2.1 * u * np.abs(np.float64(terms)).mean(0)
        for rank in range(ranks):
            assert (np.abs(np.float64(got[0, rank]) - want) <= slack).all(), name


def reduced(grads, transformation, ranks=4, check_vma=True):
    """Runs one update on trees whose leaves have a leading dimension of ranks."""
    mesh = mesh_of(ranks)

    def body(grads):
        own = jax.tree.map(lambda g: g[0], grads)
        return transformation.update(own, transformation.init(own))[0]

    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(), check_vma=check_vma)
    )(grads)


def collectives_of(fn, *args):
    names = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if re.match(r"psum|all_|reduce_scatter|ppermute", eqn.primitive.name):
                names.append((eqn.primitive.name, [v.aval.size for v in eqn.invars]))
            for value in eqn.params.values():
                if hasattr(value, "eqns"):
                    walk(value)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return names


def test_a_bucket_is_one_collective():
    grads = {f"p{i:02}": jnp.ones((4, 100)) for i in range(20)}
    found = collectives_of(lambda g: reduced(g, sync("i")), grads)
    assert [sizes for _, sizes in found] == [[2000]]
    # 400 bytes a leaf: two fit into 1000.
    found = collectives_of(lambda g: reduced(g, sync("i", bucket_bytes=1000)), grads)
    assert [sizes for _, sizes in found] == [[200]] * 10


def test_sums_of_integers_are_exact_and_means_refused():
    x = np.random.default_rng(1).integers(-(2**20), 2**20, (4, 9)).astype(np.int32)
    got = reduced({"n": x, "w": jnp.ones((4, 2))}, sync("i", op="sum"))
    np.testing.assert_array_equal(got["n"], x.sum(0))
    np.testing.assert_array_equal(got["w"], 4)
    with pytest.raises(ValueError, match=r"\['n'\] has dtype int32.*op='sum'"):
        reduced({"n": x}, sync("i"))


def test_integers_pass_a_compressor_exactly():
    x = np.arange(8, dtype=np.int32).reshape(4, 2)
    w = np.ones((4, 300), np.float32)
    compressor = gradients.error_feedback(codecs.int8())
    got = reduced({"n": x, "w": w}, sync("i", compressor=compressor, op="sum"))
    np.testing.assert_array_equal(got["n"], x.sum(0))
    np.testing.assert_array_equal(got["w"], 4)  # A power of two, exact in int8's scales.


def test_none_masked_and_float0_leaves_pass():
    nothing = np.zeros((4, 3), jax.dtypes.float0)
    mesh = mesh_of(4)

    def body(x):
        grads = {"a": x[0], "b": None, "c": optax.MaskedNode(), "d": nothing[0]}
        out, _ = sync("i").update(grads, optax.EmptyState())
        assert out["b"] is None and isinstance(out["c"], optax.MaskedNode)
        assert out["d"].dtype == jax.dtypes.float0
        return out["a"]

    run = jax.shard_map(body, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
    assert float(run(jnp.arange(4.0))) == 1.5
    assert reduced({}, sync("i")) == {}


@pytest.mark.parametrize("compressor", [None, gradients.top_k(1.0)])
def test_float16_means_do_not_overflow_in_the_sum(compressor):
    # 4 * 60000 is no float16, the mean is.
    x = np.full((4, 8), 60000, np.float16)
    got = reduced({"w": x}, sync("i", compressor=compressor))
    np.testing.assert_array_equal(got["w"], x[0])


@pytest.mark.parametrize("compressor", [None, gradients.error_feedback(codecs.int8())])
def test_a_leaf_that_was_summed_already_is_named(compressor):
    mesh = mesh_of(4, names=("data",))
    transformation = sync("data", compressor=compressor, mesh=mesh)

    def step(params, x, check_vma):
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x) + 0 * jnp.sum(p["v"]))(params)
        state = transformation.init(params)
        return transformation.update(grads, state)[0]

    def run(check_vma):
        return jax.shard_map(
            lambda p, x: step(p, x, check_vma),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
            check_vma=check_vma,
        )({"v": jnp.ones(2), "w": jnp.ones(1)}, jnp.arange(4.0))

    with pytest.raises(ValueError) as caught:
        run(True)
    message = str(caught.value)
    assert "['v']" in message and "('data',)" in message
    assert "jax.lax.pcast(params, ('data',), to='varying')" in message
    # Nothing sums by itself there, and the types do not say so.
    assert float(run(False)["w"][0]) == 1.5


def test_a_leaf_that_varies_over_one_of_two_axes_only():
    mesh = mesh_of(2, 2)

    def body(x):
        return sync(("i", "j")).update({"w": x}, optax.EmptyState())[0]

    with pytest.raises(ValueError, match=r"\['w'\] does not vary over \('j',\)"):
        jax.shard_map(body, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())(jnp.ones(2))


def test_the_policy_plans_the_buckets():
    x = np.random.default_rng(2).integers(-8, 8, (8, 4096)).astype(np.float32)
    got = reduced({"w": x}, sync("i", policy=Policy(algorithm="ring")), ranks=8)
    np.testing.assert_array_equal(got["w"], x.mean(0))  # Small integers: exact in any order.
    with pytest.raises(ValueError, match="no_such"):
        reduced({"w": x}, sync("i", policy=Policy(algorithm="no_such")), ranks=8)


def test_tensor_parallel_leaves_keep_their_type():
    mesh = mesh_of(2, 4, names=("data", "model"))
    compressor = gradients.error_feedback(codecs.int8())
    for transformation in (sync("data"), sync("data", compressor=compressor)):

        def body(cut, whole, transformation=transformation):
            own = {"cut": cut[0], "whole": whole[0]}
            return transformation.update(own, transformation.init(own))[0]

        cut = np.arange(2 * 8, dtype=np.float32).reshape(2, 8)
        whole = np.ones((2, 3), np.float32)
        # The output specs say that "whole" does not vary over the model axis, and are checked.
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(jax.P("data", "model"), jax.P("data")),
            out_specs={"cut": jax.P("model"), "whole": jax.P()},
        )
        got = jax.jit(run)(cut, whole)
        np.testing.assert_array_equal(got["whole"], 1)
        # Within int8's two roundings of values up to 11.5: 2 * 2 / 254 of it each.
        assert np.abs(got["cut"] - cut.mean(0)).max() <= 11.5 * 4 / 127


BAD = [
    (dict(axis_name=3), TypeError, r"sync\(axis_name=3\): must be an axis name"),
    (dict(axis_name=()), ValueError, "at least one"),
    (dict(axis_name=("i", "i")), ValueError, "each axis once"),
    (dict(bucket_bytes=0), ValueError, r"sync\(bucket_bytes=0\): must be positive"),
    (dict(bucket_bytes=1.5), TypeError, "must be an integer"),
    (dict(op="max"), ValueError, "unknown op 'max'; valid: 'mean', 'sum'"),
    (dict(policy="ring"), TypeError, "must be an xcoll.Policy"),
    (dict(compressor="top_k"), TypeError, "must be a gradients.Compressor"),
    (dict(compressor=codecs.int8()), TypeError, r"error_feedback\(codec\)"),
    (dict(compress_axis="i"), ValueError, "there is no compressor"),
    (
        dict(compressor=gradients.sign(), compress_axis="jj"),
        ValueError,
        "unknown axis 'jj'; valid: 'i'",
    ),
    (dict(mesh=8), TypeError, "must be a jax.sharding.Mesh"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        sync(**{"axis_name": "i", **options})


BAD_COMPRESSORS = [
    (lambda: gradients.top_k(0), ValueError, r"top_k\(fraction=0\): must be in \(0, 1\]"),
    (lambda: gradients.top_k(1.5), ValueError, r"must be in \(0, 1\]"),
    (lambda: gradients.top_k(float("nan")), ValueError, r"must be in \(0, 1\]"),
    (lambda: gradients.random_k(-0.1), ValueError, r"random_k\(fraction=-0.1\)"),
    (lambda: gradients.random_k("1%"), TypeError, "must be a number"),
    (lambda: gradients.powersgd(0), ValueError, r"powersgd\(rank=0\): must be positive"),
    (lambda: gradients.powersgd(2.0), TypeError, "must be an integer"),
    (lambda: gradients.sign(block=12), ValueError, "multiple of 8"),
    (lambda: gradients.sign(feedback=1), TypeError, "True or False"),
    (lambda: gradients.error_feedback("int8"), TypeError, r"must be a codec.*codecs\.int8\(\)"),
    (
        lambda: gradients.error_feedback(gradients.sign()),
        TypeError,
        "must be a codec",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_COMPRESSORS)
def test_bad_compressors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_unknown_axes_and_calls_outside():
    with pytest.raises(UnknownAxisError, match=r"sync\(axis_name='ii'\).*'i'"):
        reduced({"w": jnp.ones((4, 2))}, sync("ii"))
    with pytest.raises(UnknownAxisError, match="outside jax.shard_map"):
        sync("i").update({"w": jnp.ones(2)}, optax.EmptyState())
    with pytest.raises(ValueError, match=r"the mesh has no axis 'j'; it has \('i',\)"):
        sync("j", compressor=gradients.sign(), mesh=mesh_of(2)).init(jnp.ones(3))


def test_leaves_that_are_no_numbers():
    with pytest.raises(TypeError, match=r"\['flag'\] has dtype bool.*optax.masked"):
        reduced({"flag": jnp.ones((4, 2), bool)}, sync("i"))
    with pytest.raises(TypeError, match=r"\['name'\] is a str"):
        sync("i", compressor=gradients.sign(), mesh=mesh_of(2)).init({"name": "w"})


def test_under_optimize():
    from xcoll import optimize

    grads = normal(np.random.default_rng(3), 1, 4, {"w": (600,)})
    mesh = mesh_of(4)
    transformation = sync("i", compressor=gradients.error_feedback(codecs.int8()), mesh=mesh)
    specs = gradients.state_specs(jax.eval_shape(transformation.init, {"w": jnp.zeros(600)}))

    def step(g, s):
        updates, s = transformation.update({"w": g[0]}, s)
        return jax.tree.map(lambda u: as_varying(u, ("i",)), updates), s

    spec = (jax.P("i"), specs)
    plain = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    args = (grads["w"][0], transformation.init({"w": jnp.zeros(600)}))
    got = jax.jit(optimize(plain, policy=Policy(algorithm="ring")))(*args)
    want = jax.jit(plain)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
