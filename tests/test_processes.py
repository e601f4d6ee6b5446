"""The pass on a mesh that spans two real processes: alike it runs, unlike it stops both."""

import processes
import pytest

WORKER = """
import numpy as np
from jax import lax

import xcoll

axes = ("host", "device")
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), axes)
spec = jax.NamedSharding(mesh, jax.P(axes))
x = jax.make_array_from_callback((32,), spec, lambda i: np.arange(32, dtype=np.float32)[i])
expected = np.arange(32, dtype=np.float32).reshape(4, 8).sum(0)


def run(name, policy, **kwargs):
    specs = dict(mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P())
    fn = jax.shard_map(lambda v: lax.psum(v, axes), **specs)
    ours = xcoll.optimize(fn, policy=policy, **kwargs)
    try:
        out = np.asarray(jax.jit(ours)(x).addressable_shards[0].data)
        plan = ours.reports[-1].sites[0].plan
        results[name] = ["right" if (out == expected).all() else "wrong", plan.name, plan.reason]
    except xcoll.PlanMismatchError as error:
        results[name] = ["PlanMismatchError", str(error), ""]


hierarchical = xcoll.Policy(algorithm=xcoll.algorithms.hierarchical("ring", "ring"))
run("unknown network", None)
run("alike", hierarchical)
run("unlike", xcoll.Policy(algorithm="ring" if here else "tree"))
run("after", None, topology="2*cpu:2@200Mbit")

# A normal number for each rank and element, the same in both processes.
blocks = np.random.default_rng(0).normal(size=(4, 8, 256)).astype(np.float32)
long = jax.make_array_from_callback((4 * 2048,), spec, lambda i: blocks.reshape(-1)[i])


def encoded(name, codec):
    specs = dict(mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P())
    fn = jax.shard_map(lambda v: lax.psum(v, axes), **specs)
    policy = xcoll.Policy(codec=codec, algorithm=xcoll.algorithms.hierarchical(), min_bytes=0)
    ours = xcoll.optimize(fn, policy=policy)
    try:
        out = jax.jit(ours)(long)
        copies = [np.asarray(shard.data) for shard in out.addressable_shards]
        exact = blocks.astype(np.float64).sum(0)
        error = np.abs(copies[0].reshape(8, 256) - exact).max(1)
        plan = ours.reports[-1].sites[0].plan
        results[name] = {
            "bits": [copy.tobytes().hex() for copy in copies],
            "error": float((error / np.abs(blocks).max(2).sum(0)).max()),
            "bound": plan.max_error,
            "plan": plan.name,
        }
    except xcoll.PlanMismatchError as error:
        results[name] = str(error)


encoded("int8", {"host": "int8"})
encoded("other codecs", {"host": "int8" if here else "int4"})
"""


@pytest.fixture(scope="module")
def results():
    """What each process saw; both have ended."""
    return processes.run(WORKER)


def test_alike_runs_and_is_right(results):
    for result in results:
        assert result["alike"][:2] == ["right", "hierarchical(ring, ring)"]
        assert result["after"][0] == "right"
    assert results[0]["after"] == results[1]["after"]


def test_unknown_network_is_native(results):
    for result in results:
        assert result["unknown network"][:2] == ["right", "native"]


def test_unlike_is_an_error_on_both(results):
    for result in results:
        kind, message, _ = result["unlike"]
        assert kind == "PlanMismatchError"
        assert "ring" in message and "tree" in message


def test_int8_between_hosts_leaves_the_same_bits_on_all_ranks(results):
    bits = [copy for result in results for copy in result["int8"]["bits"]]
    assert len(bits) == 4 and len(set(bits)) == 1
    for result in results:
        made = result["int8"]
        assert made["plan"] == "hierarchical(native, direct/int8)"
        # Two roundings, each of at most 1/127; the sums in float32 add almost nothing.
        assert 0 < made["error"] <= made["bound"] <= 2.01 / 127


def test_unlike_codecs_are_an_error_on_both(results):
    for result in results:
        assert "int8" in result["other codecs"] and "int4" in result["other codecs"]
