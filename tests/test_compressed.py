"""Collectives with codecs keep the law of error, their types, and one result for all replicas.

A covering table: each algorithm on each number of ranks, with codecs, dtypes, meshes, ways of
cutting and checks of varying axes in turn. Every program holds all six collectives, of leaves of
many shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_table import FIXED, TABLE
from jax import lax
from lossy import SUMS, Call, roundings, same_replicas, telescoped
from spmd import assert_same_bits, mesh_of, on_ranks, sharded

import xcoll
from xcoll import Policy, execute
from xcoll.algorithms import direct, hierarchical
from xcoll.codecs import Codec, FixedPoint

AR, RS, AG, A2A = "psum", "psum_scatter", "all_gather", "all_to_all"

# What each algorithm has an encoded form of. A permute has no algorithm.
ENCODED = {
    "direct": (AR, RS, AG, A2A),
    "direct(shots=1)": (AR, RS, AG, A2A),
    "ring": (AR, RS, AG),
    "bidirectional_ring": (AR, RS, AG),
    "halving_doubling": (AR, RS),
    "recursive_doubling": (AR, AG),
    "torus": (AR, RS, AG),
    "hierarchical": (AR, RS, AG),
}
CHOICES: dict[str, Any] = {name: name for name in ENCODED} | {
    "direct(shots=1)": direct(shots=1),
    "hierarchical": hierarchical("ring", "direct"),
}
MESHES = {
    "direct": [(1,), (2,), (3,), (5,), (7,), (8,), (2, 4)],
    "direct(shots=1)": [(3,), (2, 2), (7,)],
    "ring": [(2,), (3,), (5,), (4, 2)],
    "bidirectional_ring": [(2,), (3,), (5,)],
    "halving_doubling": [(2,), (3,), (5,)],
    "recursive_doubling": [(2,), (3,), (7,), (8,)],
    "torus": [(2, 2), (2, 3), (4, 2)],
    "hierarchical": [(2, 2), (2, 4), (3, 2)],
}
CODECS: tuple[tuple[Codec, float], ...] = tuple(
    [(row.codec, float(row.max_error)) for row in TABLE] + [(codec, 0.0) for codec in FIXED]
)
NEAREST = [pair for pair in CODECS if not pair[0].needs_key]
BY_CHANCE = [pair for pair in CODECS if pair[0].needs_key]
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One program."""

    algorithm: str
    mesh: tuple[int, ...]
    codec: Codec
    max_error: float
    dtype: str
    check_vma: bool

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh))
        return f"{self.algorithm}-{size}-{self.codec}-{self.dtype}-{self.check_vma}"


