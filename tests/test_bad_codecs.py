"""Bad input to policies with codecs: one clear error each, with the rule and the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import mesh_of, sharded
from test_bad_input import refused

import xcoll
from xcoll import Policy, codecs
from xcoll.algorithms import hierarchical
from xcoll.gradients import error_feedback

X = np.ones((4, 1 << 10), np.float32)
NAMED = ("int8", "int4", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def run(fn, x=X):
    return jax.block_until_ready(jax.jit(sharded(fn, mesh_of(2, 2, names=("data", "model"))))(x))


def psum(x):
    return lax.psum(x, ("data", "model"))


BAD_FIELDS = {
    "unknown codec": (
        {"codec": "int7"},
        ValueError,
        ("Policy(codec=...)", "int7", *NAMED, "Did you mean 'int"),
    ),
    "by axis": ({"codec": {"data": "intt8"}}, ValueError, ("intt8", "Did you mean 'int8'?")),
    "backward": ({"backward_codec": "fp8"}, ValueError, ("Policy(backward_codec=", "fp8", *NAMED)),
    "tuple": ({"codec": ("int8",)}, TypeError, ("Policy(codec=...)", "('int8',)", "mapping")),
    "pair": ({"codec": (("psum", "int8"),)}, TypeError, ("Policy(codec=...)", "mapping")),
    "no axis": ({"codec": {"psum": {0: "int8"}}}, TypeError, ("key 0", "mesh axis", "'psum'")),
    "inside out": (
        {"codec": {"data": {"psum": "int8"}}},
        TypeError,
        ("'data' is no collective", "{'psum': {'data': 'int8'}}"),
    ),
    "psum and pmean": (
        {"codec": {"psum": "int8", "pmean": None}},
        ValueError,
        ("Policy(codec=...)", "psum and pmean", "name one of them"),
    ),
    "no codec": ({"codec": 8}, TypeError, ("Policy(codec=...)", "8 is no codec", "codecs.int8()")),
    "a class": ({"codec": {"data": codecs.int8}}, TypeError, ("no codec", "codecs.int8()")),
    "no name": ({"codec": {0: "int8"}}, TypeError, ("key 0", "mesh axis or a collective")),
    "compressor": (
        {"codec": error_feedback(codecs.int8())},
        TypeError,
        ("Policy(codec=...)", "compressor", "xcoll.gradients.sync(axis_name, compressor=...)"),
    ),
    "compressor by axis": (
        {"backward_codec": {"data": error_feedback(codecs.int8())}},
        TypeError,
        ("Policy(backward_codec=...)", "compressor", "xcoll.gradients.sync"),
    ),
    "zero error": ({"max_error": 0}, ValueError, ("max_error=0", "positive")),
    "negative error": ({"max_error": -0.1}, ValueError, ("max_error=-0.1", "positive")),
    "infinite error": ({"max_error": float("inf")}, ValueError, ("max_error=inf", "finite")),
    "nan error": ({"max_error": float("nan")}, ValueError, ("max_error=nan", "finite")),
    "text error": ({"max_error": "1%"}, TypeError, ("max_error='1%'", "number")),
    "boolean error": ({"max_error": True}, TypeError, ("max_error=True", "number")),
    "over budget": ({"over_budget": "warn"}, ValueError, ("'warn'", "'error'", "'exact'")),
    "accumulate": ({"accumulate": "float64"}, ValueError, ("'float64'", "'float32'")),
    "accumulate as a dtype": (
        {"accumulate": np.dtype("float32")},
        ValueError,
        ("dtype('float32')", "'float32'"),
    ),
    "kernels": ({"kernels": 1}, TypeError, ("kernels=1", "True or False")),
    "deterministic": (
        {"codec": "int8", "deterministic": True},
        ValueError,
        ("deterministic=True", "codec", "fixed_point"),
    ),
    "deterministic budget": (
        {"max_error": 0.1, "deterministic": True},
        ValueError,
        ("deterministic=True", "max_error"),
    ),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_bad_policy(case):
    fields, error, texts = BAD_FIELDS[case]
    with refused(error, *texts):
        Policy(**fields)


BAD_CODECS = {
    "block 0": (lambda: codecs.int8(block=0), ValueError, ("int8(block=0)", "block=256")),
    "block -1": (lambda: codecs.int4(block=-1), ValueError, ("int4(block=-1)", "at least 2")),
    "block of text": (lambda: codecs.int8(block="8"), TypeError, ("block='8'", "integer")),
    "block too large": (lambda: codecs.int8(block=1 << 30), ValueError, ("kernels", "at most")),
    "odd int4": (lambda: codecs.int4(block=33), ValueError, ("int4(block=33)", "even", "block=34")),
    "scale": (lambda: codecs.int8(scale="max"), ValueError, ("'max'", "power_of_two", "exact")),
    "rounding": (lambda: codecs.int8(rounding="up"), ValueError, ("'up'", "nearest", "stochastic")),
    "cast": (lambda: codecs.cast("float32"), ValueError, ("'float32'", "bfloat16", "float16")),
    "bits of float": (lambda: codecs.fixed_point(16.0), ValueError, ("bits=16.0", "8", "16", "32")),
    "bits": (lambda: codecs.fixed_point(12), ValueError, ("bits=12", "8", "16", "32")),
}


@pytest.mark.parametrize("case", BAD_CODECS)
def test_bad_codec(case):
    make, error, texts = BAD_CODECS[case]
    with refused(error, *texts):
        make()


def test_codec_on_an_axis_that_does_not_exist():
    """Whether or not the collective crosses axes that have a codec, and whatever its algorithm."""
    for codec in ({"dta": "int8"}, {"dta": "int8", "model": "int8"}, {"psum": {"dta": "int8"}}):
        for algorithm in (None, "ring"):
            policy = Policy(codec=codec, algorithm=algorithm, min_bytes=0)
            texts = ("psum", "'dta'", "'data'", "'model'", "Did you mean 'data'?")
            with refused(NameError, *texts):
                run(xcoll.optimize(psum, policy=policy))
            with refused(NameError, *texts):
                run(lambda x, policy=policy: xcoll.psum(x, "data", policy=policy))


def test_a_misspelt_collective_is_an_axis_that_does_not_exist():
    policy = Policy(codec={"psumm": "int8"}, min_bytes=0)
    with refused(NameError, "psumm"):
        run(xcoll.optimize(psum, policy=policy))


def test_stochastic_rounding_without_a_key():
    random = codecs.int8(rounding="stochastic")
    policy = Policy(codec=random, algorithm="direct", min_bytes=0)
    # In the pass: what would be compressed and has no key.
    with refused(ValueError, "psum", "stochastic", "PRNG key", "key=key", "rounding='nearest'"):
        run(xcoll.optimize(psum, policy=policy))
    with refused(ValueError, "psum", "stochastic", "key", "rounding='nearest'"):
        run(lambda x: xcoll.psum(x, "data", policy=policy))
    with refused(ValueError, "all_gather", "PRNG key"):
        backward = Policy(backward_codec=random, algorithm="direct", min_bytes=0)
        fn = xcoll.optimize(
            sharded(lambda x: lax.psum_scatter(x, "data", tiled=True), mesh_of(2, names=("data",))),
            policy=backward,
        )
        jax.jit(jax.grad(lambda x: fn(x).sum()))(X[:2])
    # What stays exact needs none.
    run(xcoll.optimize(psum, policy=Policy(codec=random, algorithm="direct")))


def best_bound(text):
    return float(text.split("error bound of ")[1].split(".  Allow")[0].split(" ")[0].rstrip("."))


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_an_error_budget_that_no_plan_meets(algorithm):
    policy = Policy(codec="int8", max_error=1e-3, algorithm=algorithm, min_bytes=0)
    with refused(
        ValueError, "all_reduce", "max_error=0.001", f"{algorithm}/int8",
        "error bound of", "over_budget='exact'",
    ) as caught:  # fmt: skip
        run(xcoll.optimize(psum, policy=policy))
    # Two shots round twice by 1/127; a ring of four ranks four times.
    times = {"direct": 2, "ring": 4}[algorithm]
    low = times / 127
    assert low <= best_bound(str(caught.value)) <= low * 1.05
    exact = Policy(codec="int8", max_error=1e-3, over_budget="exact", algorithm=algorithm,
                   min_bytes=0)  # fmt: skip
    ours = xcoll.optimize(psum, policy=exact)
    np.testing.assert_array_equal(run(ours), np.full((4, 1 << 10), 4.0))
    (site,) = ours.reports[-1].sites
    assert not site.plan.is_lossy and "exact" in site.plan.reason


def test_codecs_that_an_algorithm_cannot_carry():
    # By collective it is an error, for the whole pass a reason.
    for codec, choice, text in (
        ("int8", "tree", "no encoded form"),
        (codecs.int8(rounding="stochastic"), "recursive_doubling", "must not differ by chance"),
        ({"data": codecs.fixed_point(8)}, hierarchical("ring", "ring"), "all axes"),
    ):
        strict = Policy(codec=codec, algorithm={"psum": choice}, min_bytes=0)
        with refused(NotImplementedError, "all_reduce", text):
            run(xcoll.optimize(psum, policy=strict))
        ours = xcoll.optimize(psum, policy=Policy(codec=codec, algorithm=choice, min_bytes=0))
        run(ours)
        (site,) = ours.reports[-1].sites
        assert not site.plan.is_lossy and text in site.plan.reason


def test_fixed_point_is_for_sums():
    policy = Policy(codec=codecs.fixed_point(16), algorithm={"all_gather": "ring"}, min_bytes=0)
    with refused(NotImplementedError, "all_gather", "fixed_point(16)", "for sums"):
        run(xcoll.optimize(lambda x: lax.all_gather(x, "data"), policy=policy))


def test_too_many_ranks_for_the_bits():
    request_axes = {"data": 32}
    topology = xcoll.Topology.parse("cpu:32", axes=request_axes)
    from xcoll.plan import Request
    from xcoll.planner import plan

    request = Request("all_reduce", "sum", ("data",), (32,), "float32", 4, ((1 << 20,),))
    policy = Policy(codec=codecs.fixed_point(8), algorithm="ring")
    with refused(NotImplementedError, "fixed_point(8)", "1 to 31 ranks", "not 32"):
        plan(request, topology, policy, strict=True)
    made = plan(request, topology, policy)
    assert not made.is_lossy and "31 ranks" in made.reason


def test_accumulate_with_an_algorithm_that_rounds():
    policy = Policy(accumulate="float32", algorithm="ring")
    with refused(ValueError, "accumulate='float32'", "ring", "direct"):
        run(xcoll.optimize(psum, policy=policy), X.astype(jnp.bfloat16))


def test_an_axis_that_does_not_exist_where_everything_stays_exact():
    """Also where the policy's codecs never come into play: small payloads, integers, no axes."""
    for policy in (
        Policy(codec={"dta": "int8"}),
        Policy(codec={"all_gather": {"dta": "int8"}}),
        Policy(backward_codec={"dta": "int8"}),
        Policy(codec={"dta": "int8"}, min_bytes=0, where=lambda site: False),
    ):
        with refused(NameError, "Policy(", "'dta'", "'data'", "'model'", "Did you mean 'data'?"):
            run(xcoll.optimize(psum, policy=policy))


def test_accumulate_where_a_codec_does_not_sum_all():
    """A codec on one axis of a plan leaves the other axis's sums in bfloat16."""
    policy = Policy(
        accumulate="float32",
        codec={"data": "int8"},
        algorithm=hierarchical("ring", "direct"),
        min_bytes=0,
    )
    with refused(ValueError, "accumulate='float32'", "hierarchical", "a codec", "all axes"):
        run(xcoll.optimize(psum, policy=policy), X.astype(jnp.bfloat16))
