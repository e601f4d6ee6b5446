"""Marks: a program's own collectives keep them, those that differentiation adds have none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from spmd import CHECK_VMA, mesh_of

import xcoll
from xcoll import marks
from xcoll.primitives import Region, bind
from xcoll.sites import Scope, enter, read

P = jax.P
MESH = mesh_of(2, 2)
AXES = ("i", "j")
SPLIT = P(AXES)
X = jnp.arange(1.0, 17.0).reshape(8, 2) / 16


def collectives(jaxpr: core.Jaxpr) -> list[tuple[str, bool]]:
    """(jax.lax's name, whether marked) of every collective of a program, bodies included."""
    known, out = marks.found(jaxpr), []
    for eqn in jaxpr.eqns:
        spec = read(eqn)
        if spec is not None:
            out.append((spec.name, eqn.invars[0] in known))
        elif eqn.primitive is not marks.mark_p:
            for value in eqn.params.values():
                for item in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(item, core.Jaxpr):
                        out += collectives(item)
    return out


def count(fn, *args) -> dict[str, int]:
    """How many collectives of the traced program are "own" (marked) and how many "derived"."""
    names = collectives(jax.make_jaxpr(fn)(*args))
    own = sum(is_marked for _, is_marked in names)
    return {"own": own, "derived": len(names) - own}


def marked(fn, *args):
    """``fn`` as a function whose traced program is marked."""
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    call = core.jaxpr_as_fun(marks.insert(jaxpr))

    def run(*args):
        return jax.tree.unflatten(jax.tree.structure(shape), call(*jax.tree.leaves(args)))

    return run


def shard(body, check_vma, out_specs=SPLIT):
    return jax.shard_map(body, mesh=MESH, in_specs=SPLIT, out_specs=out_specs, check_vma=check_vma)


def moves(x):
    """One of each kind, none of whose derivatives folds away under either check."""
    a = lax.all_gather(jnp.sin(x), "i", tiled=True)
    b = lax.psum_scatter(jnp.cos(a), "i", tiled=True)
    c = lax.all_to_all(b, "j", 0, 0, tiled=True)
    return jnp.sin(lax.ppermute(c, "j", [(0, 1), (1, 0)]))


def total(fn):
    return lambda x: fn(x).sum()


TRANSFORMS = {
    # name: (what is applied from outside, how many collectives it adds)
    "plain": (lambda f: f, 0),
    "jit": (jax.jit, 0),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), 4),
    "vjp": (lambda f: lambda x: jax.vjp(f, x)[1](x), 4),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](x), 4),
    "grad": (lambda f: jax.grad(total(f)), 4),
    "jacfwd": (jax.jacfwd, 4),
    "vmap": (lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])), 0),
    "grad of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, x])).sum()), 4),
    "vmap of grad": (lambda f: lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, x])), 4),
    "remat": (jax.checkpoint, 0),
}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_own_collectives_are_marked_and_derivatives_are_not(name, check_vma):
    transform, derived = TRANSFORMS[name]
    fn = marked(shard(moves, check_vma), X)
    assert count(transform(fn), X) == {"own": 4, "derived": derived}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_a_derivative_taken_inside_is_the_programs_own(check_vma):
    def body(x):
        value, gradient = jax.value_and_grad(lambda x: moves(x).sum())(x)
        return value + gradient

    fn = marked(shard(body, check_vma), X)
    assert count(fn, X) == {"own": 8, "derived": 0}
    # Of the second derivative, what the first has is the program's own.
    assert count(jax.grad(lambda x: fn(x).sum()), X)["own"] == 8


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("is_outside", [True, False])
def test_computed_again_is_marked(is_outside, check_vma):
    """Forward once, forward again before the backward pass: eight of its own, four transposed."""
    body = moves if is_outside else jax.checkpoint(moves)
    fn = shard(body, check_vma)
    fn = marked(jax.checkpoint(fn) if is_outside else fn, X)
    assert count(jax.grad(lambda x: fn(x).sum()), X) == {"own": 8, "derived": 4}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_computed_again_from_a_saved_operand_is_marked(check_vma):
    """A policy that saves the operand, and not the result of the collective."""

    def body(x):
        y = lax.all_gather(jnp.sin(x), "i", tiled=True)
        return y * y

    def saves(prim, *_, **__):
        return prim.name != "all_gather"

    fn = marked(shard(jax.checkpoint(body, policy=saves), check_vma), X)
    assert count(jax.grad(lambda x: fn(x).sum()), X) == {"own": 2, "derived": 1}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("where", ["scan", "cond", "while", "jit", "inner shard_map"])
