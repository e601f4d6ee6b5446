"""Compressed gradients between hosts that swap: both ways of the link, and not a bit changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradient_runs import COMPRESSORS
from jax import lax
from spmd import CHECK_VMA, assert_same_bits, mesh_of

import xcoll
from xcoll import gradients
from xcoll.plan import Span

P = jax.P
AXES = ("host", "device")


def step_of(transformation, mesh, check_vma=True, elements=1 << 16):
    """Returns a training step of gradients by rank, its state, and gradients."""
    state = transformation.init(jnp.zeros(elements))
    specs = gradients.state_specs(state)
    step = jax.shard_map(
        lambda g, s: transformation.update(g[0], s), mesh=mesh, in_specs=(P(AXES), specs),
        out_specs=(P(), specs), check_vma=check_vma,
    )  # fmt: skip
    rng = np.random.default_rng(11)
    return step, state, rng.standard_normal((mesh.size, elements), np.float32)


def sync(mesh, compressor):
    return gradients.sync(AXES, compressor=COMPRESSORS[compressor], compress_axis="host", mesh=mesh)


def swaps_between_hosts(compiled, devices):
    """Returns for each permute whether two ranks swap in it, and whether it goes both ways."""
    found = []
    for line in compiled.as_text().splitlines():
        if "collective-permute(" in line:
            written = line.split("source_target_pairs={{")[1].split("}}")[0]
            pairs = [tuple(map(int, pair.split(","))) for pair in written.split("},{")]
            ways = {(s // devices, d // devices) for s, d in pairs}
            found.append(
                (any((d, s) in pairs for s, d in pairs), any((d, s) in ways for s, d in ways))
            )
    return found


@pytest.mark.parametrize(("sizes", "compressor", "check_vma"), [
    ((2, 4), "int8", True), ((2, 4), "int4", False), ((2, 3), "int8", False),
    ((2, 2), "sign", True), ((4, 2), "int4", True), ((3, 2), "int8", True),
])  # fmt: skip
def test_hosts_send_both_ways_what_they_sent_before(sizes, compressor, check_vma):
    hosts, devices = sizes
    mesh = mesh_of(*sizes, names=AXES)
    step, state, grads = step_of(sync(mesh, compressor), mesh, check_vma)
    ours = xcoll.optimize(step, topology=f"{hosts}*cpu:{devices}@200Mbit")
    compiled = jax.jit(ours).lower(grads, state).compile()
    for _ in range(2):  # The second step has residuals to send.
        expected, plain = jax.jit(step)(grads, state)
        result, state = compiled(grads, state)
        assert_same_bits(np.asarray(result), np.asarray(expected))
        for own, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
            assert_same_bits(np.asarray(own), np.asarray(other))
    turns = {
        stage.beside
        for site in ours.reports[-1].sites
        if site.axes == ("host",) and site.plan is not None and not site.plan.is_native
        for stage in site.plan.stages
    }
    # Three hosts never swap: each sends to the next.
    assert turns == ({None} if hosts == 3 else {Span(("device",), devices)})
    found = swaps_between_hosts(compiled, devices)
    assert found and not any(swaps for swaps, _ in found)
    if hosts == 2:
        assert all(both for _, both in found)
    check = xcoll.check_plan(ours, grads, state)
    assert check.is_equal, str(check)


def test_one_device_a_host_has_nobody_to_take_turns_with():
    mesh = mesh_of(2, 1, names=AXES)
    step, state, grads = step_of(sync(mesh, "int8"), mesh)
    report = xcoll.explain(step, grads, state, topology="2*cpu:1@200Mbit")
    assert [s.plan.is_native for s in report.sites if s.axes == ("host",)] == [True, True]


def test_the_price_is_that_of_a_link_used_both_ways():
    """A byte an element and 4 a block of 256; each exchange is half of them, each way."""
    mesh, elements = mesh_of(2, 4, names=AXES), 1 << 22
    step, state, grads = step_of(sync(mesh, "int8"), mesh, elements=elements)
    report = xcoll.explain(step, grads, state, topology="2*cpu:4@200Mbit")
    (exchange, gather) = [s for s in report.sites if s.axes == ("host",)]
    # Half of what a rank holds goes to the other host, from four devices over one link.
    bound_s = elements / 2 * 8 * 1514 / 1448 / 200e6
    for site in (exchange, gather):
        assert bound_s < site.predicted_time_s < 1.1 * bound_s
        assert site.predicted_time_s < 0.9 * site.native_time_s


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_windows_take_turns_where_types_show_that_they_end_together(check_vma):
    mesh = mesh_of(2, 4, names=AXES)
    window = gradients.accumulate(2, optax.chain(sync(mesh, "int8")), axis_name=AXES, mesh=mesh)
    step, state, grads = step_of(window, mesh, check_vma)
    ours = xcoll.optimize(step, topology="2*cpu:4@200Mbit")
    expected = jax.jit(step)(grads, jax.jit(step)(grads, state)[1])
    result = jax.jit(ours)(grads, jax.jit(ours)(grads, state)[1])
    for own, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert_same_bits(np.asarray(own), np.asarray(other))
    plans = [s.plan for s in ours.reports[-1].sites if s.axes == ("host",)]
    turns = {stage.beside for plan in plans for stage in plan.stages}
    assert turns == ({Span(("device",), 4)} if check_vma else {None})


@pytest.mark.parametrize("loop", ["cond", "while"])
@pytest.mark.parametrize(("along", "check_vma", "in_step"), [
    ("host", True, True), ("device", True, False), ("host", False, False),
])  # fmt: skip
def test_devices_are_in_step_behind_a_condition_that_their_types_share(
    loop, along, check_vma, in_step
):
    """The number of hosts, or what each device of a host has for itself."""

    def total(v):
        return lax.pcast(lax.psum(v, "host"), ("host",), to="varying")

    def per_rank(v):
        mine = lax.psum(lax.axis_index(along), "host")
        if loop == "cond":
            return lax.cond(mine < 3, total, lambda w: 2 * w, v)
        count = jnp.zeros_like(mine)
        return lax.while_loop(lambda c: c[0] < mine, lambda c: (c[0] + 1, total(c[1])), (count, v))[
            1
        ]

    body = jax.shard_map(
        per_rank, mesh=mesh_of(2, 4, names=AXES), in_specs=P(AXES), out_specs=P(AXES),
        check_vma=check_vma,
    )  # fmt: skip
    report = xcoll.explain(
        body, np.zeros(16, np.float32), topology="2*cpu:4@200Mbit",
        policy=xcoll.Policy(algorithm="recursive_doubling"),
    )  # fmt: skip
    (inside,) = [site.plan for site in report.sites if site.dtype == "float32"]
    assert {s.beside for s in inside.stages} == {Span(("device",), 4) if in_step else None}
