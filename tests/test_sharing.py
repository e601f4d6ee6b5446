"""Turns on a slow link, and chunks behind it: what stages do, on virtual devices."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax
from spmd import assert_same_bits, mesh_of

import xcoll
from xcoll import Policy, codecs, hlo, sharing
from xcoll.algorithms import hierarchical
from xcoll.hlo.auditing import audit
from xcoll.plan import Plan, Request, Span
from xcoll.planner import plan
from xcoll.topology import CodecRate

P = jax.P
RATE = "200Mbit"

# Mesh axes, sizes, what they lie on: hosts outside, in the middle, inside an axis, over two axes.
MESHES = {
    "2x4": (("host", "device"), (2, 4), "2*cpu:4"),
    "2x3": (("host", "device"), (2, 3), "2*cpu:3"),
    "2x1": (("host", "device"), (2, 1), "2*cpu:1"),
    "4x2": (("host", "device"), (4, 2), "4*cpu:2"),
    "3x2": (("host", "device"), (3, 2), "3*cpu:2"),
    "8": (("data",), (8,), "2*cpu:4"),
    "2x2x2": (("rack", "host", "device"), (2, 2, 2), "4*cpu:2"),
}


def planned(name, choice, policy=None, elements=16384, codec_rates=()):
    """Runs a psum over all axes of a mesh; returns inputs, results by rank, plan and program."""
    axes, sizes, text = MESHES[name]
    mesh = mesh_of(*sizes, names=axes)
    n = int(np.prod(sizes))
    x = np.random.default_rng(7).integers(-8, 9, (n, elements)).astype(np.float32)
    body = jax.shard_map(
        lambda v: lax.psum(v, axes), mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False
    )
    policy = policy or Policy(algorithm=choice)
    topology = xcoll.Topology.parse(f"{text}@{RATE}", axes=dict(zip(axes, sizes, strict=True)))
    device = dataclasses.replace(topology.device, codec_rates=codec_rates)
    topology = dataclasses.replace(topology, device=device)
    ours = xcoll.optimize(body, policy=policy, topology=topology)
    sharding = jax.NamedSharding(mesh, P(axes))
    compiled = jax.jit(ours).lower(jax.device_put(x, sharding)).compile()
    out = np.asarray(compiled(jax.device_put(x, sharding)))
    (site,) = ours.reports[-1].sites
    return x, out, site.plan, compiled, mesh


@pytest.mark.parametrize(("name", "top"), [
    *((name, "recursive_doubling") for name in MESHES), ("4x2", "pairwise"), ("3x2", "pairwise"),
    ("2x2x2", "pairwise"), ("4x2", "ring"),
])  # fmt: skip
def test_sums_are_exact_and_counted(name, top):
    x, out, plan, compiled, mesh = planned(name, hierarchical("native", top))
    np.testing.assert_array_equal(out, np.broadcast_to(x.sum(0), out.shape))
    counted, predicted = Counter(), Counter()
    for row in audit(compiled, mesh=mesh).rows:
        counted[row.kind, row.axes, row.num_bytes] += row.executions
    for op in plan.operations:
        predicted[op.kind, op.axes, op.operand_bytes] += op.count
    assert counted == predicted
    sent = {a: b for a, b in hlo.wire_bytes(compiled, mesh).items() if b}
    assert {a: b for a, b in plan.wire_bytes if b} == sent


@pytest.mark.parametrize("name", ["2x4", "2x3", "4x2", "8", "2x2x2"])
def test_no_permute_holds_a_swap_between_hosts(name):
    *_, plan, compiled, mesh = planned(name, hierarchical("native", "recursive_doubling"))
    assert any(stage.beside is not None for stage in plan.stages)
    text = compiled.as_text()
    found = [line for line in text.splitlines() if "collective-permute(" in line]
    assert found
    per_host = mesh.devices.size // int(MESHES[name][2].split("*")[0])
    both_ways = 0
    for line in found:
        inside = line.split("source_target_pairs={{")[1].split("}}")[0]
        pairs = [tuple(map(int, pair.split(","))) for pair in inside.split("},{")]
        assert not any((d, s) in pairs for s, d in pairs), line
        hosts = Counter(
            (s // per_host, d // per_host) for s, d in pairs if s // per_host != d // per_host
        )
        both_ways += any((b, a) in hosts for a, b in hosts)
    # Each keeps both directions of a link busy, by other devices.
    assert both_ways == len(found)


def test_without_devices_beside_there_are_no_turns():
    *_, plan, _, _ = planned("2x1", hierarchical("native", "recursive_doubling"))
    assert all(stage.beside is None for stage in plan.stages)


@pytest.mark.parametrize(("name", "top", "codec"), [
    ("2x4", "recursive_doubling", "int8"), ("4x2", "ring", "int4"), ("3x2", "pairwise", "int8"),
    ("4x2", "pairwise", "bfloat16"),
])  # fmt: skip
def test_chunks_change_no_bit(name, top, codec):
    """The same blocks are encoded, whatever chunk they are in."""
    policy = Policy(algorithm=hierarchical("native", top), codec={"host": codec}, min_bytes=0)
    # A codec so slow that its work is worth hiding, though chunks are to be joined.
    rate = CodecRate(
        codec=str(codecs.named(codec)), encode_bytes_per_s=10**7, decode_bytes_per_s=10**7
    )
    slow = dict(elements=8 * 16384, codec_rates=(rate,))
    _, whole, plan, *_ = planned(name, None, policy, **slow)
    assert any(stage.num_chunks > 1 for stage in plan.stages)
    assert_same_bits(whole, np.broadcast_to(whole[:1], whole.shape), "replicas")
    before = sharing._CHUNKS
    xcoll.planner._plan.cache_clear()
    try:
        sharing._CHUNKS = ()
        _, once, single, *_ = planned(name, None, policy, **slow)
    finally:
        sharing._CHUNKS = before
        xcoll.planner._plan.cache_clear()
    assert all(stage.num_chunks == 1 for stage in single.stages)
    assert_same_bits(whole, once)
    assert plan.predicted_time_ps < single.predicted_time_ps


def test_chunks_pay_for_being_joined():
    """Where copies are slow, what joins the chunks takes longer than what they hide."""
    axes = {"host": 2, "device": 4}
    rate = CodecRate(codec="int8", encode_bytes_per_s=10**7, decode_bytes_per_s=10**7)
    request = Request("all_reduce", "sum", tuple(axes), (2, 4), "float32", 4, ((8 * 16384,),))
    top = hierarchical("native", "recursive_doubling")
    policy = Policy(algorithm=top, codec={"host": "int8"}, min_bytes=0)
    topology = xcoll.Topology.parse(f"2*cpu:4@{RATE}", axes=axes)
    chunks = []
    for copy_bytes_per_s in (10**10, 10**6):
        device = dataclasses.replace(
            topology.device, codec_rates=(rate,), copy_bytes_per_s=copy_bytes_per_s
        )
        made = plan(request, dataclasses.replace(topology, device=device), policy)
        chunks.append(max(stage.num_chunks for stage in made.stages))
    assert chunks[0] > 1 == chunks[1]


def test_json_keeps_turns_and_chunks():
    *_, plan, _, _ = planned("2x4", hierarchical("native", "recursive_doubling"))
    assert Plan.from_json(plan.to_json()) == plan
    beside = [stage.beside for stage in plan.stages]
    assert Span(("device",), 4) in beside
