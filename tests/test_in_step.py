"""Turns along mesh axes outside of a collective, where all devices are sure to be in step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import CHECK_VMA, assert_same_bits, mesh_of

import xcoll
from xcoll import Policy, check_plan
from xcoll.plan import Plan, Request, Span
from xcoll.planner import plan

P = jax.P
AXES = ("host", "device")
SIZES = {"2x4": (2, 4), "2x3": (2, 3), "4x2": (4, 2), "3x2": (3, 2), "2x1": (2, 1)}

# Over the hosts only, on (12, 8) of each rank, and the algorithm that is forced.
COLLECTIVES = {
    "psum": (lambda v: lax.psum(v, "host"), "recursive_doubling"),
    "psum_scatter": (lambda v: lax.psum_scatter(v, "host", tiled=True), "pairwise"),
    "all_gather": (lambda v: lax.all_gather(v, "host", tiled=True), "ring"),
    "all_to_all": (lambda v: lax.all_to_all(v, "host", 0, 0, tiled=True), "bruck"),
}
# Hosts of which two ever send to each other at the same time.
SWAPS = {"psum": (2, 3, 4), "psum_scatter": (2, 4), "all_gather": (2,), "all_to_all": (2, 4)}


def topology_of(hosts, devices):
    return f"{hosts}*cpu:{devices}@200Mbit"


def program(fn, algorithm, sizes=(2, 4), check_vma=False):
    """Returns a per-rank function as it is and optimised, of all ranks' (12, 8), and the input."""
    mesh = mesh_of(*sizes, names=AXES)
    body = jax.shard_map(fn, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=check_vma)
    ranks = sizes[0] * sizes[1]
    x = np.random.default_rng(3).integers(-8, 9, (12 * ranks, 8)).astype(np.float32)
    x = jax.device_put(x, jax.NamedSharding(mesh, P(AXES)))
    ours = xcoll.optimize(body, policy=Policy(algorithm=algorithm), topology=topology_of(*sizes))
    return body, ours, x


def turns(ours):
    """Returns what takes turns in the plan of each site of the latest lowering."""
    plans = [site.plan for site in ours.reports[-1].sites]
    return {stage.beside for plan in plans for stage in plan.stages}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_bytes_and_operations(sizes, name, check_vma):
    fn, algorithm = COLLECTIVES[name]
    body, ours, x = program(fn, algorithm, sizes, check_vma)
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(body)(x)))
    hosts, devices = sizes
    expected = Span(("device",), devices) if devices > 1 and hosts in SWAPS[name] else None
    assert turns(ours) == {expected}
    check = check_plan(ours, x)
    assert check.is_equal, str(check)


def test_no_permute_holds_a_swap():
    _, ours, x = program(*COLLECTIVES["psum"])
    lines = jax.jit(ours).lower(x).compile().as_text().splitlines()
    found = [line for line in lines if "collective-permute(" in line]
    written = [line.split("source_target_pairs={{")[1].split("}}")[0] for line in found]
    pairs = [{tuple(map(int, pair.split(","))) for pair in text.split("},{")} for text in written]
    # Devices 0 to 3 are the first host's: two send each way in each turn.
    first, second = {(0, 4), (1, 5), (6, 2), (7, 3)}, {(4, 0), (5, 1), (2, 6), (3, 7)}
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, (first, second)))


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_an_operand_that_devices_share_keeps_its_type(check_vma):
    """The same on all devices of a host before and after, whatever takes turns."""
    mesh = mesh_of(2, 4, names=AXES)
    body = jax.shard_map(
        lambda v: lax.psum(v, "host"), mesh=mesh, in_specs=P("host"), out_specs=P(),
        check_vma=check_vma,
    )  # fmt: skip
    ours = xcoll.optimize(
        body, policy=Policy(algorithm="recursive_doubling"), topology=topology_of(2, 4)
    )
    x = np.arange(16, dtype=np.float32)
    out = jax.jit(ours)(x)
    assert turns(ours) == {Span(("device",), 4)}
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[:8] + x[8:])


def psum(v):
    return lax.psum(v, "host")


@jax.custom_jvp
def with_jvp(v):
    return psum(v)


@with_jvp.defjvp
def _(primals, tangents):
    return with_jvp(*primals), psum(*tangents)


@jax.custom_vjp
def with_vjp(v):
    return psum(v)


with_vjp.defvjp(lambda v: (psum(v), None), lambda _, ct: (psum(ct),))


def while_(v):
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, psum(c[1])), (0, v))[1]


def scan(v):
    return lax.scan(lambda c, _: (psum(c), None), v, None, length=2)[0]


def branch(fn):
    """Devices of a host might take different branches."""
    return lambda v: lax.cond(lax.axis_index("device") < 4, fn, jnp.sin, v)


