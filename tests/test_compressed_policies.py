"""Which collectives a codec reaches: axes, collectives, sizes, dtypes, and where it pays."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lossy import same_replicas
from spmd import CHECK_VMA, assert_same_bits, mesh_of, on_ranks, values

import xcoll
from xcoll import Policy, codecs
from xcoll.algorithms import hierarchical
from xcoll.planner import plan

P = jax.P
AXES = ("i", "j")
INT8, INT4 = codecs.int8(), codecs.int4()
SLOW = "2*cpu:4@200Mbit"


def explained(policy, *shapes, fn=None, topology=None, dtype="float32", mesh=(2, 4)):
    """The sites of psums over both axes of arrays of some shapes per rank."""
    fn = fn or (lambda *xs: lax.psum(xs, AXES))
    sharded = jax.shard_map(fn, mesh=mesh_of(*mesh), in_specs=P(), out_specs=P(), check_vma=False)
    xs = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return xcoll.explain(sharded, *xs, policy=policy, topology=topology).sites


def codecs_of(site):
    return [(s.collective, s.span.axes, str(s.codec)) for s in site.plan.stages if s.codec]


HIER = hierarchical("ring", "direct")


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        # Sums go in over "j", across "i", and out again.
        ("int8", [("j", "int8"), ("i", "int8"), ("i", "int8"), ("j", "int8")]),
        ({"i": INT8}, [("i", "int8"), ("i", "int8")]),
        ({"j": INT8}, [("j", "int8"), ("j", "int8")]),
        ({"i": INT4, "j": INT8}, [("j", "int8"), ("i", "int4"), ("i", "int4"), ("j", "int8")]),
        ({"i": INT8, "j": None}, [("i", "int8"), ("i", "int8")]),
        ({"psum": {"i": INT4}}, [("i", "int4"), ("i", "int4")]),
        ({"pmean": {"i": INT4}, "all_gather": INT8}, [("i", "int4"), ("i", "int4")]),
        ({"all_gather": INT8}, []),
        ({"i": INT8, "psum": None}, []),
        ({"i": INT8, "psum": {"i": None, "j": INT4}}, [("j", "int4"), ("j", "int4")]),
    ],
    ids=str,
)
def test_codecs_by_axis_and_collective(codec, expected):
    (site,) = explained(Policy(codec=codec, algorithm=HIER), (1 << 15,))
    assert [(axes[0], name) for _, axes, name in codecs_of(site)] == expected
    assert all(len(axes) == 1 for _, axes, _ in codecs_of(site))


def test_only_a_codec_for_all_axes_carries_a_plan_over_both_at_once():
    for codec, encoded in (("int8", 2), ({"i": INT8, "j": INT8}, 2), ({"i": INT8}, 0)):
        (site,) = explained(Policy(codec=codec, algorithm="direct"), (1 << 15,))
        assert len(codecs_of(site)) == encoded, codec
        assert site.is_rewritten


def test_axes_of_one_rank_do_not_count():
    (site,) = explained(Policy(codec={"j": INT8}, algorithm="ring"), (1 << 15,), mesh=(1, 8))
    assert codecs_of(site)


def test_where_selects_sites():
    policy = Policy(codec="int8", algorithm="ring", min_bytes=0,
                    where=lambda site: site.num_bytes > 4000)  # fmt: skip
    large, small = explained(policy, (2000,), (900,))
    assert large.plan.is_lossy
    assert small.kept_reason == "not selected by the policy's where"


def test_by_default_payloads_under_64_kib_stay_exact():
    """A loss, a norm, statistics: bit for bit as without the codec, also beside large ones."""
    n = (64 << 10) // 4

    def fn(xs):
        return lax.psum(xs, "i")

    xs = [values(np.random.default_rng(0), "float32", (3, k)) for k in (n, n - 1, 1)]
    ours = xcoll.optimize(fn, policy=Policy(codec="int8", algorithm="direct"))
    plain = xcoll.optimize(fn, policy=Policy(algorithm="direct"))
    got, want = on_ranks(ours, mesh_of(3), xs), on_ranks(plain, mesh_of(3), xs)
    assert [site.plan.is_lossy for site in ours.reports[-1].sites] == [True, False, False]
    assert (got[0] != want[0]).any() and same_replicas(got[0])
    assert_same_bits(got[1:], want[1:])


def test_min_bytes_is_the_limit_where_it_is_given():
    for least, lossy in ((0, [True, True]), (400, [True, False]), (404, [False, False])):
        policy = Policy(codec="int8", algorithm="ring", min_bytes=least)
        assert [s.plan.is_lossy for s in explained(policy, (100,), (99,))] == lossy


NEVER = ("int8", "int32", "uint8", "bool", "complex64", "float64")


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("codec", [INT8, codecs.cast("bfloat16"), codecs.fixed_point(16)], ids=str)
def test_what_is_no_small_float_never_passes(codec, check_vma):
    rng = np.random.default_rng(1)
    with jax.enable_x64():
        xs = {dtype: values(rng, dtype, (3, 3, 7)) for dtype in NEVER}

        def fn(xs):
            moved = jax.tree.map(lambda x: lax.all_gather(x, "i"), xs)
            sent = jax.tree.map(lambda x: lax.ppermute(x, "i", [(0, 1)]), xs)
            numbers = {k: v for k, v in xs.items() if k != "bool"}
            return moved, sent, lax.psum(numbers, "i")

        policy = Policy(codec=codec, algorithm="direct", min_bytes=0)
        ours = xcoll.optimize(fn, policy=policy)
        exact = xcoll.optimize(fn, policy=Policy(algorithm="direct"))
        got = on_ranks(ours, mesh_of(3), xs, check_vma=check_vma)
        want = on_ranks(exact, mesh_of(3), xs, check_vma=check_vma)
    assert_same_bits(got, want)
    sites = ours.reports[-1].sites
    assert len(sites) == 3 * len(NEVER) - 1
    assert not any(site.plan.is_lossy for site in sites if site.plan)
    rows = json.loads(ours.reports[-1].to_json())["sites"]
    for row in rows:
        assert row["dtype"] in row["reason"] or "for sums" in row["reason"], row


@pytest.mark.parametrize("op", ["pmax", "pmin", "pprod"])
def test_only_sums_are_compressed(op):
    def fn(x):
        return getattr(xcoll, op)(x, AXES)

    (site,) = explained(Policy(codec="int8", algorithm="direct", min_bytes=0), (1024,), fn=fn)
    assert not site.plan.is_lossy
    # Products have no mark: the policy's codec is never asked.
    assert op == "pprod" or "codec" in site.plan.reason


def test_a_codec_is_a_permission():
    """One host, or unknown hardware, keeps XLA's own; a slow link takes it for a tenth gained."""
    big = (1 << 20,)
    (site,) = explained(Policy(codec="int8"), big)
    assert site.plan.is_native and "10 % are needed" in site.kept_reason
    unknown = plan(site.plan.request, None, Policy(codec="int8"))
    assert unknown.is_native and "unknown topology" in unknown.reason
    assert "name an algorithm to use the codec anyway" in unknown.reason
    (site,) = explained(Policy(codec={"i": INT8}), big, topology=SLOW)
    assert {axes for _, axes, _ in codecs_of(site)} == {("i",)}
    assert 10 * site.plan.predicted_time_ps <= 9 * site.plan.native_time_ps
    assert site.plan.name.startswith("hierarchical(") and "/int8" in site.plan.name
    exact = explained(Policy(), big, topology=SLOW)[0].plan
    # A byte for each value and one for each 256, instead of four; and padding to whole tiles.
    assert dict(site.plan.wire_bytes)["i"] <= (257 / 256 / 4 + 0.005) * dict(exact.wire_bytes)["i"]
    for algorithm in ("native", "tree"):
        (site,) = explained(Policy(codec="int8", algorithm=algorithm), big, topology=SLOW)
        assert not site.plan.is_lossy and site.plan.max_error < 1e-5


