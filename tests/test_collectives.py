"""The functional collectives: jax.lax's results, by every algorithm, on any number of ranks."""

import itertools
import re
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_table import CASES
from jax import lax
from spmd import (
    CHECK_VMA,
    NUM_RANKS,
    assert_reduced,
    assert_same_bits,
    mesh_of,
    on_ranks,
    sharded,
    values,
)

import xcoll
from xcoll import Policy, algorithms


def choices():
    """Returns every algorithm of the table with the collectives it does, and nested ones."""
    found: dict[Any, list[str]] = {}
    for case in CASES:
        found.setdefault(case.choice, []).append(case.collective)
    found[algorithms.hierarchical()] = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    found[algorithms.hierarchical("ring", "halving_doubling")] = ["all_reduce", "reduce_scatter"]
    found[algorithms.hierarchical("recursive_doubling", "bruck")] = ["all_gather"]
    found[algorithms.hierarchical("bruck", "pairwise")] = ["all_to_all"]
    return found


CHOICES = choices()
NESTED = [c for c in CHOICES if c.name in ("torus", "hierarchical")]
PURE = [c for c in CHOICES if c.name not in ("native", "direct", "hierarchical")]
"""Those that move everything by permutations."""


NESTED_SIZES = {1: (1, 1), 4: (2, 2), 6: (3, 2), 8: (2, 4)}


def mesh_for(choice, num_ranks):
    """Returns a mesh of one axis, or of two for an algorithm that needs levels."""
    return mesh_of(*(NESTED_SIZES[num_ranks] if choice in NESTED else (num_ranks,)))


EVERY = [
    pytest.param(choice, num_ranks, id=f"{choice}-{num_ranks}")
    for choice in CHOICES
    for num_ranks in (NESTED_SIZES if choice in NESTED else NUM_RANKS)
]


# Calls: a function of one rank's values, and what all ranks' results must be


@dataclass(frozen=True)
class Law:
    """One call, as a test of exactness.

    Attributes:
      name: of the function, with what is particular.
      call: ``(x, axes, policy) -> result`` on one rank.
      x: values of all ranks.
      check: ``(results of all ranks, x, name)``, which fails where they are wrong.
    """

    name: str
    call: Any
    x: np.ndarray
    check: Any = field(repr=False)


def same(got, x, name, *, want):
    assert_same_bits(got, want, name)


def replicated(got, x, name, *, op):
    """Exact, or within the bound, and bit for bit the same on all ranks."""
    for rank in range(1, len(x)):
        assert_same_bits(got[rank], got[0], f"{name}, rank {rank}: ")
    assert_reduced(got[0], x, op, name)


def at_root(got, x, name, *, op, root):
    assert_reduced(got[root], x, op, name)
    others = np.delete(got, root, 0)
    assert_same_bits(others, np.zeros_like(others), name)


def own_slice(got, x, name):
    """Rank r has slice r of the sum; ``x`` is (ranks, ranks, ...)."""
    for rank in range(len(x)):
        assert_reduced(got[rank], x[:, rank], "sum", f"{name}, rank {rank}: ")


def all_reduce_laws(n, rng):
    for dtype, shape in (
        ("float32", (7, 3)), ("bfloat16", (13,)), ("float16", ()), ("int8", (7, 3)),
        ("uint8", (1,)), ("int32", (31,)), ("complex64", (5,)),
    ):  # fmt: skip
        x = values(rng, dtype, (n, *shape))
        yield Law(f"psum {dtype}", call_of("psum"), x, partial(replicated, op="sum"))
    flags = values(rng, "bool", (n, 5))
    total = np.stack([flags.sum(0, dtype=np.int32)] * n)
    yield Law("psum bool", call_of("psum"), flags, partial(same, want=total))
    for op in ("max", "min"):
        for dtype in ("float32", "bfloat16", "int8"):
            x = values(rng, dtype, (n, 11))
            yield Law(f"p{op} {dtype}", call_of(f"p{op}"), x, partial(replicated, op=op))
    for dtype in ("float32", "int32"):
        x = values(rng, dtype, (n, 5))
        yield Law(f"pprod {dtype}", call_of("pprod"), x, partial(replicated, op="prod"))


