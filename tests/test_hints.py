"""Hints: each doubtful program gets one, and nothing else does."""

from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import xcoll
from xcoll.hints import find_hints
from xcoll.sites import Scope

P = jax.P
W = jnp.ones(3)
X = jnp.arange(24.0).reshape(8, 3)


def mesh(*shape):
    names = ("i", "j")[: len(shape)]
    devices = jax.devices()[: math.prod(shape)]
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


def shard(body, check_vma=True, num_ranks=8):
    specs = {"in_specs": (P(), P("i")), "out_specs": P() if check_vma else P("i")}
    return jax.shard_map(body, mesh=mesh(num_ranks), check_vma=check_vma, **specs)


def hints(fn, *args):
    return list(find_hints(jax.make_jaxpr(fn)(*(args or (W, X)))))


def loss(w, x):
    return ((w * x) ** 2).mean()


def mean(tree):
    return jax.tree.map(lambda v: lax.pmean(v, "i"), tree)


# Steps whose gradient is the sum of the ranks' where the mean was meant.


def plain(w, x):
    return mean(jax.grad(loss)(w, x))


def jitted_loss(w, x):
    return mean(jax.grad(jax.jit(loss))(w, x))


def jitted_gradient(w, x):
    value, gradient = jax.jit(jax.value_and_grad(loss))(w, x)
    return mean(value), mean(gradient)


def jitted_mean(w, x):
    return jax.jit(mean)(jax.grad(loss)(w, x))


def checkpointed(w, x):
    return mean(jax.grad(jax.checkpoint(loss))(w, x))


def layers(w, x):
    def deep(w, x):
        return lax.scan(lambda h, v: (jnp.tanh(h * v), None), x, jnp.stack([w, w]))[0].sum()

    return mean(jax.grad(deep)(w, x))


def stacked_layers(w, x):
    def deep(ws):
        return lax.scan(jax.checkpoint(lambda h, v: (jnp.tanh(h * v), None)), x, ws)[0].sum()

    return mean(jax.grad(deep)(jnp.stack([w, w])))


def tied_layers(w, x):
    def deep(w):
        return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h * w), x).sum()

    return mean(jax.grad(deep)(w))


def accumulated(w, x):
    def add(total, batch):
        return total + jax.grad(loss)(w, batch), None

    total, _ = lax.scan(add, jnp.zeros_like(w), jnp.stack([x, x]))
    return mean(total / 2)


def accumulated_tree(w, x):
    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.jit(jax.grad(loss))(w, batch)), None

    total, _ = lax.scan(add, optax.tree.zeros_like(w), jnp.stack([x, x, x]))
    return mean(jax.tree.map(lambda v: v / 3, total))


def accumulated_in_while(w, x):
    def add(state):
        k, total = state
        return k + 1, total + jax.grad(loss)(w, x)

    return mean(lax.while_loop(lambda s: s[0] < 3, add, (0, jnp.zeros_like(w)))[1])


def ours(w, x):
    return xcoll.pmean(jax.grad(loss)(w, x), "i")


def ours_in_jit(w, x):
    return jax.jit(lambda g: xcoll.pmean(g, "i"))(jax.grad(jax.checkpoint(loss))(w, x))


def tied(w, x):
    return mean(jax.grad(lambda w: loss(w, x) + loss(2 * w, x))(w))


def decayed(w, x):
    return mean(jax.grad(lambda w: loss(w, x) + 0.1 * (w**2).sum())(w))


def raveled(w, x):
    gradients = jax.grad(lambda p: loss(p[0] - p[1], x))((w, 2 * w))
    return mean(jnp.concatenate(gradients))


def skipped(w, x):
    gradient = jax.grad(loss)(w, x)
    return mean(jnp.where(jnp.isfinite(gradient), gradient, 0))


def branched(w, x):
    gradient = jax.grad(loss)(w, x)
    return mean(lax.cond(w[0] > 0, lambda: gradient, lambda: jnp.zeros_like(gradient)))


def custom(w, x):
    @jax.custom_vjp
    def f(w):
        return w * 2

    f.defvjp(lambda w: (w * 2, None), lambda _, g: (g * 2,))
    return mean(f(jax.grad(lambda w: loss(f(w), x))(w)))


def scattered(w, x):
    gradient = jax.grad(lambda v: loss(v[:3], x))(jnp.concatenate([w, w, w[:2]]))
    return lax.psum_scatter(gradient, "i", tiled=True)


def summed(w, x):
    return lax.psum(jax.grad(loss)(w, x), "i")


WRONG = (
    plain, jitted_loss, jitted_gradient, jitted_mean, checkpointed, layers, stacked_layers,
    tied_layers, accumulated, accumulated_tree, accumulated_in_while, ours, ours_in_jit, tied,
    decayed, raveled, skipped, branched, custom, summed,
)  # fmt: skip