def test_pytrees_travel_in_one_group_and_come_back_as_they_were():
    rng = np.random.default_rng(2)
    xs = {
        "w": values(rng, "float32", (3, 37, 5)),
        "b": [values(rng, "float32", (3, 1)), values(rng, "bfloat16", (3, 300))],
        "none": None,
        "n": np.arange(3, dtype=np.int32),
    }
    policy = Policy(codec=codecs.int8(block=32), algorithm="ring", min_bytes=0)
    ours = xcoll.optimize(lambda x: xcoll.pmean(x, "i"), policy=policy)
    got = on_ranks(ours, mesh_of(3), {k: v for k, v in xs.items() if k != "n"})
    assert jax.tree.structure(got) == jax.tree.structure({k: v for k, v in xs.items() if k != "n"})
    assert got["w"].shape == (3, 37, 5) and got["b"][1].dtype == jnp.bfloat16
    groups = [len(group) for group in ours.reports[-1].groups()]
    assert sorted(groups) == [1, 2]  # by dtype
    np.testing.assert_allclose(got["w"][0], xs["w"].mean(0), atol=3 * 1.5 / 127 * 1.1)


def test_the_report_tells_the_bound_of_an_inner_policy_too():
    inner = Policy(codec=INT8, algorithm="direct", min_bytes=0)

    def fn(x):
        return xcoll.psum(x, AXES, policy=inner)

    sharded = jax.shard_map(fn, mesh=mesh_of(2, 4), in_specs=P(), out_specs=P(), check_vma=False)
    report = xcoll.explain(sharded, jax.ShapeDtypeStruct((1 << 15,), jnp.float32))
    # Two roundings of at most 1/127: of each contribution, and of their sum, which is off by one.
    bound = 1 / 127 + 1 / 127 * (1 + 1 / 127)
    assert f"|error| <= {bound:.3g} x sum over ranks" in str(report)
    assert "no kernels for cpu" in str(report)