def reduce_scatter_laws(n, rng):
    for dtype, shape in (("float32", (5,)), ("bfloat16", (3, 2)), ("int8", (7,)), ("int32", ())):
        x = values(rng, dtype, (n, n, *shape))
        yield Law(f"psum_scatter {dtype}", call_of("psum_scatter"), x, own_slice)
    x = values(rng, "float32", (n, 3, 2 * n))
    by_slice = np.moveaxis(x.reshape(n, 3, n, 2), 2, 1)

    def tiled(got, _, name):
        own_slice(got, by_slice, name)

    call = call_of("psum_scatter", scatter_dimension=-1, tiled=True)
    yield Law("psum_scatter tiled", call, x, tiled)


def all_gather_laws(n, rng):
    for dtype, shape in (("float32", (5,)), ("bfloat16", ()), ("int8", (7, 3)), ("bool", (3,))):
        x = values(rng, dtype, (n, *shape))
        yield Law(
            f"all_gather {dtype}", call_of("all_gather"), x, partial(same, want=np.stack([x] * n))
        )
    x = values(rng, "float32", (n, 3, 2))
    want = np.stack([np.concatenate(list(x), 1)] * n)
    call = call_of("all_gather", axis=-1, tiled=True)
    yield Law("all_gather tiled", call, x, partial(same, want=want))


def all_to_all_laws(n, rng):
    for dtype, shape in (("float32", (5,)), ("bfloat16", ()), ("int8", (7, 3)), ("bool", (3,))):
        x = values(rng, dtype, (n, n, *shape))
        call = call_of("all_to_all", split_axis=0, concat_axis=0)
        yield Law(f"all_to_all {dtype}", call, x, partial(same, want=np.swapaxes(x, 0, 1)))
    x = values(rng, "float32", (n, 2 * n, 3))
    cut = x.reshape(n, n, 2, 3)  # source, destination
    want = np.stack([np.concatenate(list(cut[:, d]), 1) for d in range(n)])
    call = call_of("all_to_all", split_axis=0, concat_axis=-1, tiled=True)
    yield Law("all_to_all tiled", call, x, partial(same, want=want))


