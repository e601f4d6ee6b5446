"""Programs of schedules do not grow with the ranks, and their loops do what is written out."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_table import AG, AR, CASES, RS, Case
from jax.extend.core import jaxprs_in_params
from schedule_runner import enter, expected

from xcoll import execute, lower
from xcoll.algorithms import build, hierarchical, ring, torus
from xcoll.plan import Span, Stage
from xcoll.policy import Choice
from xcoll.schedule import Repeat


def equations(
    choice: Choice, collective: str, num_ranks: int, dims: tuple[int, ...] = (), root: int = 0
) -> int:
    """Counts the equations of a lowered schedule, those inside loops too; needs no devices."""
    stage = Stage(collective, Span(("x",), num_ranks), choice, dims)
    # Divided by all numbers of slots below, so that nothing is padded.
    rows = {RS: (num_ranks, 24), AG: (24,)}.get(collective, (num_ranks * 24,))

    def body(x: jax.Array) -> jax.Array:
        return lower.run_stage(x, stage, {"x": num_ranks}, "sum", root).reshape(-1)

    mesh = jax.sharding.AbstractMesh((num_ranks,), ("x",))
    fn = jax.shard_map(body, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("x"), check_vma=False)
    return _count(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(rows, "float32")).jaxpr)


def _count(jaxpr: jax.extend.core.Jaxpr) -> int:
    return sum(1 + sum(map(_count, jaxprs_in_params(e.params))) for e in jaxpr.eqns)


@pytest.mark.parametrize("root", [0, 5])
def test_ring_broadcast(root: int):
    sizes = {equations(ring(), "broadcast", n, root=root) for n in (20, 33, 64, 100, 256)}
    assert len(sizes) == 1
    assert sizes.pop() <= equations(ring(), "broadcast", 16, root=root)


@pytest.mark.parametrize("collective", [AR, RS, AG])
@pytest.mark.parametrize(
    "grids",
    [
        [(17,), (32,), (256,)],
        [(5, 5), (8, 8), (16, 16)],
        [(3, 8), (8, 3), (8, 16), (16, 7), (4, 64)],
        [(3, 3, 3), (4, 4, 4), (6, 6, 6)],
        [(3, 4, 8), (3, 5, 8), (2, 5, 9)],
    ],
    ids=str,
)
def test_torus(collective: str, grids: list[tuple[int, ...]]):
    # It depends on how many axes there are, and on when parts of the payload go on to the next
    # axis: at the same time where axes are equal.
    sizes = {equations(torus(), collective, math.prod(dims), dims) for dims in grids}
    assert len(sizes) == 1
    axes = len(grids[0])
    rings = axes * (axes * (axes - 1) + 1) * (2 if collective == AR else 1)
    # One of them fences the update of the buffer in place.
    assert sizes.pop() <= 66 * rings


def test_pipelined_hierarchy():
    # It depends neither on the hosts nor on the ranks of one.
    sizes = {}
    for segments in (2, 3, 9):
        (sizes[segments],) = {
            equations(hierarchical(num_segments=segments), AR, math.prod(dims), dims)
            for dims in [(2, 16), (8, 8), (32, 4), (3, 50)]
        }
    # With one slot a rank, the slots are linear in the rank, which is not looked up in a table.
    assert sizes[3] == sizes[9]
    assert max(sizes.values()) <= 6 * 60


def on_devices(case: Case, num_ranks: int, dims: tuple[int, ...], root: int) -> np.ndarray:
    """Runs a case on integers; returns what each rank (row) has, and checks it."""
    schedule = build(case.choice, case.collective, num_ranks, dims=dims, root=root)
    slots = schedule.num_slots
    payload = np.random.default_rng(0).integers(-(2**20), 2**20, (num_ranks, slots, 3), np.int32)
    given = enter(schedule, payload, payload)
    if schedule.enter == "own":
        share = schedule.share
        given = np.stack([row[r * share : (r + 1) * share] for r, row in enumerate(given)])
    rows = (num_ranks, -1) if case.collective == RS else (-1,)
    stage = Stage(case.collective, Span(("x",), num_ranks), case.choice, dims)

    def body(x: jax.Array) -> jax.Array:
        x = x.reshape(rows)
        return lower.run_stage(x, stage, {"x": num_ranks}, "sum", root).reshape(1, -1)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("x",))
    spec = jax.P("x")
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    got = np.asarray(jax.jit(fn)(jnp.asarray(given)))
    for mine, right in zip(got, expected(schedule, payload), strict=True):
        assert right is not None
        np.testing.assert_array_equal(mine, right.reshape(-1))
    return got


def has_loops(case: Case) -> bool:
    (dims, *_) = case.dims(8)
    steps = build(case.choice, case.collective, 8, dims=dims).steps
    return any(isinstance(step, Repeat) for step in steps)


@pytest.mark.parametrize("case", [c for c in CASES if has_loops(c)], ids=str)
def test_loops_run_right(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execute, "UNROLL_MAX_RANKS", 1)
    for num_ranks in (5, 6, 8):
        for dims in case.dims(num_ranks):
            if 1 not in dims:
                on_devices(case, num_ranks, dims, num_ranks // 2)


def test_slots_of_long_loops_fit_32_bits(monkeypatch: pytest.MonkeyPatch):
    # 70,000 slots, 35,000 iterations backwards: their product does not fit.
    monkeypatch.setattr(execute, "UNROLL_MAX_RANKS", 1)
    on_devices(Case(hierarchical(num_segments=35001), AR, (2,)), 2, (2, 1), 0)