def test_bodies(where, check_vma):
    def step(x):
        return jnp.sin(lax.ppermute(x, "j", [(0, 1), (1, 0)]))

    def body(x):
        if where == "scan":
            return lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]
        if where == "cond":
            return lax.cond(lax.axis_index("i") > 0, step, lambda x: 2 * step(x), x)
        if where == "while":
            return lax.while_loop(lambda c: c.sum() < 0, step, x)
        if where == "jit":
            return jax.jit(step)(jax.jit(step)(x))
        return step(x)

    fn = shard(body, check_vma)
    if where == "inner shard_map":
        inner = jax.shard_map(
            step, in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_vma=True
        )
        fn = jax.shard_map(
            inner, mesh=MESH, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=True
        )
    own = {"cond": 2, "jit": 2}.get(where, 1)
    fn = marked(fn, X)
    assert count(fn, X) == {"own": own, "derived": 0}
    assert count(lambda x: jax.jvp(fn, (x,), (x,)), X) == {"own": own, "derived": own}
    if where != "while":
        assert count(jax.grad(lambda x: fn(x).sum()), X) == {"own": own, "derived": own}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_sums_under_both_checks(check_vma):
    """A sum's transpose is a cast where types are checked, and a sum where they are not."""
    fn = marked(shard(lambda x: lax.psum(jnp.sin(x), AXES), check_vma, out_specs=P()), X)
    assert count(lambda x: jax.jvp(fn, (x,), (x,)), X) == {"own": 1, "derived": 1}
    got = count(jax.grad(lambda x: jnp.sin(fn(x)).sum()), X)
    assert got == {"own": 1, "derived": 0 if check_vma else 1}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_custom_vjp(check_vma):
    """The forward function is the program's own when it runs in place of the function."""

    @jax.custom_vjp
    def f(x):
        return lax.ppermute(x, "j", [(0, 1), (1, 0)])

    def forward(x):
        y = lax.ppermute(x, "j", [(0, 1), (1, 0)])
        return y, lax.all_gather(x, "i").sum(0)

    def backward(residual, ct):
        return (lax.ppermute(ct * residual, "j", [(0, 1), (1, 0)]),)

    f.defvjp(forward, backward)
    fn = marked(shard(lambda x: f(jnp.sin(x)), check_vma), X)
    assert count(fn, X) == {"own": 1, "derived": 0}
    assert count(jax.grad(lambda x: fn(x).sum()), X) == {"own": 2, "derived": 1}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_custom_jvp(check_vma):
    @jax.custom_jvp
    def f(x):
        return lax.all_gather(x, "i").sum(0)

    @f.defjvp
    def derivative(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), lax.all_gather(t, "i").sum(0)

    fn = marked(shard(lambda x: f(jnp.sin(x)), check_vma), X)
    assert count(fn, X) == {"own": 1, "derived": 0}
    assert count(lambda x: jax.jvp(fn, (x,), (x,)), X) == {"own": 1, "derived": 1}
    assert count(jax.grad(lambda x: fn(x).sum()), X) == {"own": 1, "derived": 1}