def rooted_x(n, rng):
    roots = itertools.cycle(sorted({0, n // 2, n - 1}))
    for dtype, shape in (("float32", (7, 3)), ("bfloat16", (5,)), ("int8", ()), ("bool", (3,))):
        yield dtype, shape, next(roots)


def broadcast_laws(n, rng):
    for dtype, shape, root in rooted_x(n, rng):
        x = values(rng, dtype, (n, *shape))
        want = np.stack([x[root]] * n)
        yield Law(
            f"pbroadcast {dtype}", call_of("pbroadcast", source=root), x, partial(same, want=want)
        )


def reduce_laws(n, rng):
    for dtype, shape, root in rooted_x(n, rng):
        if dtype != "bool":
            x = values(rng, dtype, (n, *shape))
            op = "max" if dtype == "bfloat16" else "sum"
            call = call_of("preduce", root=root, op=op)
            yield Law(f"preduce {op} {dtype}", call, x, partial(at_root, op=op, root=root))


def gather_laws(n, rng):
    for dtype, shape, root in rooted_x(n, rng):
        x = values(rng, dtype, (n, *shape))
        want = np.zeros((n, *x.shape), x.dtype)
        want[root] = x
        yield Law(f"pgather {dtype}", call_of("pgather", root=root), x, partial(same, want=want))


def scatter_laws(n, rng):
    for dtype, shape, root in rooted_x(n, rng):
        x = values(rng, dtype, (n, n, *shape))
        yield Law(
            f"pscatter {dtype}", call_of("pscatter", root=root), x, partial(same, want=x[root])
        )


LAWS = {
    "all_reduce": all_reduce_laws,
    "reduce_scatter": reduce_scatter_laws,
    "all_gather": all_gather_laws,
    "all_to_all": all_to_all_laws,
    "broadcast": broadcast_laws,
    "reduce": reduce_laws,
    "gather": gather_laws,
    "scatter": scatter_laws,
}


def call_of(name, **kwargs):
    fn = getattr(xcoll, name)
    return lambda x, axes, policy: fn(x, axes, policy=policy, **kwargs)


@pytest.mark.parametrize(("choice", "num_ranks"), EVERY)
def test_exactness_and_replica_identity(choice, num_ranks):
    """Data movement and integers bit for bit, floats within the bound, replicas the same bits."""
    rng = np.random.default_rng(num_ranks)
    laws = []
    for collective in CHOICES[choice]:
        first, *rest = LAWS[collective](num_ranks, rng)
        # The first always; of the others a third, which differs with the number of ranks.
        numbers = tuple(NESTED_SIZES) if choice in NESTED else NUM_RANKS
        laws += [first, *rest[numbers.index(num_ranks) % 3 :: 3]]
    if not can_combine(choice):
        laws = [law for law in laws if not law.name.startswith(("pmax", "pmin", "pprod"))]
    mesh, policy = mesh_for(choice, num_ranks), Policy(algorithm=choice)

    def run(xs):
        return [law.call(x, mesh.axis_names, policy) for law, x in zip(laws, xs, strict=True)]

    # The types are no matter of the algorithm (see below), so that either setting will do.
    check_vma = num_ranks % 2 == 0
    lowered = jax.jit(sharded(run, mesh, check_vma)).lower([law.x for law in laws])
    if choice in PURE and num_ranks > 1:
        assert operations(lowered) == {"collective_permute"}
    out = jax.tree.map(np.asarray, lowered.compile()([law.x for law in laws]))
    for law, got in zip(laws, out, strict=True):
        law.check(got, law.x, law.name)


def operations(lowered):
    """Returns the kinds of communication in a lowered program."""
    kinds = r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)"
    return set(re.findall(kinds, lowered.as_text()))


def can_combine(choice):
    """Whether it combines by max, min and prod: XLA's own reduce-scatter only sums."""
    return not (choice.name == "hierarchical" and not choice.levels and not choice.options)


# The same as jax.lax: shapes, dtypes, effects, varying axes, values, for every argument


@dataclass(frozen=True)
class Same:
    """A call that jax.lax has too, as ``(module, x) -> result``, and its per-rank operand."""

    name: str
    call: Any
    shape: tuple[int, ...] = (6, 4)
    dtype: str = "int32"


GROUPS = [[0, 1], [2, 3]]
IJ = ("i", "j")
SAME = [
    *(
        Same(f"{name} {dtype}{list(shape)}",
             lambda m, x, name=name: getattr(m, name)(x, IJ), shape, dtype)
        for name in ("psum", "pmean", "pmax", "pmin")
        for dtype in ("int32", "bool", "float32", "bfloat16", "uint8")
        for shape in ((6, 4), ())
    ),
    Same("psum complex", lambda m, x: m.psum(x, "j"), dtype="complex64"),
    Same("psum of a list", lambda m, x: m.psum(x, ["i", "j"])),
    Same("psum over a size-one axis", lambda m, x: m.psum(x, "one")),
    Same("psum over j, i", lambda m, x: m.psum(x, ("j", "i"))),
    Same("psum pytree", lambda m, x: m.psum({"a": x, "b": [x[0], x > 2]}, IJ)),
    Same("psum empty pytree", lambda m, x: (m.psum((), IJ), x)),
    Same("psum of a constant", lambda m, x: m.psum(1, IJ) + x),
    Same("psum of an invariant", lambda m, x: m.psum(jnp.ones(3), "i")),
    Same("pmean of a constant", lambda m, x: m.pmean(2.0, IJ) + x),
    Same("pmax of a constant", lambda m, x: m.pmax(jnp.arange(3), "i")),
    *(
        Same(f"psum_scatter dimension {d} tiled={tiled}",
             lambda m, x, d=d, t=tiled: m.psum_scatter(x, "j", scatter_dimension=d, tiled=t),
             (3, 6, 3))
        for d in (0, -1)
        for tiled in (True, False)
    ),
    Same("psum_scatter (i, j)", lambda m, x: m.psum_scatter(x, IJ, tiled=True)),
    *(
        Same(f"all_gather axis {axis} tiled={tiled}",
             lambda m, x, axis=axis, tiled=tiled: m.all_gather(x, IJ, axis=axis, tiled=tiled))
        for axis in (0, 1, -1)
        for tiled in (True, False)
    ),
    Same("all_gather invarying", lambda m, x: m.all_gather(x, "j", to="invarying")),
    Same("all_gather bool", lambda m, x: m.all_gather(x, "j"), dtype="bool"),
    *(
        Same(f"all_to_all {split} {concat} tiled={tiled}",
             lambda m, x, s=split, c=concat, t=tiled: m.all_to_all(x, "j", s, c, tiled=t),
             (3, 6, 3))
        for split, concat in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 1))
        for tiled in (True, False)
    ),
    Same("all_to_all (i, j)", lambda m, x: m.all_to_all(x, IJ, 0, 1, tiled=True)),
    Same("ppermute", lambda m, x: m.ppermute(x, "j", [(0, 1), (2, 0)])),
    Same("ppermute (i, j)", lambda m, x: m.ppermute(x, IJ, [(r, (r + 1) % 6) for r in range(6)])),
]  # fmt: skip


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_values_are_those_of_jax_lax(check_vma):
    rng = np.random.default_rng(0)
    mesh = mesh_of(2, 3, 1, names=("i", "j", "one"))
    xs = [values(rng, case.dtype, (6, *case.shape)) for case in SAME]
    if not check_vma:
        xs = [np.asarray(x) for x in xs]

    def run(module):
        return on_ranks(
            lambda xs: [case.call(module, x) for case, x in zip(SAME, xs, strict=True)],
            mesh,
            xs,
            check_vma=check_vma,
        )

    for case, got, want in zip(SAME, run(xcoll), run(lax), strict=True):
        assert_same_bits(got, want, case.name)