@pytest.mark.parametrize("step", WRONG, ids=lambda f: f.__name__)
def test_a_summed_gradient_summed_again(step):
    (hint,) = hints(shard(step))
    assert "summed over the same axis before" in hint and "all 8 ranks of ('i',)" in hint
    assert hint.count("test_hints.py:") == 2


def test_a_summed_gradient_scattered():
    specs = {"in_specs": (P(), P("i")), "out_specs": P("i")}
    (hint,) = hints(jax.shard_map(scattered, mesh=mesh(8), **specs))
    assert "psum_scatter over ('i',)" in hint


@pytest.mark.parametrize("wrap", [jax.jit, xcoll.optimize, jax.checkpoint])
def test_whatever_is_around_it(wrap):
    assert len(hints(wrap(shard(plain)))) == 1
    assert len(hints(shard(wrap(plain)))) == 1


def test_explain_warns():
    with pytest.warns(xcoll.XcollWarning, match="all 8 ranks"):
        report = xcoll.explain(shard(jitted_loss), W, X)
    assert len(report.warnings) == 1


def test_inside_a_mesh():
    """What is lowered is the region; the axes around it come with the scope."""
    (outer,) = jax.make_jaxpr(shard(xcoll.optimize(plain)))(W, X).eqns
    (region,) = outer.params["jaxpr"].eqns
    body = region.params["call_jaxpr"]
    assert list(find_hints(body)) == []
    (hint,) = find_hints(body, Scope((("i", 8),)))
    assert "all 8 ranks" in hint


def test_says_what_happens():
    """The statements of the hint, on numbers."""

    def steps(w, x):
        gradient = jax.grad(loss)(w, x)
        return gradient, mean(gradient), lax.psum(gradient, "i")

    once, averaged, twice = shard(steps)(W, X)
    ranks = [2 * W * np.asarray(x) ** 2 / 3 for x in X]
    np.testing.assert_allclose(once, sum(ranks), rtol=1e-6)
    np.testing.assert_allclose(averaged, sum(ranks), rtol=1e-6)
    np.testing.assert_allclose(twice, 8 * sum(ranks), rtol=1e-6)


# Programs that are right, or of which nothing is certain.


def summed_once(w, x):
    return jax.grad(loss)(w, x) / 8


def mean_of_values(w, x):
    return mean(loss(w, x))


def cast_first(w, x):
    return mean(jax.grad(loss)(lax.pcast(w, "i", to="varying"), x))


def mean_of_mean(w, x):
    return mean(mean(x))


def mean_of_mean_in_jit(w, x):
    return jax.jit(mean)(jax.jit(mean)(x) * 0.1)


def sum_of_mean(w, x):
    return lax.psum(lax.pmean(x, "i"), "i")


def mean_by_hand(w, x):
    return mean(lax.psum(x, "i") * 0.5 * 0.25)


def negated_mean(w, x):
    return mean(lax.psum(x, "i") / -8)


def mean_in_bfloat16(w, x):
    return mean(lax.psum(x.astype(jnp.bfloat16), "i") * jnp.bfloat16(1 / 8))


def mean_of_summed_gradient(w, x):
    return mean(jax.grad(loss)(w, x) / lax.axis_size("i"))


def mean_in_loss(w, x):
    return mean(jax.grad(lambda w: mean(loss(w, x)))(w))


def mean_in_jitted_loss(w, x):
    return mean(jax.jit(jax.value_and_grad(lambda w: mean(loss(w, x))))(w))


def global_count_in_loss(w, x):
    return mean(jax.grad(lambda w: lax.psum(((w * x) ** 2).sum(), "i") / 24)(w))


def masked(w, x):
    return lax.psum(lax.psum(x, "i") * (lax.axis_index("i") == 0), "i")


def masked_by_where(w, x):
    return lax.psum(jnp.where(lax.axis_index("i") == 0, lax.psum(x, "i"), 0), "i")


def masked_by_branch(w, x):
    def zeros(v):
        return jnp.zeros_like(v)

    first = lax.axis_index("i") == 0
    return lax.psum(lax.cond(first, lambda v: v, zeros, vary(lax.psum(x, "i"))), "i")


def masked_by_loop(w, x):
    def double(state):
        k, v = state
        return k + 1, v * 2

    start = (lax.axis_index("i"), vary(lax.psum(x, "i")))
    return lax.psum(lax.while_loop(lambda s: s[0] < 8, double, start)[1], "i")


def masked_inside_jit(w, x):
    @jax.jit
    def pick(v):
        return v * (lax.axis_index("i") == 3)

    return lax.psum(pick(lax.psum(x, "i")), "i")