def cases() -> list[Case]:
    """Every algorithm on its meshes, with codecs in turn; those by chance on a few of them.

    Random numbers take long to compile: they are met once, on small meshes.
    """
    pairs = [(a, mesh) for a, meshes in MESHES.items() for mesh in meshes]
    met = [(*pairs[i], *NEAREST[i * 5 % len(NEAREST)]) for i in range(len(pairs))]
    small = [("hierarchical", (2, 2)), ("ring", (3,)), ("direct(shots=1)", (3,))]
    small += [("direct", (2,))] * (len(BY_CHANCE) - len(small))
    met += [(*place, *pair) for place, pair in zip(small, BY_CHANCE, strict=True)]
    return [Case(*met[i], DTYPES[(i + i // 3) % 3], i % 2 == 0) for i in range(len(met))]


CASES = cases()


def test_the_table_covers():
    """Every codec, every algorithm on every mesh, with two dtypes and both checks at least."""
    assert {case.codec for case in CASES} == {codec for codec, _ in CODECS}
    met = {(case.algorithm, case.mesh) for case in CASES}
    assert met == {(a, mesh) for a, meshes in MESHES.items() for mesh in meshes}
    for algorithm in MESHES:
        mine = [case for case in CASES if case.algorithm == algorithm]
        assert len({case.dtype for case in mine}) >= 2, algorithm
        assert {case.check_vma for case in mine} == {True, False}, algorithm
    assert {case.dtype for case in CASES} == set(DTYPES)


def leaves_of(call: Call, n: int) -> list[tuple[int, ...]]:
    """Shapes per rank: none, one and prime numbers of elements, in one to three dimensions."""
    if call.name in ("psum", "pmean", "ppermute"):
        return [(), (0,), (1,), (521,), (3, 7, 31)]
    if call.name == "all_gather":
        return [(), (0,), (3, 7, 31)] if not call.tiled else [(1,), (67, 5)]
    if call.tiled:
        return [(3, n), (5, 7 * n, 11)] if call.split else [(n, 0), (131 * n,), (3 * n, 5)]
    return [(3, n, 67)] if call.split else [(n,), (n, 131), (n, 3, 5)]


def calls_of(number: int, with_moves: bool = True) -> list[Call]:
    tiled, dimension = number % 2 == 0, number // 2 % 2
    sums = [Call("psum"), Call("pmean"), Call("psum_scatter", split=dimension, tiled=tiled)]
    if not with_moves:
        return sums
    return [
        *sums,
        Call("all_gather", concat=0 if tiled else -1, tiled=tiled),
        Call("all_to_all", split=dimension, concat=1 - dimension if dimension else 0, tiled=tiled),
        Call("ppermute", partial=tiled),
    ]


def data(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], wide: bool) -> np.ndarray:
    """Values near one, with zeros; or of 30 orders of magnitude (float16: of all it has)."""
    x = rng.standard_normal(shape)
    if wide:
        low, high = (-8, 3.5) if dtype == "float16" else (-15, 15)
        x = np.sign(x) * 10.0 ** rng.uniform(low, high, shape)
    x = np.where(rng.random(shape) < 0.02, 0.0, x)
    return x.astype(jnp.dtype(dtype))


def expected_encoded(case: Case, name: str, n: int) -> bool:
    """Whether a codec carries a collective, by the table above."""
    name = "psum" if name == "pmean" else name
    if n == 1:
        return False
    if isinstance(case.codec, FixedPoint):
        return name in SUMS and name in ENCODED[case.algorithm]
    if name == "ppermute":
        return True
    if (case.algorithm, name) == ("recursive_doubling", "psum") and case.codec.needs_key:
        return False
    return name in ENCODED[case.algorithm]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_replicas_and_types(case):
    number, n = CASES.index(case), int(np.prod(case.mesh))
    mesh = mesh_of(*case.mesh)
    axes = mesh.axis_names
    # What only moves is encoded once, by any algorithm: once a codec will do.
    with_moves = case.codec not in {earlier.codec for earlier in CASES[:number]}
    calls, key = calls_of(number, with_moves), jax.random.key(number)
    types: list[Any] = []

    def ours(xs):
        return {str(c): c.run(axes, n, key=key)(x) for c, x in zip(calls, xs, strict=True)}

    def theirs(xs):
        return {str(c): c.run_lax(axes, n)(x) for c, x in zip(calls, xs, strict=True)}

    policy = Policy(codec=case.codec, algorithm=CHOICES[case.algorithm], min_bytes=0)
    optimized = xcoll.optimize(ours, policy=policy)

    def body(xs):
        out = optimized(xs)
        types.append((jax.tree.map(jax.typeof, out), jax.tree.map(jax.typeof, theirs(xs))))
        return out

    run = jax.jit(sharded(body, mesh, case.check_vma))
    for wide in (False, True):
        rng = np.random.default_rng(number)
        xs = [
            [data(rng, case.dtype, (n, *shape), wide) for shape in leaves_of(c, n)] for c in calls
        ]
        out = jax.tree.map(np.asarray, run(xs))
        if not wide:
            got, want = types[0]
            assert got == want
            plans = plans_of(optimized.reports[-1], case, n)
        for call, leaves in zip(calls, xs, strict=True):
            # xcoll.pmean sums float16 in float32, lest the sum overflow.
            is_wide = call.name == "pmean" and case.dtype == "float16"
            plan = plans[
                "psum" if call.name == "pmean" else call.name, "float32" if is_wide else case.dtype
            ]
            for x, y in zip(leaves, out[str(call)], strict=True):
                check(case, call, plan, x, y)


def plans_of(report, case, n):
    """The plan of each collective; all sites of one have the same, but for empty ones."""
    plans: dict[str, Any] = {}
    for site in report.sites:
        if site.kept_reason == "empty operand":
            continue
        plans[site.collective, site.dtype] = site.plan
        assert site.plan.is_lossy == expected_encoded(case, site.collective, n), site
    return plans


def check(case, call, plan, x, y):
    n, what = len(x), f"{call} {x.shape}"
    exact = call.exact(x)
    assert y.dtype == x.dtype and y.shape == exact.shape, what
    if plan.is_lossy and isinstance(case.codec, FixedPoint):
        largest = (2 ** (case.codec.bits - 1) - 1) // n
        steps = n * (2 if case.codec.needs_key else 1)
        # Of 32 bits, the largest has 24 that count: less by a 2**23rd at most, and one rounding a
        # rank more; narrow dtypes round once more.
        limit = (steps / largest + n * 2.0**-22) * (1 + 2.0**-7) + 2.0**-8
        assert plan.max_error <= limit
        times = 1
    elif plan.is_lossy and case.algorithm not in ("torus", "hierarchical"):
        times = roundings(case.algorithm, call.name, n)
        # Sums in float32, and one rounding to the dtype of the payload.
        limit = telescoped(case.max_error, times) * (1 + n * 2.0**-20) + n * 2.0**-23
        if case.dtype != "float32":
            limit += 2.0**-7 * (1 + limit) / (1 if case.dtype == "bfloat16" else 8)
        assert plan.max_error <= limit, what
    else:
        times = 2 * n
    bound = call.bound(x, case.codec.block, plan.max_error, times)
    error = np.abs(y.astype(np.float64) - exact)
    assert (error <= bound).all(), (what, error.max(), bound[error > bound].min())
    if call.is_replicated:
        assert same_replicas(y), what


def test_functional_calls_are_planned_alone_and_give_the_same():
    """A call with a policy of its own gives what the pass makes of a lone call."""
    mesh, axes = mesh_of(2, 2), ("i", "j")
    key = jax.random.key(5)
    policy = Policy(codec=xcoll.codecs.int8(block=32, rounding="stochastic"), min_bytes=0,
                    algorithm="direct")  # fmt: skip
    calls = calls_of(0)[:-1]
    xs = [np.random.default_rng(0).standard_normal((4, 4 * 33)).astype("float32")] * len(calls)

    def functional(xs):
        return [c.run(axes, 4, key=key, policy=policy)(x) for c, x in zip(calls, xs, strict=True)]

    def passed(xs):
        return [
            xcoll.optimize(c.run(axes, 4, key=key), policy=policy)(x)
            for c, x in zip(calls, xs, strict=True)
        ]

    got, want = on_ranks(functional, mesh, xs), on_ranks(passed, mesh, xs)
    for call, a, b, x in zip(calls, got, want, xs, strict=True):
        np.testing.assert_array_equal(a, b, str(call))
        assert (a != call.exact(x)).any(), call


BY_AXIS = {
    "inner by chance": {"j": xcoll.codecs.int8(block=32, rounding="stochastic")},
    "outer by chance": {"i": xcoll.codecs.int4(block=32, rounding="stochastic")},
    "two codecs": {"i": xcoll.codecs.int4(block=32), "j": xcoll.codecs.int8(block=48)},
    "codec and cast": {"i": xcoll.codecs.int8(block=32), "j": xcoll.codecs.cast("bfloat16")},
}
LARGEST_ERROR = {"inner by chance": 2 / 127, "outer by chance": 2 / 7, "two codecs": 1 / 7,
                 "codec and cast": 1 / 127}  # fmt: skip


@pytest.mark.parametrize("name", BY_AXIS)
def test_codecs_by_axis(name):
    """What one axis has gathered is sent on over the other alike by all who hold it."""
    mesh, axes, key = mesh_of(2, 2), ("i", "j"), jax.random.key(1)
    calls = [Call("psum"), Call("psum_scatter"), Call("all_gather"), Call("all_to_all")]
    x = np.random.default_rng(1).standard_normal((4, 4 * 97)).astype(np.float32)

    def fn(x):
        return [c.run(axes, 4, key=key)(x) for c in calls]

    policy = Policy(codec=BY_AXIS[name], algorithm=hierarchical("direct", "direct"), min_bytes=0)
    ours = xcoll.optimize(fn, policy=policy)
    out = on_ranks(ours, mesh, x)
    for call, site, y in zip(calls, ours.reports[-1].sites, out, strict=True):
        assert site.plan.is_lossy
        # Two roundings over each axis at most; blocks of both codecs lie inside one of 96.
        assert site.plan.max_error <= telescoped(LARGEST_ERROR[name], 4) + 1e-5
        bound = call.bound(x, 96, site.plan.max_error, 4)
        assert (np.abs(y.astype(np.float64) - call.exact(x)) <= bound).all(), call
        assert not call.is_replicated or same_replicas(y), call


@pytest.mark.parametrize("codec", [xcoll.codecs.int8(scale="exact"),
                                   xcoll.codecs.cast("float8_e4m3fn")], ids=str)  # fmt: skip
def test_long_rings_are_loops_with_the_same_result(codec, monkeypatch):
    """More than 16 ranks go round in a loop: here with five."""
    x = np.random.default_rng(2).standard_normal((5, 1031)).astype(np.float32)
    policy = Policy(codec=codec, algorithm="ring", min_bytes=0)

    def run():
        def fn(x):
            return lax.psum(x, "i"), lax.all_gather(x, "i")

        return on_ranks(xcoll.optimize(fn, policy=policy), mesh_of(5), x)

    unrolled = run()
    monkeypatch.setattr(execute, "UNROLL_MAX_RANKS", 1)
    looped = run()
    for a, b in zip(unrolled, looped, strict=True):
        assert_same_bits(a, b)