def forced(choice):
    """Returns xcoll's functions with a policy, to be called where a module is."""
    policy = Policy(algorithm=choice)
    names = ("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all")
    return SimpleNamespace(**{name: partial(getattr(xcoll, name), policy=policy) for name in names})


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_types_are_those_of_jax_lax(case, check_vma):
    mesh = mesh_of(2, 3, 1, names=("i", "j", "one"))
    x = jax.ShapeDtypeStruct((6, *case.shape), case.dtype)

    def types_and_effects(module):
        seen = []

        def fn(x):
            seen.append(jax.tree.map(jax.typeof, case.call(module, x)))
            return jnp.zeros(())

        traced = jax.make_jaxpr(sharded(fn, mesh, check_vma))(x)
        (eqn,) = (e for e in traced.eqns if e.primitive.name == "shard_map")
        return seen, eqn.params["jaxpr"].effects

    want = types_and_effects(lax)
    assert types_and_effects(xcoll) == want
    if "ppermute" not in case.name:
        assert types_and_effects(forced("direct")) == want


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter"])
def test_axis_index_groups_are_those_of_jax_lax(name):
    groups = [[0, 3], [2, 1]]
    x = values(np.random.default_rng(0), "int32", (4, 2, 3))

    def run(module):
        fn = partial(getattr(module, name), axis_name="i", axis_index_groups=groups)
        return on_ranks(fn, mesh_of(4), x, check_vma=False)

    assert_same_bits(run(xcoll), run(lax))


def test_all_to_all_with_axis_index_groups():
    x = values(np.random.default_rng(0), "int32", (4, 2, 3))
    got, want = (
        on_ranks(
            lambda x, m=m: m.all_to_all(x, "i", 0, 1, axis_index_groups=[[0, 3], [2, 1]]),
            mesh_of(4),
            x,
            check_vma=False,
        )
        for m in (xcoll, lax)
    )
    assert_same_bits(got, want)