def own_slice(w, x):
    total = lax.psum(jnp.concatenate([x[0]] * 3), "i")
    return lax.psum(lax.dynamic_slice(total, (lax.axis_index("i"),), (1,)), "i")


def divided_by_a_count(w, x):
    return lax.psum(lax.psum(x, "i") / lax.psum((x > 3).sum(), "i"), "i")


def summed_with_a_local_value(w, x):
    return lax.psum(lax.psum(x, "i") + x, "i")


def square_of_sum(w, x):
    total = lax.psum(x, "i")
    return lax.psum(total * total * x, "i")


def loop_of_its_own(w, x):
    def power(v, _):
        return mean(jnp.tanh(v * w)), None

    return lax.scan(power, lax.psum(x, "i"), None, length=3)[0]


def maximum(w, x):
    return lax.pmax(lax.psum(x, "i"), "i")


def vary(x):
    checked = jax.typeof(lax.axis_index("i")).mat.varying
    return lax.pcast(x, "i", to="varying") if checked else x


RIGHT = (
    summed_once, mean_of_values, cast_first, mean_of_mean, mean_of_mean_in_jit, sum_of_mean,
    mean_by_hand, negated_mean, mean_in_bfloat16, mean_of_summed_gradient, mean_in_loss,
    mean_in_jitted_loss,
    global_count_in_loss, masked, masked_by_where, masked_by_branch, masked_by_loop,
    masked_inside_jit, own_slice, divided_by_a_count, summed_with_a_local_value, square_of_sum,
    loop_of_its_own, maximum,
)  # fmt: skip


@pytest.mark.parametrize("step", RIGHT, ids=lambda f: f.__name__)
def test_silent_where_types_are_checked(step):
    assert hints(shard(step)) == []


UNCHECKED = (
    plain, jitted_loss, checkpointed, layers, accumulated, ours, mean_of_values, mean_of_mean,
    mean_of_mean_in_jit, sum_of_mean, mean_by_hand, negated_mean, mean_in_bfloat16, mean_in_loss,
    masked,
    masked_by_where, masked_by_branch, masked_by_loop, masked_inside_jit, own_slice,
    divided_by_a_count, summed_with_a_local_value, square_of_sum, loop_of_its_own,
)  # fmt: skip


