"""Every algorithm compiles for TPU and GPU to the operations that its schedule says, no others.

The payload divides by every number of slots, so that expected bytes are exact quotients: nothing is
padded and nothing of the code's own arithmetic is repeated here.
"""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from algorithm_table import CASES, build
from jax import lax
from jax.sharding import PartitionSpec as P

import xcoll
from xcoll import Policy, aot, hlo
from xcoll.algorithms import hierarchical
from xcoll.schedule import NativeStep, PermuteStep

SHAPE = (768, 128)
PAYLOAD = 768 * 128 * 4

# Mesh shape; axes of the algorithms that have no levels; ranks in a slice, over the axes a and b.
TARGETS = {
    "v5e:4x4": ((2, 2, 4), ("b",), None),
    "v5p:4x4x4": ((8, 2, 4), ("b",), None),
    "2*v5e:2x2": ((2, 4), ("a", "b"), 4),
    "h100:8": ((2, 4), ("a", "b"), None),
}

CALLS = {
    "all_reduce": lambda x, axes, policy: xcoll.psum(x, axes, policy=policy),
    "reduce_scatter": lambda x, axes, policy: xcoll.psum_scatter(
        x, axes, tiled=True, policy=policy
    ),
    "all_gather": lambda x, axes, policy: xcoll.all_gather(x, axes, tiled=True, policy=policy),
    "all_to_all": lambda x, axes, policy: xcoll.all_to_all(
        x, axes, 0, 0, tiled=True, policy=policy
    ),
    "broadcast": lambda x, axes, policy: xcoll.pbroadcast(x, axes, 0, policy=policy),
    "reduce": lambda x, axes, policy: xcoll.preduce(x, axes, policy=policy),
    "gather": lambda x, axes, policy: xcoll.pgather(x, axes, policy=policy),
    "scatter": lambda x, axes, policy: xcoll.pscatter(x, axes, tiled=True, policy=policy),
}

PLAIN = {
    "all_reduce": lambda x, axes: lax.psum(x, axes),
    "reduce_scatter": lambda x, axes: lax.psum_scatter(x, axes, tiled=True),
    "all_gather": lambda x, axes: lax.all_gather(x, axes, tiled=True),
    "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
}


def compiled(fn, topology):
    shape = TARGETS[topology][0]
    return aot.compile(
        fn,
        jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        mesh=aot.mesh(topology, shape, ("c", "a", "b")[-len(shape) :]),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )


def found(program):
    """Operations by kind (for a send or recv: with what it carries out) and operand bytes.

    XLA:GPU combines permutes with the same pairs into one of several operands: each counts.
    """
    rows = hlo.collectives(program)
    assert all(r.dtypes == ("f32",) and r.executions == 1 for r in rows)
    return Counter(
        (f"{r.kind} {r.transfer}" if r.transfer else r.kind, 4 * math.prod(dims))
        for r in rows
        for _, dims in r.operands
    )