# Derivatives: by every algorithm those of jax.lax, inside and outside of shard_map

TWIN = {
    "psum": lambda m, x, axes: m.psum(x, axes),
    "pmean": lambda m, x, axes: m.pmean(x, axes),
    "psum_scatter": lambda m, x, axes: m.psum_scatter(x, axes),
    "all_gather": lambda m, x, axes: m.all_gather(x, axes),
    "all_to_all": lambda m, x, axes: m.all_to_all(x, axes, 0, 0),
}
DIFFERENTIABLE = {
    "all_reduce": ("psum", "pmean"),
    "reduce_scatter": ("psum_scatter",),
    "all_gather": ("all_gather",),
    "all_to_all": ("all_to_all",),
}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_gradients_are_those_of_jax_lax(choice, check_vma):
    """``grad`` inside and outside, and ``jvp``; whole numbers, so that sums are exact."""
    names = [n for c in CHOICES[choice] for n in DIFFERENTIABLE.get(c, ())]
    if not names:
        pytest.skip("it does rooted collectives only: see test_gradients_of_rooted_collectives")
    num_ranks = 4
    mesh = mesh_for(choice, num_ranks)
    rng = np.random.default_rng(7)
    x = rng.integers(-3, 4, (num_ranks, num_ranks, 5)).astype(np.float32)
    t = rng.integers(-3, 4, x.shape).astype(np.float32)

    def losses(module, x):
        rank = lax.axis_index(mesh.axis_names) + 1
        return [(TWIN[n](module, x * x, mesh.axis_names) * rank).sum() for n in names]

    def inside(module):
        return on_ranks(jax.grad(lambda x: sum(losses(module, x))), mesh, x, check_vma=check_vma)

    def outside(module):
        run = sharded(lambda x: jnp.stack(losses(module, x)), mesh, check_vma)
        grad = jax.jit(jax.grad(lambda x: (run(x) * np.arange(1, num_ranks + 1)[:, None]).sum()))(x)
        return grad, *jax.jit(lambda x, t: jax.jvp(run, (x,), (t,)))(x, t)

    # An algorithm is named for what it does; what its transposes cannot do, stays native.
    ours = forced(choice)
    assert_same_bits(inside(ours), inside(lax))
    assert_same_bits(outside(ours), outside(lax))


ROOTED = {
    "pbroadcast": lambda m, x: m.pbroadcast(x[0], "i", 2),
    "preduce": lambda m, x: m.preduce(x[0], "i", 2),
    "preduce mean": lambda m, x: m.preduce(x[0], "i", 2, op="mean"),
    "preduce prod": lambda m, x: m.preduce(x[0], "i", 2, op="prod"),
    "pgather": lambda m, x: m.pgather(x[0], "i", 2),
    "pscatter": lambda m, x: m.pscatter(x, "i", 2),
    "pprod": lambda m, x: m.pprod(x[0], "i"),
}