@pytest.mark.parametrize("step", UNCHECKED, ids=lambda f: f.__name__)
def test_silent_where_types_are_not_checked(step):
    """There, the gradient is each rank's own until it is summed."""
    fn = jax.shard_map(step, mesh=mesh(8), in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
    assert hints(fn) == []


def test_sums_twice_without_gradients():
    def twice(w, x):
        f = jax.jit(lambda v: lax.psum(v, "i"))
        return f(-2 * f(x)[:, 1:])

    (hint,) = hints(shard(twice, True))
    assert "multiplies it by 8" in hint
    # Where types are not checked, the transpose of a sum is a sum, and looks the same.
    assert hints(shard(twice, False)) == []


def test_a_loss_over_all_ranks_has_a_whole_gradient():
    """Its later pmean changes nothing, and is silent: a masked mean, a squared activation."""

    def masked(w, x):
        def loss(w):
            total = lax.psum(((x @ w) ** 2).sum(), "i")
            return total / lax.psum((x[:, 0] > 1).sum(), "i")

        return lax.pmean(jax.grad(loss)(w), "i")

    def squared(w, x):
        def loss(w):
            return (lax.psum((x @ w).sum(0), "i") ** 2).sum()

        return lax.pmean(jax.grad(loss)(w), "i")

    def statistics(w, x):
        mean = lax.psum(x.sum(0), "i") / lax.psum(x.shape[0], "i")
        return lax.pmean(mean, "i") + 0 * w.sum()

    for check_vma in (True, False):
        for body in (masked, squared, statistics):
            assert hints(shard(body, check_vma)) == [], body.__name__


def test_one_rank_is_never_wrong():
    assert hints(shard(plain, num_ranks=1)) == []
    assert hints(shard(cast_late, num_ranks=1)) == []


def test_only_the_axes_that_are_summed_twice():
    def cast(v, axes):
        return lax.pcast(v, axes, to="varying")

    def run(body):
        specs = {"in_specs": (P(), P(("i", "j"))), "out_specs": P()}
        return hints(jax.shard_map(body, mesh=mesh(2, 4), **specs))

    assert run(lambda w, x: lax.psum(lax.psum(x, "j"), "i")) == []
    (hint,) = run(lambda w, x: lax.psum(cast(lax.psum(x, "j"), "j"), ("i", "j")))
    assert "psum over ('i', 'j')" in hint and "all 4 ranks of ('j',)" in hint
    (hint,) = run(lambda w, x: lax.pmean(lax.psum(lax.psum(x, "j"), "i"), ("i", "j")))
    assert "all 8 ranks of" in hint
    assert run(lambda w, x: lax.pmean(lax.psum(x, ("i", "j")) / 2 / 4, ("i", "j"))) == []
    assert run(lambda w, x: lax.psum(lax.psum(x, ("i", "j")) / 4, "j")) == []
    assert run(lambda w, x: lax.pmean(lax.psum(lax.psum(x, "j"), "i") / 8, ("i", "j"))) == []
    assert run(lambda w, x: lax.pmean(lax.pmean(lax.pmean(x, "j"), "i"), ("j", "i"))) == []
    (hint,) = run(lambda w, x: lax.pmean(jax.grad(loss)(w, x) / 2, ("i", "j")))
    assert "all 8 ranks of" in hint
    (hint,) = run(lambda w, x: lax.pmean(jax.grad(jax.jit(loss))(w, x), ("j", "i")))
    assert "all 8 ranks of" in hint


def test_groups_and_axes_of_vmap_are_not_judged():
    def groups(w, x):
        pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
        return lax.psum(lax.psum(x, "i"), "i", axis_index_groups=pairs)

    assert hints(shard(groups, False)) == []
    mapped = jax.vmap(lambda x: lax.pmean(lax.psum(x, "k"), "k"), axis_name="k")
    assert hints(mapped, X) == []


# Sums in few bits.


def cast_late(w, x):
    return lax.psum(x.astype(jnp.bfloat16), "i").astype(jnp.float32)


def cast_late_outside_jit(w, x):
    return jax.jit(lambda x: lax.psum(x.astype(jnp.float16), "i"))(x).astype(jnp.float32)


def cast_late_inside_jit(w, x):
    return jax.jit(lambda v: v.astype(jnp.float32) * 2)(lax.pmean(x.astype(jnp.bfloat16), "i"))


def cast_late_in_scan(w, x):
    total = lax.psum(jnp.stack([x, x]).astype(jnp.bfloat16), "i")
    return lax.scan(lambda c, v: (c + v.astype(jnp.float32), None), 0 * total[0] + w, total)[0]


def cast_late_ours(w, x):
    return xcoll.psum(x.astype(jnp.bfloat16), "i").astype(jnp.float32)


LATE = (cast_late, cast_late_outside_jit, cast_late_inside_jit, cast_late_in_scan, cast_late_ours)


@pytest.mark.parametrize("step", LATE, ids=lambda f: f.__name__)
def test_cast_after_the_sum(step):
    (hint,) = hints(shard(step))
    assert "cast to float32 afterwards" in hint and "test_hints.py:" in hint


def test_cast_outside_of_shard_map():
    def fn(w, x):
        narrow = shard(lambda w, x: lax.psum(x.astype(jnp.bfloat16), "i"))(w, x)
        return narrow.astype(jnp.float32)

    (hint,) = hints(fn)
    assert "psum over ('i',) in bfloat16" in hint


def early(w, x):
    return lax.psum(x.astype(jnp.bfloat16).astype(jnp.float32), "i")


def stays_narrow(w, x):
    return lax.psum(x.astype(jnp.bfloat16), "i") * 2


def wide_before_narrow(w, x):
    return lax.psum(x, "i").astype(jnp.bfloat16).astype(jnp.float32)


def residual(w, x):
    h = x.astype(jnp.bfloat16)
    return jnp.sum((h + lax.psum(h, "i")).astype(jnp.float32)) * 0


@pytest.mark.parametrize(
    "step", [early, stays_narrow, wide_before_narrow], ids=lambda f: f.__name__
)
def test_silent_where_no_bits_are_lost(step):
    assert hints(shard(step)) == []


def test_silent_where_the_sum_is_a_part():
    specs = {"in_specs": (P(), P("i")), "out_specs": P("i")}
    fn = jax.shard_map(lambda w, x: residual(w, x)[None], mesh=mesh(8), **specs)
    assert hints(fn) == []


def test_long_programs_take_no_time_to_speak_of():
    """Loops in loops are looked at a few times each, not a few times to the power of the depth."""

    def deep(w, x, depth=6):
        if depth == 0:
            return x + lax.pcast(jax.grad(loss)(w, x), "i", to="varying")
        return lax.scan(lambda c, _: (deep(w, c, depth - 1), None), x, None, length=2)[0]

    program = jax.make_jaxpr(shard(lambda w, x: mean(deep(w, x))))(W, X)
    start = time.perf_counter()
    assert list(find_hints(program)) == []
    assert time.perf_counter() - start < 5
