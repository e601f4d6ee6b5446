"""Codecs and transformations: derivatives from outside are exact, those inside are compressed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import CHECK_VMA, assert_same_bits, mesh_of

import xcoll
from xcoll import Policy, codecs

P = jax.P
MESH = mesh_of(4)
CODEC = codecs.int8(block=32)
LOSSY = Policy(codec=CODEC, algorithm="direct", min_bytes=0)
X = np.random.default_rng(0).standard_normal((4 * 4, 67)).astype(np.float32)


SPLIT = P("i")


def shard(body, check_vma, out_specs=SPLIT):
    return jax.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=out_specs, check_vma=check_vma)


# Linear in x, so that the exact derivative does not depend on rounded values.
LINEAR = {
    "psum": lambda x: lax.psum(x, "i") * jnp.sin(jnp.arange(67.0)),
    "pmean": lambda x: lax.pmean(x, "i") * jnp.cos(jnp.arange(67.0)),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True) * 3.0,
    "all_gather": lambda x: lax.all_gather(x, "i") * jnp.arange(1.0, 68.0),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True) * 0.5,
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2)]) * 2.0,
}


def everything(x):
    return jnp.stack([fn(x).sum() for fn in LINEAR.values()])


def lossy_names(*reports):
    """The collectives that are compressed; what differentiation cuts has a report a part."""
    sites = [site for report in reports for site in report.sites]
    return sorted(s.collective for s in sites if s.plan is not None and s.plan.is_lossy)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_the_derivative_from_outside_is_the_exact_one(check_vma):
    """Bit for bit that of jax.lax: the cotangents travel exactly; the values do not."""
    fn = shard(lambda x: everything(x)[None], check_vma)
    ours = xcoll.optimize(fn, policy=LOSSY)
    weights = np.linspace(1, 2, 24, dtype=np.float32).reshape(4, 6)

    def loss(f):
        return lambda x: (f(x) * weights).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss(ours)))(X)
    reports = list(ours.reports)
    want_value, want = jax.jit(jax.value_and_grad(loss(fn)))(X)
    assert_same_bits(np.asarray(gradient), np.asarray(want))
    assert abs(value - want_value) > 1e-4  # the codec was there
    names = ["all_gather", "all_to_all", "ppermute", "psum", "psum", "psum_scatter"]
    assert lossy_names(*reports) == names
    _, tangent = jax.jvp(jax.jit(ours), (X,), (X,))
    _, want_tangent = jax.jvp(jax.jit(fn), (X,), (X,))
    assert_same_bits(np.asarray(tangent), np.asarray(want_tangent))


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_functional_calls_have_exact_derivatives_too(check_vma):
    def body(x, **policy):
        return (xcoll.psum(x, "i", **policy) ** 2)[None] + xcoll.all_gather(x, "i", **policy).sum()

    def gradient(**policy):
        fn = shard(lambda x: body(x, **policy), check_vma)
        return jax.jit(jax.grad(lambda x: fn(x).sum()))(X)

    # d psum(x)**2 = 2 psum(x): the factor is the rounded sum, to which the bound applies.
    got, want = np.asarray(gradient(policy=LOSSY)), np.asarray(gradient())
    bound = 4 * 2 * (2 / 127 * 1.01) * 4 * np.abs(X).max()
    assert 0 < np.abs(got - want).max() <= bound


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_a_gradient_taken_inside_is_compressed(check_vma):
    def body(x, w):
        def loss(w):
            return ((x @ w) ** 2).sum()

        # Each rank's own copy, so that the gradient is summed once in both modes.
        w = lax.pcast(w, "i", to="varying") if check_vma else w

        value, gradient = jax.value_and_grad(loss)(w)
        return lax.psum(value, "i"), lax.psum(gradient, "i")

    def run(f):
        sharded = jax.shard_map(
            f, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(), check_vma=check_vma
        )
        return jax.jit(sharded)(X, np.ones((67, 5), np.float32))

    ours = xcoll.optimize(body, policy=Policy(codec=CODEC, algorithm="ring", min_bytes=64))
    (value, gradient), (want_value, want) = run(ours), run(body)
    # The loss is under min_bytes and stays exact; the gradient is not and does not.
    assert lossy_names(ours.reports[-1]) == ["psum"]
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    assert (np.asarray(gradient) != np.asarray(want)).any()
    np.testing.assert_allclose(gradient, want, atol=0.1 * np.abs(want).max())


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_collectives_that_an_inner_gradient_makes_are_compressed(check_vma):
    """The transpose of an all-gather inside is a reduce-scatter of the program's own."""

    def body(x):
        return jax.grad(lambda x: (lax.all_gather(x, "i", tiled=True) ** 2).sum())(x)

    ours = xcoll.optimize(shard(body, check_vma), policy=LOSSY)
    got, want = np.asarray(jax.jit(ours)(X)), np.asarray(jax.jit(shard(body, check_vma))(X))
    assert lossy_names(ours.reports[-1]) == ["all_gather", "psum_scatter"]
    assert 0 < np.abs(got - want).max() <= 0.1 * np.abs(want).max()


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_backward_codec_compresses_the_derived_ones(check_vma):
    fn = shard(lambda x: lax.all_gather(jnp.sin(x), "i", tiled=True)[None] ** 2, check_vma)

    def gradient(f):
        return np.asarray(jax.jit(jax.grad(lambda x: f(x).sum()))(X))

    want, reports = gradient(fn), {}
    for name, policy in {
        "none": Policy(algorithm="direct", min_bytes=0),
        "forward": LOSSY,
        "backward": Policy(backward_codec=CODEC, algorithm="direct", min_bytes=0),
        "both": Policy(codec=CODEC, backward_codec={"i": CODEC}, algorithm="direct", min_bytes=0),
    }.items():
        ours = xcoll.optimize(fn, policy=policy)
        assert np.abs(gradient(ours) - want).max() <= 0.2 * np.abs(want).max()
        reports[name] = lossy_names(*ours.reports)
    assert reports == {
        "none": [],
        "forward": ["all_gather"],
        "backward": ["psum_scatter"],
        "both": ["all_gather", "psum_scatter"],
    }