def in_jax_lax(check_vma):
    """The same functions, written with jax.lax's collectives."""
    to = "invarying" if check_vma else "varying"

    def masked(x, root):
        return jnp.where(lax.axis_index("i") == root, x, jnp.zeros_like(x))

    reductions = {
        "sum": lambda x: lax.psum(x, "i"),
        "mean": lambda x: lax.pmean(x, "i"),
        "prod": lambda x: jnp.prod(lax.all_gather(x, "i"), 0),
    }
    return SimpleNamespace(
        pbroadcast=lambda x, axis, source: lax.all_gather(x, "i")[source],
        preduce=lambda x, axis, root, op="sum": masked(reductions[op](x), root),
        pgather=lambda x, axis, root: masked(lax.all_gather(x, "i"), root),
        pscatter=lambda x, axis, root: lax.all_to_all(x, "i", 0, 0)[root],
        pprod=lambda x, axis: jnp.prod(lax.all_gather(x, "i", to=to), 0),
    )


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("algorithm", [None, "tree"])
def test_gradients_of_rooted_collectives(algorithm, check_vma):
    policy = None if algorithm is None else Policy(algorithm=algorithm)
    names = ("pbroadcast", "preduce", "pgather", "pscatter", "pprod")
    ours = SimpleNamespace(**{n: partial(getattr(xcoll, n), policy=policy) for n in names})
    mesh = mesh_of(5)
    rng = np.random.default_rng(8)
    x = rng.integers(-3, 4, (5, 5, 3)).astype(np.float32)

    def losses(module, x):
        rank = lax.axis_index("i") + 1
        return [(fn(module, x * x) * rank).sum() for fn in ROOTED.values()]

    def both(module):
        run = sharded(lambda x: jnp.stack(losses(module, x)), mesh, check_vma)
        inside = on_ranks(
            lambda x: jax.jacrev(lambda x: jnp.stack(losses(module, x)))(x),
            mesh,
            x,
            check_vma=check_vma,
        )
        weights = np.arange(1, 6)[:, None]
        return inside, jax.jit(jax.grad(lambda x: (run(x) * weights).sum()))(x)

    # Products of squares up to 9 over five ranks, with weights: exact below 2**24.
    assert_same_bits(both(ours), both(in_jax_lax(check_vma)))


# Modes


def each_collective(m, x):
    """Uses every function; ``x`` is (3, 3) on each of three ranks."""
    y = m.psum_scatter(x, "i") + m.pbroadcast(x[1], "i", 1) + m.pscatter(x, "i", 2)
    y = y + m.all_gather(y, "i")[2] + m.all_to_all(x, "i", 0, 0)[0] + m.ppermute(y, "i", [(0, 1)])
    y = y - m.pgather(y, "i", 1)[0] + m.preduce(y, "i", 0)
    y = m.barrier({"y": y}, "i")["y"]
    return y * m.psum(y, "i") - m.pmean(y, "i") * m.pprod(y, "i")


def test_jit_eager_vmap_and_control_flow_agree():
    mesh = mesh_of(3)
    rng = np.random.default_rng(9)
    x = rng.uniform(-1, 1, (3, 3, 3)).astype(np.float32)
    fn = partial(each_collective, xcoll)
    want = on_ranks(fn, mesh, x)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(sharded(fn, mesh)(x), want)  # eager
    close(on_ranks(fn, mesh, x, check_vma=False), want)
    close(on_ranks(jax.checkpoint(fn), mesh, x), want)

    def looped(x):
        return lax.scan(lambda c, _: (c, fn(c)), x, None, length=2)[1]

    def branched(x):
        return lax.cond(xcoll.pmax(x[0, 0], "i") > -2, fn, lambda x: x[0], x)

    close(on_ranks(looped, mesh, x), np.stack([want, want], 1))
    close(on_ranks(branched, mesh, x), want)
    # The leading dimension: behind the cut one, jax.lax.psum_scatter(tiled=False) itself fails.
    batch = np.stack([x, -x, 2 * x], 1)
    for check_vma in CHECK_VMA:
        got = on_ranks(jax.vmap(fn), mesh, batch, check_vma=check_vma)
        for b in range(3):
            close(got[:, b], on_ranks(fn, mesh, batch[:, b]))


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "all_gather", "pprod"])
def test_vmap_over_the_axis_itself(name):
    x = values(np.random.default_rng(10), "float32", (4, 3))
    got = jax.vmap(lambda x: getattr(xcoll, name)(x, "v"), axis_name="v")(x)
    if name == "pprod":
        assert_reduced(np.asarray(got)[0], x, "prod")
    else:
        want = jax.vmap(lambda x: getattr(lax, name)(x, "v"), axis_name="v")(x)
        assert_same_bits(got, want)