IN_STEP = {
    "plain": psum,
    "jit": jax.jit(psum),
    "remat": jax.checkpoint(psum),
    "scan": scan,
    "jit in scan": lambda v: lax.map(jax.jit(psum), v),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "gradient": lambda v: jax.grad(lambda w: jnp.sum(psum(w) * v))(v),
    "vmap of a branch": jax.vmap(lambda r: lax.cond(r[0] > 0, lambda s: s, lambda s: -s, psum(r))),
    "a policy of its own": lambda v: xcoll.psum(
        v, "host", policy=Policy(algorithm="recursive_doubling")
    ),
    "an optimize inside": lambda v: xcoll.optimize(
        psum, policy=Policy(algorithm="recursive_doubling")
    )(v),
}
# Devices of a host need not share the branch or the turns.
APART = {
    "cond": branch(psum),
    "switch": lambda v: lax.switch(lax.axis_index("device") * 0, [psum, jnp.sin, jnp.cos], v),
    "while": while_,
    "scan in cond": branch(scan),
    "jit in while": lambda v: lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, jax.jit(psum)(c[1])), (0, v)
    )[1],
    "custom_jvp in cond": branch(with_jvp),
    "an optimize in cond": branch(IN_STEP["an optimize inside"]),
}


@pytest.mark.parametrize("name", IN_STEP)
def test_where_devices_are_in_step(name):
    body, ours, x = program(IN_STEP[name], "recursive_doubling")
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(body)(x)))
    assert turns(ours) == {Span(("device",), 4)}


@pytest.mark.parametrize("name", APART)
def test_where_devices_may_be_apart_there_are_no_permutes(name):
    body, ours, x = program(APART[name], "recursive_doubling")
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(body)(x)))
    assert "collective-permute" not in jax.jit(ours).lower(x).compile().as_text()
    (site,) = ours.reports[-1].sites
    if name != "an optimize in cond":  # a region plans for itself
        assert "devices along 'device'" in site.kept_reason
        assert "recursive_doubling" in site.kept_reason


def test_what_is_inside_of_another_primitive_takes_no_turns():
    """Only its operand is known to be in step."""
    body, ours, x = program(
        lambda v: lax.custom_linear_solve(
            lambda w: w, psum(v) * 0 + v, lambda _, b: psum(b), symmetric=True
        ),
        "recursive_doubling",
    )
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(body)(x)))
    assert turns(ours) == {None, Span(("device",), 4)}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("differs", [True, False])
def test_types_say_whose_branch_it_is(differs, check_vma):
    """Devices in another branch never come to a permute; jax.lax's own waits for its axis only."""

    def scattered(v):
        return lax.psum_scatter(v, "host", tiled=True)

    def fn(v):
        total = jnp.abs(lax.psum(v, AXES)).sum()
        is_mine = lax.axis_index("device") < 1 if differs else total >= 0
        return lax.cond(is_mine, scattered, lambda w: w[: len(w) // 2], v)

    body, ours, x = program(fn, "pairwise", check_vma=check_vma)
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(body)(x)))
    site = next(site for site in ours.reports[-1].sites if site.collective == "psum_scatter")
    assert (site.kept_reason is None) == (check_vma and not differs)
    if site.kept_reason is None:
        assert site.plan.stages[0].beside == Span(("device",), 4)


def test_where_all_ranks_take_one_branch_permutes_are_right():
    """No other axis, or one that is the collective's too: nobody waits for anybody else."""

    def fn(v):
        return lax.cond(lax.psum(v, AXES).sum() < 1e9, lambda w: lax.psum(w, AXES), jnp.sin, v)

    body, ours, x = program(fn, "recursive_doubling")
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(body)(x)))
    assert [site.kept_reason for site in ours.reports[-1].sites] == [None, None]


@pytest.mark.parametrize("by_name", [True, False])
def test_what_must_not_be_had_in_a_branch(by_name):
    body, _, x = program(branch(psum), None)
    algorithm = {"psum": "ring"} if by_name else "ring"
    ours = xcoll.optimize(body, policy=Policy(algorithm=algorithm), topology=topology_of(2, 4))
    if by_name:
        with pytest.raises(ValueError, match="ring was asked for by name.*need not share"):
            jax.jit(ours).lower(x)
    else:
        jax.jit(ours).lower(x)
        assert "need not share" in ours.reports[-1].sites[0].kept_reason


def test_gradients_from_outside():
    body, ours, x = program(psum, "recursive_doubling")
    want, got = (jax.jit(jax.grad(lambda v, f=f: jnp.sum(f(v) ** 2)))(x) for f in (body, ours))
    assert_same_bits(np.asarray(got), np.asarray(want))
    assert turns(ours) == {Span(("device",), 4)}