def expected(schedule, per_slice):
    """The same from a schedule: one permute a lane, which slices cut into what stays and what goes.

    Args:
      schedule: the schedule.
      per_slice: ranks in a TPU slice, or None where there is one.
    """
    n, slots = schedule.num_ranks, schedule.num_slots
    if schedule.enter == "own":  # the payload is one rank's share
        slots = schedule.share
    assert PAYLOAD // 4 % (slots * 1024) == 0, "whole tiles, no padding"
    slot = PAYLOAD // slots
    share = slot * schedule.share
    ops = Counter()
    for step, _ in schedule.flat():
        match step:
            case PermuteStep(lanes):
                for lane in lanes:
                    num_bytes = lane.send.count * slot
                    inside, crosses = _by_slice(lane.pairs, n, per_slice or n)
                    if crosses:
                        ops["send collective-permute", num_bytes] += 1
                        ops["recv collective-permute", num_bytes] += 1
                    ops["collective-permute", num_bytes] += inside
            case NativeStep("all_to_all"):
                if per_slice:
                    ops["send all-to-all", share * n] += 1
                    ops["recv all-to-all", share * n] += 1
                else:
                    ops["all-to-all", share * n] += 1
            case NativeStep("all_gather"):
                if per_slice:  # over the slices first, then inside them
                    ops["send all-gather", share] += 1
                    ops["recv all-gather", share * n // per_slice] += 1
                ops["all-gather", share * n // per_slice if per_slice else share] += 1
            case NativeStep(other):
                raise AssertionError(f"no decomposition has a native {other} step")
    return ops


def _by_slice(pairs, num_ranks, per_slice):
    """Permutes inside slices that the program holds, and whether there are pairs between slices.

    All slices run one program. One permute does for slices with the same pairs; where they differ,
    the program branches on the slice and holds one for each, of no pairs for some.
    """
    inside = [set() for _ in range(num_ranks // per_slice)]
    for a, b in pairs:
        if a // per_slice == b // per_slice:
            inside[a // per_slice].add((a % per_slice, b % per_slice))
    alike = all(mine == inside[0] for mine in inside)
    permutes = min(len(inside[0]), 1) if alike else len(inside)
    return permutes, len(pairs) > sum(map(len, inside))


@pytest.mark.parametrize("case", [c for c in CASES if c.choice.name != "native"], ids=str)
@pytest.mark.parametrize("topology", TARGETS)
def test_an_algorithm_compiles_to_its_schedule(topology, case):
    shape, axes, per_slice = TARGETS[topology]
    if case.levels:
        axes = ("a", "b")
    num_ranks = shape[-1] if axes == ("b",) else shape[-1] * shape[-2]
    policy = Policy(algorithm={case.collective: case.choice})
    program = compiled(lambda x: CALLS[case.collective](x, axes, policy), topology)
    if case.levels:  # over the levels of the axes, or those of the hardware below them
        schedules = case.schedules(num_ranks)
    else:
        schedules = [build(case.choice, case.collective, num_ranks)]
    assert found(program) in [expected(schedule, per_slice) for schedule in schedules]


# Native steps over ranks that lie in one slice, or under one switch.
NATIVE = {
    "all_reduce": {("all-reduce", PAYLOAD): 1},
    "reduce_scatter": {("reduce-scatter", PAYLOAD): 1},
    "all_gather": {("all-gather", PAYLOAD): 1},
    "all_to_all": {("all-to-all", PAYLOAD): 1},
}

# What libtpu makes of one operation over two slices of four. Its reduce-scatter inside the slices
# is an all-reduce; that is its own doing, and what the hierarchical plan below avoids.
NATIVE_SLICES = {
    "all_reduce": {
        ("reduce-scatter", PAYLOAD): 1,
        ("send all-reduce", PAYLOAD // 4): 1,
        ("recv all-reduce", PAYLOAD // 4): 1,
        ("all-gather", PAYLOAD // 4): 1,
    },
    "reduce_scatter": {
        ("all-reduce", PAYLOAD): 1,
        ("send reduce-scatter", PAYLOAD // 4): 1,
        ("recv reduce-scatter", PAYLOAD // 8): 1,
    },
    "all_gather": {
        ("send all-gather", PAYLOAD): 1,
        ("recv all-gather", 2 * PAYLOAD): 1,
        ("all-gather", 2 * PAYLOAD): 1,
    },
    "all_to_all": {("send all-to-all", PAYLOAD): 1, ("recv all-to-all", PAYLOAD): 1},
}


@pytest.mark.parametrize("collective", NATIVE)
@pytest.mark.parametrize("topology", TARGETS)
def test_native_compiles_to_the_plain_program(topology, collective):
    _, axes, per_slice = TARGETS[topology]
    policy = Policy(algorithm={collective: "native"})
    program = compiled(lambda x: CALLS[collective](x, axes, policy), topology)
    assert found(program) == (NATIVE_SLICES if per_slice else NATIVE)[collective]
    plain = compiled(lambda x: PLAIN[collective](x, axes), topology)
    assert hlo.canonical(program) == hlo.canonical(plain)


# A hierarchy over the axes a (2, outer; the slices) and b (4, inner), each level XLA's own.
HIERARCHY = {
    "all_reduce": [
        ("reduce-scatter", PAYLOAD, "b"),
        ("all-reduce", PAYLOAD // 4, "a"),
        ("all-gather", PAYLOAD // 4, "b"),
    ],
    "reduce_scatter": [("reduce-scatter", PAYLOAD, "b"), ("reduce-scatter", PAYLOAD // 4, "a")],
    "all_gather": [("all-gather", PAYLOAD, "a"), ("all-gather", 2 * PAYLOAD, "b")],
    "all_to_all": [("all-to-all", PAYLOAD, "a"), ("all-to-all", PAYLOAD, "b")],
}


@pytest.mark.parametrize("collective", HIERARCHY)
@pytest.mark.parametrize("topology", ["2*v5e:2x2", "h100:8"])
def test_a_hierarchy_compiles_to_one_operation_a_level(topology, collective):
    policy = Policy(algorithm={collective: hierarchical("native", "native")})
    program = compiled(lambda x: CALLS[collective](x, ("a", "b"), policy), topology)
    mesh = aot.mesh(topology, (2, 4), ("a", "b"))
    rows = [r for r in hlo.collectives(program) if r.kind != "recv"]
    assert {r.dtypes for r in rows} == {("f32",)}
    # All-to-alls of different digits may come in either order.
    assert sorted((r.transfer or r.kind, r.operand_bytes, *hlo.axes_of(r, mesh)) for r in rows) == (
        sorted(HIERARCHY[collective])
    )
    crossing_slices = topology == "2*v5e:2x2"
    assert [r.kind == "send" for r in rows].count(True) == (1 if crossing_slices else 0)