# Beyond jax.lax


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_all_reduce_by_every_operation(check_vma):
    x = np.array([[0, 2, -3, 0], [0, 5, 1, 4], [0, -1, 2, 0]], np.float32)
    operations = ("sum", "mean", "max", "min", "prod", "any", "all")

    def fn(x):
        reduced = {op: xcoll.all_reduce(x, "i", op=op) for op in operations}
        rooted = {op: xcoll.preduce(x, "i", root=1, op=op) for op in operations}
        return reduced, rooted

    reduced, rooted = on_ranks(fn, mesh_of(3), x, check_vma=check_vma)
    want = {
        "sum": x.sum(0), "mean": x.sum(0) / np.float32(3), "max": x.max(0), "min": x.min(0),
        "prod": x.prod(0), "any": x.any(0), "all": x.all(0),
    }  # fmt: skip
    for op in operations:
        assert_same_bits(reduced[op], np.stack([want[op]] * 3), op)
        nowhere = np.zeros_like(want[op])
        assert_same_bits(rooted[op], np.stack([nowhere, want[op], nowhere]), op)


def test_defaults_are_the_sum_and_rank_zero():
    x = np.arange(6, dtype=np.int32).reshape(3, 2)

    def fn(x):
        row = xcoll.pscatter(jnp.stack([x, 2 * x, 3 * x]), "i")
        return xcoll.all_reduce(x, "i"), xcoll.preduce(x, "i"), xcoll.pgather(x, "i"), row

    total, at_zero, gathered, row = on_ranks(fn, mesh_of(3), x)
    np.testing.assert_array_equal(total, [[6, 9]] * 3)
    np.testing.assert_array_equal(at_zero, [[6, 9], [0, 0], [0, 0]])
    np.testing.assert_array_equal(gathered, [x, 0 * x, 0 * x])
    np.testing.assert_array_equal(row, [[0, 1], [0, 2], [0, 3]])


def test_any_and_all_of_nan_and_integers():
    x = np.array([[np.nan, 0.0], [0.0, 0.0]], np.float32)
    k = np.array([[256, 0], [0, 0]], np.int32)  # 256 must not vanish in a byte

    def fn(x, k):
        return xcoll.all_reduce(x, "i", "any"), xcoll.all_reduce(k, "i", "any")

    for got in on_ranks(fn, mesh_of(2), x, k):
        np.testing.assert_array_equal(got, [[True, False]] * 2)


def test_pytrees_and_python_numbers():
    def fn(x):
        tree = {"a": x, "b": [x[0], (x > 0)], "c": ()}
        return (
            xcoll.pprod(tree, "i"),
            xcoll.preduce(tree, "i", 1),
            xcoll.pgather(tree, "i", 1),
            xcoll.pbroadcast(tree, "i", 1),
            xcoll.barrier(tree, "i"),
            xcoll.pprod(3, "i"),
            xcoll.all_reduce(3, "i"),
        )

    x = np.array([[2, -1], [3, 4]], np.int32)
    prod, total, gathered, sent, same_tree, nine, six = on_ranks(fn, mesh_of(2), x)
    flags = (x > 0).astype(np.int32)
    np.testing.assert_array_equal(prod["a"], [[6, -4]] * 2)
    np.testing.assert_array_equal(prod["b"][0], [6, 6])
    np.testing.assert_array_equal(prod["b"][1], [flags.prod(0)] * 2)
    np.testing.assert_array_equal(total["a"], [[0, 0], [5, 3]])
    np.testing.assert_array_equal(total["b"][1], [[0, 0], [2, 1]])
    np.testing.assert_array_equal(gathered["b"][1], [np.zeros((2, 2), bool), x > 0])
    np.testing.assert_array_equal(sent["b"][0], [3, 3])
    np.testing.assert_array_equal(same_tree["b"][1], x > 0)
    assert prod["c"] == total["c"] == sent["c"] == ()
    np.testing.assert_array_equal(nine, [9, 9])
    np.testing.assert_array_equal(six, [6, 6])


