"""Collectives that jax.lax lacks: values, types, derivatives and batching, as primitives."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import (
    CHECK_VMA,
    INTEGERS,
    NUM_RANKS,
    NUMBERS,
    assert_reduced,
    assert_same_bits,
    mesh_of,
    on_ranks,
    sharded,
    special_values,
    values,
)

from xcoll import _compat
from xcoll.barriers import bind_barrier
from xcoll.composites import (
    COMPOSITES,
    REDUCE_OPS,
    bind_pbroadcast,
    bind_pgather,
    bind_pprod,
    bind_preduce,
    bind_pscatter,
)
from xcoll.policy import COLLECTIVE_OF
from xcoll.schedule import COLLECTIVES

SHAPES = ((), (7, 3), (0, 3))
MOVES = (*NUMBERS, "bool")


def at_root(x, root, num_ranks):
    """Zeros on all ranks but the root, which has ``x``."""
    out = np.zeros((num_ranks, *x.shape), x.dtype)
    out[root] = x
    return out


def cases(num_ranks, rng):
    """Yields name, per-rank function, values of all ranks, check of the results of all ranks."""
    roots = itertools.cycle(sorted({0, num_ranks // 2, num_ranks - 1}))
    for shape in SHAPES:
        for dtype in NUMBERS:
            x = values(rng, dtype, (num_ranks, *shape))
            yield f"pprod {dtype}{shape}", bind_pprod, x, product_everywhere
            ops = REDUCE_OPS if dtype in ("bfloat16", "float32", "int8") else ("sum",)
            for op, root in zip(ops, roots, strict=False):
                yield (
                    f"preduce {op} {dtype}{shape} root={root}",
                    partial(bind_preduce, root=root, op=op),
                    x,
                    partial(reduced_at_root, root=root, op=op),
                )
        for dtype in MOVES:
            root = next(roots)
            x = values(rng, dtype, (num_ranks, *shape))
            many = values(rng, dtype, (num_ranks, num_ranks, *shape))
            for call, operand, want in (
                (partial(bind_pbroadcast, source=root), x, np.stack([x[root]] * num_ranks)),
                (partial(bind_pgather, root=root), x, at_root(x, root, num_ranks)),
                (partial(bind_pscatter, root=root), many, many[root]),
            ):
                name = f"{call.func.__name__} {dtype}{shape} root={root}"
                yield name, call, operand, partial(equal, want=want)


def product_everywhere(got, x, name):
    for rank in range(len(x)):
        assert_same_bits(got[rank], got[0], name)
    assert_reduced(got[0], x, "prod", name)


def reduced_at_root(got, x, name, *, root, op):
    assert_reduced(got[root], x, op, name)
    others = np.delete(got, root, 0)
    assert_same_bits(others, np.zeros_like(others), name)


def equal(got, x, name, *, want):
    assert_same_bits(got, want, name)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_values(num_ranks, check_vma):
    with jax.enable_x64(True):
        table = list(cases(num_ranks, np.random.default_rng(num_ranks)))
        # Empty arrays apart: XLA:CPU of jax 0.11 crashes on programs that have them among others.
        for part in ([c for c in table if c[2].size], [c for c in table if not c[2].size]):
            calls = [call for _, call, _, _ in part]

            def all_of_them(xs, calls=calls):
                return [call(x, ("i",)) for call, x in zip(calls, xs, strict=True)]

            out = on_ranks(
                all_of_them, mesh_of(num_ranks), [x for _, _, x, _ in part], check_vma=check_vma
            )
            for (name, _, x, check), got in zip(part, out, strict=True):
                check(got, x, name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_moves_keep_every_bit(dtype):
    part = special_values("float32" if dtype == "complex64" else dtype)
    x = np.stack([np.roll(part, r) for r in range(6)])
    if dtype == "complex64":
        x = np.stack([x, np.roll(x, 1, 1)], -1).view("complex64")[..., 0]
    many = np.stack([np.roll(x, r, 0) for r in range(6)])

    def fn(x, many):
        return (
            bind_pbroadcast(x, ("i", "j"), 4),
            bind_pgather(x, ("i", "j"), 4),
            bind_pscatter(many, ("i", "j"), 4),
            bind_barrier(x, ("i", "j")),
        )

    got = on_ranks(fn, mesh_of(2, 3), x, many)
    everywhere = np.stack([x[4]] * 6)
    assert_same_bits(got, (everywhere, at_root(x, 4, 6), many[4], x))


def test_traced_source():
    x = whole_numbers((3, 4))
    run = jax.jit(
        lambda x, source: sharded(lambda x: bind_pbroadcast(x, ("i",), source), mesh_of(3))(x)
    )
    for source in range(3):
        np.testing.assert_array_equal(run(x, source), np.stack([x[source]] * 3))
    grad = jax.grad(lambda x: (run(x, 1) * x).sum())(x)
    want = np.stack([x[1]] * 3)
    want[1] += x.sum(0)
    np.testing.assert_array_equal(grad, want)


def test_non_finite_values_reduce_as_in_arithmetic():
    x = np.array([[1, np.nan, np.inf, np.inf, 0], [2, 1, 1, -np.inf, np.inf]], np.float32)

    def fn(x):
        return [bind_preduce(x, ("i",), 0, op) for op in REDUCE_OPS] + [bind_pprod(x, ("i",))]

    got = dict(zip([*REDUCE_OPS, "pprod"], on_ranks(fn, mesh_of(2), x), strict=True))
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(got["sum"][0], [3, nan, inf, nan, inf])
    # Not the NaN at 1: XLA:CPU's own maximum over ranks may drop it.
    finite = [0, 2, 3, 4]
    np.testing.assert_array_equal(got["max"][0][finite], [2, inf, inf, inf])
    np.testing.assert_array_equal(got["min"][0][finite], [1, 1, -inf, 0])
    np.testing.assert_array_equal(got["prod"][0], [2, nan, inf, -inf, nan])
    np.testing.assert_array_equal(got["pprod"], [[2, nan, inf, -inf, nan]] * 2)
    # The other ranks hold zeros even so: the mask chooses, it does not multiply.
    assert all((got[op][1] == 0).all() for op in REDUCE_OPS)


# What each linear collective does to the values of all ranks, in NumPy.


def np_preduce(x, root):
    return at_root(x.sum(0), root, len(x))


def np_pbroadcast(x, root):
    return np.stack([x[root]] * len(x))


def np_pgather(x, root):
    return at_root(x, root, len(x))


def np_pscatter(x, root):
    return x[root]


LINEAR = {
    "preduce": (bind_preduce, np_preduce, False),
    "pbroadcast": (bind_pbroadcast, np_pbroadcast, False),
    "pgather": (bind_pgather, np_pgather, False),
    "pscatter": (bind_pscatter, np_pscatter, True),
}
"""Function, meaning, and whether the operand has a leading dimension of ranks."""

TRANSPOSE = {
    "preduce": "pbroadcast",
    "pbroadcast": "preduce",
    "pgather": "pscatter",
    "pscatter": "pgather",
}


def operand_shape(name, num_ranks, shape=(2,)):
    return (num_ranks, num_ranks, *shape) if LINEAR[name][2] else (num_ranks, *shape)


def dense_matrix(meaning, shape, root):
    """Returns the matrix of a linear map, from its value at each basis vector."""
    basis = np.eye(int(np.prod(shape)), dtype=np.float32)
    return np.stack([meaning(e.reshape(shape), root).ravel() for e in basis], 1)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_are_the_dense_matrix(name, num_ranks, check_vma):
    fn, meaning, _ = LINEAR[name]
    root = num_ranks - 1
    shape = operand_shape(name, num_ranks)
    matrix = dense_matrix(meaning, shape, root)
    run = sharded(lambda x: fn(x, ("i",), root), mesh_of(num_ranks), check_vma)
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, shape).astype(np.float32)
    y = meaning(x, root)

    for jacobian in (jax.jacrev, jax.jacfwd):
        got = jax.jit(jacobian(run))(x)
        np.testing.assert_array_equal(np.reshape(got, matrix.shape), matrix)

    # Inside shard_map: each rank has its cotangent and gets its own.
    ct = rng.integers(-9, 9, y.shape).astype(np.float32)

    def inside(x, ct):
        out, vjp = jax.vjp(lambda x: fn(x, ("i",), root), x)
        return vjp(ct)[0], out

    got, out = on_ranks(inside, mesh_of(num_ranks), x, ct, check_vma=check_vma)
    np.testing.assert_array_equal(out, y)
    np.testing.assert_array_equal(got.ravel(), matrix.T @ ct.ravel())
    # The transpose is the family's own.
    partner = LINEAR[TRANSPOSE[name]][1]
    np.testing.assert_array_equal(got, partner(ct, root))


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_transposes_are_collectives_of_the_family(check_vma):
    for name, partner in TRANSPOSE.items():
        fn = LINEAR[name][0]
        x = np.zeros(operand_shape(name, 2), np.float32)

        def pullback(x, fn=fn):
            out, vjp = jax.vjp(lambda x: fn(x, ("i",), 1), x)
            return vjp(out)[0]

        text = str(jax.make_jaxpr(sharded(pullback, mesh_of(2), check_vma))(x))
        assert re.findall(r"= xcoll_(\w+)\[", text) == [name, partner]


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_agree_with_the_meaning_in_jax_lax(name, check_vma):
    # The same map written with jax.lax's collectives, differentiated by jax's rules.
    def masked(x, root):
        return jnp.where(lax.axis_index("i") == root, x, jnp.zeros_like(x))

    meaning = {
        "preduce": lambda x: masked(lax.psum(x, "i"), 1),
        "pbroadcast": lambda x: lax.all_gather(x, "i")[1],
        "pgather": lambda x: masked(lax.all_gather(x, "i"), 1),
        "pscatter": lambda x: lax.all_to_all(x, "i", 0, 0)[1],
    }[name]

    def loss(fn, x):
        # Unequal weights, so that no rank's part can be taken for another's.
        return (jnp.sin(fn(x)) * (lax.axis_index("i") + 1)).sum()

    def inside(x):
        return [
            jax.grad(partial(loss, f))(x)
            for f in (lambda x: LINEAR[name][0](x, ("i",), 1), meaning)
        ]

    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, operand_shape(name, 3)).astype(np.float32)
    got, want = on_ranks(inside, mesh_of(3), x, check_vma=check_vma)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_pbroadcast_has_the_transpose_of_jax_lax():
    # jax.lax.pbroadcast lowers on GPUs only, but its transpose rule can be traced anywhere (of
    # scalars: it makes no other).
    ct = np.array([3, -5, 7], np.float32)

    def transposed(broadcast):
        return lambda ct: jax.linear_transpose(broadcast, ct)(ct)[0]

    run = partial(on_ranks, check_vma=False)
    want = run(transposed(lambda x: lax.pbroadcast(x, "i", 2)), mesh_of(3), ct)
    got = run(transposed(lambda x: bind_pbroadcast(x, ("i",), 2)), mesh_of(3), ct)
    np.testing.assert_array_equal(want, [0, 0, 5])
    np.testing.assert_array_equal(got, want)


# Products


def others(x):
    """Returns the product over all other ranks, for each rank."""
    return np.stack([np.delete(x, r, 0).prod(0) for r in range(len(x))])


FACTORS = np.array(
    # no zero, one, two, all
    [[2, 0, 0, 0], [3, 5, 0, 0], [-1, 2, 4, 0]],
    np.float32,
)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_derivative_of_a_product_with_zeros(check_vma):
    rng = np.random.default_rng(3)
    t = rng.integers(-9, 9, FACTORS.shape).astype(np.float32)
    mesh = mesh_of(3)
    product = sharded(lambda x: bind_pprod(x, ("i",)), mesh, check_vma)
    rooted = sharded(lambda x: bind_preduce(x, ("i",), 2, "prod"), mesh, check_vma)
    tangent = (t * others(FACTORS)).sum(0)

    y, dy = jax.jit(partial(jax.jvp, product))((FACTORS,), (t,))
    np.testing.assert_array_equal(y, np.stack([FACTORS.prod(0)] * 3))
    np.testing.assert_array_equal(dy, np.stack([tangent] * 3))
    y, dy = jax.jit(partial(jax.jvp, rooted))((FACTORS,), (t,))
    np.testing.assert_array_equal(y, at_root(FACTORS.prod(0), 2, 3))
    np.testing.assert_array_equal(dy, at_root(tangent, 2, 3))

    # Reverse: the cotangent of the copy on rank 1 alone, and of the root.
    for run in (product, rooted):
        weights = at_root(np.ones(4, np.float32), 1 if run is product else 2, 3)
        grad = jax.jit(jax.grad(lambda x, run=run, w=weights: (run(x) * w).sum()))(FACTORS)
        np.testing.assert_array_equal(grad, others(FACTORS))


def test_second_derivative_of_a_product_with_zeros():
    product = sharded(lambda x: bind_pprod(x, ("i",)), mesh_of(3))
    hessian = jax.jit(jax.hessian(lambda x: product(x)[0].sum()))(FACTORS)
    want = np.zeros((3, 4, 3, 4), np.float32)
    for r in range(3):
        for s in range(3):
            if r != s:
                rest = np.delete(FACTORS, [r, s], 0).prod(0)
                want[r, np.arange(4), s, np.arange(4)] = rest
    np.testing.assert_array_equal(hessian, want)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_product_inside_shard_map_differentiates_as_jax_would(check_vma):
    # Checked, the result is one value that all ranks share; unchecked, jax takes it for a value on
    # each rank, and sums their cotangents (as for psum).
    def inside(x):
        return jax.grad(lambda x: jnp.sin(bind_pprod(x, ("i",))).sum())(x)

    got = on_ranks(inside, mesh_of(3), FACTORS, check_vma=check_vma)
    copies = 1 if check_vma else 3
    want = copies * np.cos(FACTORS.prod(0)) * others(FACTORS)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_have_no_derivative(op):
    run = sharded(lambda x: bind_preduce(x, ("i",), 0, op), mesh_of(2))
    with pytest.raises(NotImplementedError, match=rf"preduce\(op='{op}'\).*stop_gradient"):
        jax.grad(lambda x: run(x).sum())(FACTORS[:2])


# Batching

BATCHED = {
    **LINEAR,
    "pprod": (
        lambda x, axes, root: bind_pprod(x, axes),
        lambda x, root: np.stack([x.prod(0)] * len(x)),
        False,
    ),
    "max": (
        partial(bind_preduce, op="max"),
        lambda x, root: at_root(x.max(0), root, len(x)),
        False,
    ),
    "min": (
        partial(bind_preduce, op="min"),
        lambda x, root: at_root(x.min(0), root, len(x)),
        False,
    ),
    "prod": (
        partial(bind_preduce, op="prod"),
        lambda x, root: at_root(x.prod(0), root, len(x)),
        False,
    ),
}


def whole_numbers(shape):
    return np.random.default_rng(4).integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_moves_the_mapped_dimension(name, check_vma):
    fn, meaning, cut = BATCHED[name]
    shape = (3, 2, 4)[not cut :]  # of one element of the batch, on one rank
    for dim in range(len(shape) + 1):
        x = whole_numbers((3, *shape[:dim], 5, *shape[dim:]))
        got = on_ranks(
            jax.vmap(lambda x: fn(x, ("i",), 1), in_axes=dim), mesh_of(3), x, check_vma=check_vma
        )
        for b in range(5):
            want = meaning(np.take(x, b, dim + 1), 1)
            np.testing.assert_array_equal(got[:, b], want, f"{dim=} {b=}")


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_over_the_axis_itself(name, mapped):
    fn, meaning, cut = BATCHED[name]
    x = whole_numbers((3, 3, 4) if cut else (3, 4))
    if mapped:
        got = jax.vmap(lambda x: fn(x, ("v",), 2), axis_name="v")(x)
        want = meaning(x, 2)
    else:
        got = jax.vmap(lambda _: fn(x[0], ("v",), 2), axis_name="v")(np.arange(3.0))
        want = meaning(np.stack([x[0]] * 3), 2)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("axes", [("v", "i"), ("i", "v")])
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_over_one_axis_of_two(name, axes, check_vma):
    fn, meaning, cut = BATCHED[name]
    x = whole_numbers((2, 3, 6, 4) if cut else (2, 3, 4))  # ranks: i = 2, v = 3
    got = on_ranks(
        jax.vmap(lambda x: fn(x, axes, 4), axis_name="v"), mesh_of(2), x, check_vma=check_vma
    )
    by_rank = x if axes == ("i", "v") else np.swapaxes(x, 0, 1)
    want = meaning(by_rank.reshape(6, *x.shape[2:]), 4)
    want = want.reshape(*by_rank.shape[:2], *want.shape[1:])
    np.testing.assert_array_equal(got, want if axes == ("i", "v") else np.swapaxes(want, 0, 1))


# Control flow, modes, types


def everything(x):
    """Uses each collective once; ``x`` has shape (3, 4) on each of three ranks."""
    axes = ("i",)
    y = bind_pscatter(bind_pgather(x[0], axes, 1), axes, 1)
    y = bind_pbroadcast(y, axes, 2) + bind_preduce(x[1], axes, 0)
    return bind_barrier(bind_pprod(y, axes) * jnp.sin(bind_preduce(x[2], axes, 1, "prod")), axes)


def looped(x):
    return lax.scan(lambda c, _: (everything(c)[None] + x, None), x, None, length=2)[0]


def while_looped(x):
    def body(state):
        k, c = state
        return k + 1, everything(c)[None] + x

    return lax.while_loop(lambda s: s[0] < 2, body, (0, x))[1]


def branched(x):
    always = lax.pmax(lax.stop_gradient(x)[0, 0], "i") > -100
    return lax.cond(always, lambda x: everything(x), lambda x: x[0] * 0, x)


@jax.custom_vjp
def custom(x):
    return everything(x)


custom.defvjp(lambda x: jax.vjp(everything, x), lambda vjp, ct: vjp(ct))


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_control_flow_and_modes(check_vma):
    mesh = mesh_of(3)
    x = np.random.default_rng(5).uniform(-1, 1, (3, 3, 4)).astype(np.float32)

    def run(fn):
        return on_ranks(fn, mesh, x, check_vma=check_vma)

    def repeated(x):
        return everything(everything(x)[None] + x)[None] + x

    once, twice = run(everything), run(repeated)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)

    close(run(branched), once)
    close(run(jax.checkpoint(everything)), once)
    close(run(custom), once)
    close(run(looped), twice)
    close(run(while_looped), twice)
    close(sharded(everything, mesh, check_vma)(x), once)  # eager

    def gradients(fn):
        outer = sharded(fn, mesh, check_vma)
        return jax.jit(jax.grad(lambda x: (outer(x) ** 2).sum()))(x)

    reference = gradients(everything)
    assert np.abs(reference).max() > 0.01
    for fn in (branched, jax.checkpoint(everything), custom):
        close(gradients(fn), reference)
    close(gradients(looped), gradients(repeated))
    inside = run(jax.grad(lambda x: everything(x).sum()))
    close(run(jax.grad(jax.checkpoint(lambda x: everything(x).sum()))), inside)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_types(check_vma):
    seen = {}

    def note(name, y):
        seen[name] = (y.shape, y.dtype.name, _compat.varying_axes(jax.typeof(y)))
        return y

    def fn(x):
        # x varies over i alone: the collectives over (i, j) cast it as jax.lax's do.
        axes = ("i", "j")
        note("pprod", bind_pprod(x, axes))
        note("pprod over i", bind_pprod(lax.psum(x, "j") if check_vma else x, ("i",)))
        note("preduce", bind_preduce(x, axes, 0))
        note("pbroadcast", bind_pbroadcast(x, axes, 0))
        note("pgather", bind_pgather(x, axes, 0))
        note("pgather axis=-1", bind_pgather(x, axes, 0, axis=-1))
        note("pgather tiled", bind_pgather(x, axes, 0, axis=1, tiled=True))
        note("pscatter", bind_pscatter(x, axes, 0, axis=-1))
        note("pscatter tiled", bind_pscatter(x, axes, 0, axis=1, tiled=True))
        note("barrier", bind_barrier(x, axes))
        return x

    mesh = mesh_of(2, 2)
    jax.eval_shape(
        jax.shard_map(
            fn, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=check_vma
        ),
        jax.ShapeDtypeStruct((6, 4), jnp.bfloat16),
    )
    everywhere, one = frozenset(), frozenset("i")
    both = frozenset("ij")
    want = {
        "pprod": ((3, 4), everywhere),
        "pprod over i": ((3, 4), everywhere),
        "preduce": ((3, 4), both),
        "pbroadcast": ((3, 4), both),
        "pgather": ((4, 3, 4), both),
        "pgather axis=-1": ((3, 4, 4), both),
        "pgather tiled": ((3, 16), both),
        "pscatter": ((3,), both),
        "pscatter tiled": ((3, 1), both),
        "barrier": ((3, 4), one),
    }
    assert seen == {
        name: (shape, "bfloat16", varying if check_vma else frozenset())
        for name, (shape, varying) in want.items()
    }


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_and_scatter_along_any_dimension(axis, tiled):
    x = whole_numbers((3, 3, 6, 3) if not tiled else (3, 3, 6, 9))
    x = x if tiled or axis != 1 else x[:, :, :3]

    def fn(x):
        gathered = bind_pgather(x, ("i",), 1, axis=axis, tiled=tiled)
        return gathered, bind_pscatter(gathered, ("i",), 1, axis=axis, tiled=tiled)

    gathered, back = on_ranks(fn, mesh_of(3), x)
    join = np.concatenate if tiled else np.stack
    np.testing.assert_array_equal(gathered, at_root(join(list(x), axis), 1, 3))
    np.testing.assert_array_equal(back, x)


def test_ranks_follow_the_order_of_the_axes():
    x = np.arange(6)  # rank over (i, j) of a mesh of 2 x 3

    def fn(x):
        return bind_pgather(x, ("j", "i"), 0), bind_pbroadcast(x, ("j", "i"), 3)

    gathered, sent = on_ranks(fn, mesh_of(2, 3), x)
    np.testing.assert_array_equal(gathered[0], [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(sent, [4] * 6)


def test_one_axis_of_two_reduces_within_the_other():
    x = whole_numbers((6, 4))
    got = on_ranks(lambda x: bind_preduce(x, ("j",), 1), mesh_of(2, 3), x)
    want = np.zeros_like(x)
    want[1], want[4] = x[:3].sum(0), x[3:].sum(0)
    np.testing.assert_array_equal(got, want)


def test_partial_manual_shard_map():
    mesh = mesh_of(2, 4)
    x = whole_numbers((2, 8, 4))

    def fn(x):
        y = x[0]
        many = jnp.stack([y, 2 * y])
        return jnp.stack(
            [
                bind_preduce(y, ("i",), 1),
                bind_pbroadcast(y, ("i",), 1),
                bind_pgather(y, ("i",), 1)[0],
                bind_pscatter(many, ("i",), 1),
                bind_pprod(y, ("i",)),
                bind_barrier(y, ("i",)),
            ]
        )[None]

    run = jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), axis_names={"i"})
    )
    got = run(jax.device_put(x, jax.NamedSharding(mesh, jax.P("i", "j"))))
    zeros = np.zeros_like(x[0])
    want = np.stack(
        [
            [zeros, x[1], zeros, x[1], x[0] * x[1], x[0]],
            [x[0] + x[1], x[1], x[0], 2 * x[1], x[0] * x[1], x[1]],
        ]
    )
    np.testing.assert_array_equal(got, want)


def test_export_for_every_platform():
    # The broadcast is lowered differently on GPUs; one program for all three must run anywhere.
    run = sharded(lambda x: bind_pbroadcast(x, ("i",), 1), mesh_of(2))
    exported = jax.export.export(jax.jit(run), platforms=["cpu", "cuda", "tpu"])(
        jax.ShapeDtypeStruct((2, 3), jnp.float32)
    )
    x = whole_numbers((2, 3))
    placed = jax.device_put(x, jax.NamedSharding(mesh_of(2), jax.P("i")))
    got = jax.jit(exported.call)(placed)
    np.testing.assert_array_equal(got, np.stack([x[1]] * 2))


# The barrier


def test_barrier_returns_its_pytree():
    rng = np.random.default_rng(6)
    for shapes in (SHAPES[:2], SHAPES[2:]):
        tree = {d: [values(rng, d, (3, *s)) for s in shapes] for d in (*INTEGERS, "bool")}
        got = on_ranks(lambda x: bind_barrier(x, ("i",)), mesh_of(3), tree)
        assert_same_bits(got, tree)
    assert on_ranks(lambda x: bind_barrier((), ("i",)), mesh_of(3), np.zeros(3)) == ()


def operands_by_name(hlo):
    """Returns the entry computation of a compiled program as name -> (operation, operands)."""
    entry = hlo[hlo.index("\nENTRY") :]
    graph = {}
    for line in entry.splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = \S+ ([\w\-]+)\((.*)", line)
        if found:
            name, operation, rest = found.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            graph[name] = (operation, operands)
    return graph


def depends_on(graph, name):
    seen, todo = set(), [name]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [o for o in graph[name][1] if o in graph]
    return seen


@pytest.mark.parametrize("constant", [False, True])
def test_barrier_is_in_the_compiled_program(constant):
    def fn(x):
        y = jnp.zeros(4) if constant else jnp.tanh(x)
        return bind_barrier(y, ("i",)) + 1

    run = jax.jit(sharded(fn, mesh_of(4)))
    hlo = run.lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile().as_text()
    graph = operands_by_name(hlo)
    reduces = [n for n, (operation, _) in graph.items() if operation == "all-reduce"]
    assert len(reduces) == 1
    assert re.search(r"= s32\[\]\S* all-reduce", hlo)
    # The result waits for the all-reduce, and the all-reduce for the operand.
    root = re.search(r"ROOT %?([\w.\-]+) =", hlo[hlo.index("\nENTRY") :]).group(1)
    assert reduces[0] in depends_on(graph, root)
    parameters = [n for n, (operation, _) in graph.items() if operation == "parameter"]
    assert constant or set(parameters) <= depends_on(graph, reduces[0])


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_barrier_has_the_derivative_of_the_identity(check_vma):
    x = whole_numbers((3, 4))
    run = sharded(lambda x: bind_barrier(x, ("i",)), mesh_of(3), check_vma)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: (run(x) * x).sum()))(x), 2 * x)
    y, dy = jax.jvp(run, (x,), (x,))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(dy, x)


def test_barrier_under_vmap():
    x = whole_numbers((3, 5, 4))
    got = on_ranks(jax.vmap(lambda x: bind_barrier(x, ("i",)), in_axes=1), mesh_of(3), x)
    np.testing.assert_array_equal(got, np.swapaxes(x, 1, 2))
    over = jax.vmap(lambda x: bind_barrier(x, ("v",)), axis_name="v")(x)
    np.testing.assert_array_equal(over, x)


# What the pass reads, and what is refused


def test_the_pass_can_read_each_equation():
    def fn(x):
        axes = ("i", "j")
        bind_pprod(x, axes)
        bind_preduce(x, axes, 3, "max")
        bind_pgather(x, axes, 3)
        bind_pscatter(x, axes, 3)
        return bind_pbroadcast(x, axes, 3)

    jaxpr = jax.make_jaxpr(sharded(fn, mesh_of(2, 2)))(np.zeros((4, 4)))
    (outer,) = (e for e in jaxpr.eqns if e.primitive.name == "shard_map")
    found = {}
    for eqn in outer.params["jaxpr"].eqns:
        if eqn.primitive in COMPOSITES:
            composite = COMPOSITES[eqn.primitive]
            assert composite.collective in COLLECTIVES
            assert COLLECTIVE_OF[composite.name(eqn.params)] == composite.collective
            assert eqn.params["axes"] == ("i", "j")
            assert eqn.params.get("root", 3) == 3
            assert hash(tuple(eqn.params.items())) is not None
            assert len(eqn.effects) == 2  # one named axis each, as of a psum
            found[composite.name(eqn.params)] = composite.op(eqn.params)
    assert found == {
        "pprod": "prod",
        "preduce": "max",
        "pgather": "none",
        "pscatter": "none",
        "pbroadcast": "none",
    }


REFUSED = {
    "unknown axis": (lambda x: bind_pprod(x, ("k",)), NameError, "pprod: unknown axis 'k'.*'i'"),
    "unknown axis, rooted": (lambda x: bind_pgather(x, ("k",), 0), NameError, "pgather.*'k'"),
    "unknown axis, barrier": (lambda x: bind_barrier(x, ("k",)), NameError, "barrier.*'k'"),
    "root too large": (
        lambda x: bind_preduce(x, ("i",), 2),
        ValueError,
        r"preduce\(root=2\): out of range; there are 2 ranks.*0 to 1",
    ),
    "root negative": (lambda x: bind_pgather(x, ("i",), -1), ValueError, r"pgather\(root=-1\)"),
    "source": (lambda x: bind_pbroadcast(x, ("i",), 9), ValueError, r"pbroadcast\(source=9\)"),
    "root no integer": (lambda x: bind_pscatter(x, ("i",), 0.5), TypeError, r"root=0.5"),
    "unknown op": (lambda x: bind_preduce(x, ("i",), 0, "sun"), ValueError, "mean 'sum'"),
    "scatter dimension": (
        lambda x: bind_pscatter(x, ("i",), 0),
        ValueError,
        r"dimension 0 of shape \(3,\) has 3 elements; .* 2 ranks",
    ),
    "scatter dimension, tiled": (
        lambda x: bind_pscatter(x, ("i",), 0, tiled=True),
        ValueError,
        r"dimension 0 of shape \(3,\) has 3 elements; it must be a multiple of the 2 ranks",
    ),
    "dimension": (
        lambda x: bind_pgather(x, ("i",), 0, axis=2),
        ValueError,
        r"pgather\(axis=2\): out of range for 2 dimensions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    fn, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        jax.jit(sharded(fn, mesh_of(2)))(np.zeros((2, 3)))


def test_outside_shard_map():
    with pytest.raises(NameError, match=r"unknown axis 'i'.*inside jax.shard_map"):
        bind_pprod(jnp.zeros(3), ("i",))