def test_backward_codec_of_one_collective():
    fn = shard(lambda x: lax.psum_scatter(jnp.sin(x), "i", tiled=True), False)
    for named, expected in (("all_gather", ["all_gather"]), ("psum_scatter", [])):
        policy = Policy(backward_codec={named: CODEC}, algorithm="direct", min_bytes=0)
        ours = xcoll.optimize(fn, policy=policy)
        jax.jit(jax.grad(lambda x, ours=ours: ours(x).sum()))(X)
        assert lossy_names(*ours.reports) == expected


# Each is a body whose psum is under another transformation or in another body.
def step(x):
    return lax.psum(x, "i") / 4 + x


def scanned(x):
    return lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]


@jax.custom_vjp
def custom(x):
    return step(x)


custom.defvjp(lambda x: (step(x), x), lambda x, ct: (lax.psum(ct, "i") + ct,))

BODIES = {
    "vmap": lambda x: jax.vmap(step)(x.reshape(4, 67)),
    "scan": scanned,
    "cond": lambda x: lax.cond(lax.psum(x[0, 0], "i") > 1e9, lambda x: x * 2, step, x),
    "while": lambda x: lax.fori_loop(0, 2, lambda _, c: step(c), x),
    "remat": jax.checkpoint(lambda x: step(jnp.sin(step(x)))),
    "custom_vjp": custom,
    "jit": lambda x: jax.jit(step)(x),
}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", BODIES)
def test_bodies_and_transformations(name, check_vma):
    """The value is compressed wherever the sum stands; the derivative from outside is close."""
    fn = shard(BODIES[name], check_vma)
    # A scalar under 64 bytes stays exact, so that a branch is taken alike.
    ours = xcoll.optimize(fn, policy=Policy(codec=CODEC, algorithm="direct", min_bytes=64))
    got, want = np.asarray(jax.jit(ours)(X)), np.asarray(jax.jit(fn)(X))
    assert "psum" in lossy_names(ours.reports[-1])
    # Two roundings to nearest of 8 bits, three times at most, each of a mean of four.
    assert 0 < np.abs(got - want).max() <= 3 * 2 * (2 / 127 * 1.01) * np.abs(X).max() * 4
    if name != "while":
        gradient = np.asarray(jax.jit(jax.grad(lambda x: ours(x).sum()))(X))
        exact = np.asarray(jax.jit(jax.grad(lambda x: fn(x).sum()))(X))
        if name == "remat":  # cos of a compressed sum
            np.testing.assert_allclose(gradient, exact, atol=0.2)
        else:
            np.testing.assert_allclose(gradient, exact, rtol=1e-6)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_vmap_over_all_ranks_and_eager(check_vma):
    fn = shard(step, check_vma)
    ours = xcoll.optimize(fn, policy=LOSSY)
    once = np.asarray(ours(X))  # eager
    assert_same_bits(np.asarray(jax.jit(ours)(X)), once)
    batched = np.asarray(jax.jit(jax.vmap(ours))(np.stack([X, 2 * X])))
    want = np.stack([fn(X), fn(2 * X)])
    assert 0 < np.abs(batched - want).max() <= 2 * (2 / 127 * 1.01) * 2 * np.abs(X).max() * 4
    assert_same_bits(jax.jit(xcoll.optimize(jax.jit(fn), policy=LOSSY))(X), once)


def test_the_innermost_policy_holds():
    def body(x):
        inner = xcoll.optimize(lambda x: lax.psum(x, "i"), policy=Policy.native())
        return inner(x) + xcoll.psum(x, "i", policy=Policy(algorithm="ring")) + lax.psum(x, "i")

    ours = xcoll.optimize(shard(body, False), policy=LOSSY)
    jax.jit(ours)(X)
    by_source = [(site.kept_reason or "", site.plan.is_lossy) for site in ours.reports[-1].sites]
    assert [lossy for _, lossy in by_source] == [False, False, True]
    assert all("inner" in reason for reason, _ in by_source[:2])

    def exact_outside(x):
        return xcoll.psum(x, "i", policy=LOSSY) + lax.psum(x, "i")

    fn = shard(lambda x: lax.psum(x, "i"), False)
    got = jax.jit(xcoll.optimize(shard(exact_outside, False)))(X)
    lossy = np.asarray(got) - np.asarray(jax.jit(fn)(X))
    want = jax.jit(xcoll.optimize(fn, policy=LOSSY))(X)
    np.testing.assert_allclose(lossy, want, atol=1e-5)


def test_disable_gives_the_exact_program():
    fn = shard(step, True)
    ours = xcoll.optimize(fn, policy=LOSSY)
    with xcoll.disable():
        got = jax.jit(ours)(X)
    assert_same_bits(np.asarray(got), np.asarray(jax.jit(fn)(X)))


def test_the_report_shows_the_bound():
    ours = xcoll.optimize(shard(step, True), policy=LOSSY)
    jax.jit(ours)(X)
    (plan,) = json.loads(ours.reports[-1].to_json())["plans"].values()
    # Two roundings of 1/127 each, and sums in float32.
    assert 2 / 127 <= plan["max_error"] <= 2 / 127 + 1 / 127**2 + 1e-5