def test_empty_arrays():
    x = np.zeros((3, 0, 6), np.float32)

    def fn(x):
        policy = Policy(algorithm="ring")
        return (
            xcoll.psum(x, "i"),
            xcoll.psum(x, "i", policy=policy),
            xcoll.pprod(x, "i"),
            xcoll.all_gather(x, "i", policy=policy),
            xcoll.psum_scatter(x, "i", scatter_dimension=1, tiled=True, policy=policy),
            xcoll.pgather(x, "i", 1),
            xcoll.pbroadcast(x, "i", 1),
            xcoll.barrier(x, "i"),
        )

    shapes = [out.shape[1:] for out in on_ranks(fn, mesh_of(3), x)]
    flat, stacked = (0, 6), (3, 0, 6)
    assert shapes == [flat, flat, flat, stacked, (0, 2), stacked, flat, flat]


@pytest.mark.parametrize("algorithm", [None, "native", "ring", "direct", "halving_doubling"])
def test_mean_of_large_float16_does_not_overflow(algorithm):
    # The sum is 8 * 60000, beyond float16's largest, 65504.
    policy = None if algorithm is None else Policy(algorithm=algorithm)
    x = np.full((8, 33), 60000, np.float16)
    x[3] = -60000

    def means(x):
        return xcoll.pmean(x, "i", policy=policy), xcoll.preduce(x, "i", op="mean")

    everywhere, at_zero = on_ranks(means, mesh_of(8), x)
    assert everywhere.dtype == at_zero.dtype == np.float16
    # Rounded once, to the nearest float16.
    want = np.full(33, (6 * 60000) / 8, np.float64).astype(np.float16)
    np.testing.assert_array_equal(everywhere, np.stack([want] * 8))
    np.testing.assert_array_equal(at_zero[0], want)


@pytest.mark.parametrize("choice", [c for c in CHOICES if "all_reduce" in CHOICES[c]], ids=str)
def test_non_finite_elements_and_no_others(choice):
    """NaN, Inf and Inf - Inf where the exact sum has them, the other elements untouched."""
    x = np.ones((4, 67), np.float32)
    x[1, 5], x[2, 6], x[0, 7], x[3, 7], x[3, 66] = np.nan, np.inf, np.inf, -np.inf, -np.inf
    mesh, policy = mesh_for(choice, 4), Policy(algorithm=choice)
    got = on_ranks(lambda x: xcoll.psum(x, mesh.axis_names, policy=policy), mesh, x)
    want = np.full(67, 4, np.float32)
    want[[5, 6, 7, 66]] = np.nan, np.inf, np.nan, -np.inf
    np.testing.assert_array_equal(got, np.stack([want] * 4))


# Policies of a call


@pytest.mark.parametrize("key", ["psum", "all_reduce"])
def test_a_policy_may_name_the_function_or_the_schedule(key):
    policy = Policy(algorithm={key: "ring"})
    run = jax.jit(sharded(lambda x: xcoll.psum(x, "i", policy=policy), mesh_of(4)))
    lowered = run.lower(jax.ShapeDtypeStruct((4, 64), jnp.float32))
    assert operations(lowered) == {"collective_permute"}


def test_native_and_disabled_are_the_plain_program():
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)

    def lower(fn):
        return operations(jax.jit(sharded(fn, mesh_of(4))).lower(x))

    ring = Policy(algorithm="ring")
    assert lower(lambda x: xcoll.psum(x, "i", policy=ring)) == {"collective_permute"}
    assert lower(lambda x: xcoll.psum(x, "i", policy=Policy.native())) == {"all_reduce"}
    with xcoll.disable():
        assert lower(lambda x: xcoll.psum(x, "i", policy=ring)) == {"all_reduce"}


def test_a_deterministic_sum_is_in_rank_order():
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((7, 501)) * 10.0 ** rng.integers(-4, 5, (7, 501))).astype(np.float32)
    want = x[0]
    for row in x[1:]:
        want = want + row
    policy = Policy(deterministic=True)
    got = on_ranks(lambda x: xcoll.psum(x, "i", policy=policy), mesh_of(7), x)
    assert_same_bits(got, np.stack([want] * 7))