def test_what_jax_lax_lacks_is_marked_except_products():
    def body(x):
        a = xcoll.pbroadcast(x, AXES, 0) + xcoll.preduce(x, AXES, 1)
        return a * xcoll.pprod(x, AXES)

    fn = marked(shard(body, True), X)
    assert collectives(jax.make_jaxpr(fn)(X)) == [
        ("pbroadcast", True), ("preduce", True), ("pprod", False)
    ]  # fmt: skip
    assert count(lambda x: jax.jvp(fn, (x,), (x,)), X)["own"] == 2


def test_linear_transpose():
    fn = marked(shard(lambda x: lax.all_gather(2 * x, "i", tiled=True), True), X)
    transposed = jax.linear_transpose(fn, X)
    assert count(transposed, fn(X)) == {"own": 0, "derived": 1}
    (ct,) = transposed(jnp.ones_like(fn(X)))
    np.testing.assert_array_equal(ct, jnp.full_like(X, 2 * 2))


def every(x):
    """What stays of a program when it is marked: types, effects, several kinds of results."""
    y = lax.psum(x, "i")
    jax.debug.callback(lambda v: None, y[0, 0])
    return moves(x) + y, lax.pmean(x, AXES), lax.psum(x.astype(jnp.int32), "j")


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_types_and_effects_stay(check_vma):
    plain = shard(every, check_vma, out_specs=(P(AXES), P(), P("i")))
    jaxprs = [jax.make_jaxpr(f)(X) for f in (plain, marked(plain, X))]
    assert jaxprs[0].effects == jaxprs[1].effects != set()
    (a, b) = (next(body for _, _, body, _ in enter(j.eqns[0], Scope())) for j in jaxprs)
    rest = [e for e in b.eqns if e.primitive is not marks.mark_p]
    assert len(rest) < len(b.eqns)
    types = [[v.aval for e in eqns for v in e.outvars] for eqns in (a.eqns, rest)]
    assert types[0] == types[1]
    for eqn in b.eqns:
        if eqn.primitive is marks.mark_p:
            assert eqn.invars[0].aval == eqn.outvars[0].aval


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_the_compiled_program_is_the_unmarked_one(check_vma):
    fn = shard(every, check_vma, out_specs=(P(AXES), P(), P("i")))

    def text(fn):
        def step(x):
            def loss(x):
                a, b, _ = fn(x)
                return a.sum() + b.sum()

            return jax.value_and_grad(loss)(x), jax.vmap(fn)(jnp.stack([x, x]))

        return jax.jit(step).lower(X).as_text()

    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(X)
    call, tree = core.jaxpr_as_fun(jaxpr), jax.tree.structure(shape)
    assert text(marked(fn, X)) == text(lambda x: jax.tree.unflatten(tree, call(x)))


def test_nothing_to_mark_is_the_same_object():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + jax.jit(jnp.cos)(x))(X)
    assert marks.insert(jaxpr) is jaxpr


def test_equal_operands_share_a_mark():
    def body(x):
        return lax.psum(x, "i") + 2 * lax.psum(x, "i") + lax.all_gather(x, "j").sum(0)

    jaxpr = marks.insert(jax.make_jaxpr(shard(body, False))(X))
    (inner,) = [b for _, _, b, _ in enter(jaxpr.eqns[0], Scope())]
    assert [e.primitive.name for e in inner.eqns].count("xcoll_mark") == 1
    assert count(core.jaxpr_as_fun(jaxpr), X) == {"own": 3, "derived": 0}


@pytest.mark.parametrize("policy", [xcoll.Policy(codec="int8"), xcoll.Policy()])
def test_regions_of_lossy_policies_are_marked(policy):
    def fn(x):
        return bind(shard(moves, True), Region(policy), x)

    own, derived = (4, 4) if policy.codec else (0, 8)
    assert count(jax.grad(lambda x: fn(x).sum()), X) == {"own": own, "derived": derived}
    np.testing.assert_array_equal(jax.jit(fn)(X), jax.jit(shard(moves, True))(X))