@pytest.mark.parametrize("loop", ["cond", "while"])
def test_around_a_whole_shard_map_a_branch_is_the_same_for_all(loop):
    mesh = mesh_of(2, 4, names=AXES)
    mapped = jax.shard_map(psum, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)

    def step(x):
        if loop == "cond":
            return lax.cond(x.sum() >= 0, mapped, jnp.negative, x)
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, mapped(c[1])), (0, x))[1]

    ours = xcoll.optimize(
        step, policy=Policy(algorithm="recursive_doubling"), topology=topology_of(2, 4)
    )
    x = np.arange(8, dtype=np.float32)
    assert_same_bits(np.asarray(jax.jit(ours)(x)), np.asarray(jax.jit(step)(x)))
    assert turns(ours) == {Span(("device",), 4)}


def test_inside_a_shard_map_that_is_not_seen_there_are_no_turns():
    """What stands around such a call is not known."""
    mesh = mesh_of(2, 4, names=AXES)
    ours = xcoll.optimize(
        psum, policy=Policy(algorithm="recursive_doubling"), topology=topology_of(2, 4)
    )
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    np.testing.assert_array_equal(jax.jit(mapped)(np.arange(8.0)), [4, 6, 8, 10] * 2)
    assert turns(ours) == {None}


def test_an_axis_of_the_partitioner_takes_no_turns():
    mesh = mesh_of(2, 4, names=AXES)
    body = jax.shard_map(
        psum, mesh=mesh, in_specs=P("host"), out_specs=P(), axis_names={"host"}, check_vma=False
    )
    whole = jax.NamedSharding(mesh, P("host", None))
    ours = xcoll.optimize(
        lambda x: body(lax.with_sharding_constraint(x, whole)),
        policy=Policy(algorithm="recursive_doubling"),
        topology=topology_of(2, 4),
    )
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    np.testing.assert_array_equal(jax.jit(ours)(x), x[:1] + x[1:])
    assert turns(ours) == {None}


@pytest.mark.parametrize("racks", [1, 2])
def test_an_inner_shard_map_in_a_branch_is_in_step_along_its_own_axes(racks):
    mesh = mesh_of(racks, 2, 2, names=("rack", "host", "device"))

    def inner(v):
        return jax.shard_map(
            psum, in_specs=P(("host", "device")), out_specs=P(("host", "device")),
            axis_names={"host", "device"}, check_vma=False,
        )(v)  # fmt: skip

    def per_rack(v):
        return lax.cond(lax.axis_index("rack") < 1, inner, jnp.negative, v)

    body = jax.shard_map(
        per_rack, mesh=mesh, in_specs=P("rack"), out_specs=P("rack"), axis_names={"rack"},
        check_vma=False,
    )  # fmt: skip
    ours = xcoll.optimize(
        body, policy=Policy(algorithm="recursive_doubling"), topology=f"{2 * racks}*cpu:2@200Mbit"
    )
    jax.jit(ours).lower(np.arange(8, dtype=np.float32))
    assert ours.reports[-1].sites[0].plan.request.in_step == (("device", 2),)
    assert turns(ours) == {Span(("device",), 2) if racks == 1 else None}
    assert (ours.reports[-1].sites[0].kept_reason is None) == (racks == 1)


@pytest.mark.parametrize("platform", ["h100:4", "gb200:4"])
def test_links_that_swap_at_full_rate_take_no_turns(platform):
    topology = xcoll.Topology.parse(f"2*{platform}", axes={"host": 2, "device": 4})
    asked = Request(
        "all_reduce", "sum", ("host",), (2,), "float32", 4, ((1 << 20,),), topology.platform,
        in_step=(("device", 4),),
    )  # fmt: skip
    for policy in (Policy(), Policy(algorithm="recursive_doubling")):
        made = plan(asked, topology, policy)
        assert all(stage.beside is None for stage in made.stages)


def test_turns_are_chosen_where_they_pay():
    """A reduce-scatter over hosts: 1.45 times the bound by XLA, and near it in turns."""
    topology = xcoll.Topology.parse(topology_of(2, 4), axes={"host": 2, "device": 4})
    found = {}
    for in_step in ((), (("device", 4),)):
        asked = Request(
            "reduce_scatter", "sum", ("host",), (2,), "float32", 4, ((1 << 22,),), in_step=in_step
        )
        found[in_step] = plan(asked, topology, Policy())
    alone, together = found.values()
    assert alone.is_native and not together.is_native
    bound_ps = 4 * 8 * 2**20 * 8 * 1514 / 1448 / 200e6 * 1e12
    assert bound_ps < together.predicted_time_ps < 1.05 * bound_ps


def test_json():
    _, ours, x = program(*COLLECTIVES["psum"])
    jax.jit(ours).lower(x)
    made = ours.reports[-1].sites[0].plan
    assert made.request.in_step == (("device", 4),)
    assert Plan.from_json(made.to_json()) == made
    data = json.loads(made.to_json())
    data["request"]["in_step"] = []
    with pytest.raises(ValueError, match="plan: unknown axis 'device'"):
        Plan.from_json(json.dumps(data))
    data["request"]["in_step"] = [["host", 2]]
    with pytest.raises(ValueError, match="name each axis once"):
        Plan.from_json(json.dumps(data))
