"""Bad input to the functional collectives: one clear error each, and nothing computed."""

import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd import CHECK_VMA, mesh_of, sharded

import xcoll
from xcoll import Policy

# Every function as (x, axis_name, **kwargs), x of shape (4, 4) on each of four ranks.
FUNCTIONS = {
    "psum": xcoll.psum,
    "pmean": xcoll.pmean,
    "pmax": xcoll.pmax,
    "pmin": xcoll.pmin,
    "pprod": xcoll.pprod,
    "psum_scatter": xcoll.psum_scatter,
    "all_gather": xcoll.all_gather,
    "all_to_all": partial(xcoll.all_to_all, split_axis=0, concat_axis=0),
    "ppermute": partial(xcoll.ppermute, perm=[(0, 1)]),
    "pbroadcast": partial(xcoll.pbroadcast, source=0),
    "all_reduce": xcoll.all_reduce,
    "preduce": xcoll.preduce,
    "pgather": xcoll.pgather,
    "pscatter": xcoll.pscatter,
    "barrier": xcoll.barrier,
}
SUMS = ("psum", "pmean", "pmax", "pmin", "pprod", "psum_scatter", "all_reduce", "preduce")
X = np.ones((4, 4, 4), np.float32)


def run(fn, x=X, check_vma=True):
    """Traces, and would run, a function of one rank's values over axis "data" of four."""
    mesh = mesh_of(2, 2, names=("data", "model"))
    return jax.block_until_ready(jax.jit(sharded(fn, mesh, check_vma))(x))


def refused(error, *texts):
    """Expects an error of exactly this kind of input, whose message has all of ``texts``."""
    pattern = "".join(f"(?=(?s:.*){re.escape(text)})" for text in texts)
    return pytest.raises(error, match=pattern)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_axis(name, check_vma):
    # A NameError, as jax's; the axes there are, and the nearest.
    with refused(NameError, name, "'dta'", "'data'", "'model'", "Did you mean 'data'?") as caught:
        run(lambda x: FUNCTIONS[name](x, "dta"), check_vma=check_vma)
    assert isinstance(caught.value, xcoll.UnknownAxisError)
    with refused(NameError, name, "'dta'"):
        run(lambda x: FUNCTIONS[name](x, ("model", "dta")), check_vma=check_vma)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_repeated_axis(name):
    with refused(ValueError, name, "'data'", "repeated"):
        run(lambda x: FUNCTIONS[name](x, ("data", "model", "data")))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outside_shard_map(name):
    for call in (FUNCTIONS[name], jax.jit(partial(FUNCTIONS[name], axis_name="data"))):
        arguments = (jnp.ones((4, 4)),) if call is not FUNCTIONS[name] else (jnp.ones(4), "data")
        with refused(NameError, name, "'data'", "jax.shard_map"):
            call(*arguments)


@pytest.mark.parametrize("axis", [["data", []], {"data"}, None])
@pytest.mark.parametrize("name", ["psum", "all_gather", "pgather", "barrier"])
def test_axis_of_a_wrong_type(name, axis):
    with pytest.raises((TypeError, NameError), match=name):
        run(lambda x: FUNCTIONS[name](x, axis))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_leaf_that_is_no_array(name):
    with refused(TypeError, name, "['b'][1]", "str"):
        run(lambda x: FUNCTIONS[name]({"a": x, "b": [x, "text"]}, "data"))
    with refused(TypeError, name, "object"):
        run(lambda x: FUNCTIONS[name](object(), "data"))


@pytest.mark.parametrize("name", SUMS)
def test_no_number(name):
    def fn(x):
        return FUNCTIONS[name]({"key": jax.random.split(jax.random.key(0), 4)}, "data")

    with refused(TypeError, name, "['key']", "key<fry>"):
        run(fn)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_policy_of_a_wrong_type(name):
    with refused(TypeError, name, "'ring'", "xcoll.Policy", "Policy(algorithm=...)"):
        run(lambda x: FUNCTIONS[name](x, "data", policy="ring"))


class Unhashable:
    __hash__ = None

    def __call__(self, site):
        return True


@dataclass(frozen=True)
class BadPolicy:
    """Arguments of a policy and what must be said of them."""

    arguments: dict
    error: type[Exception]
    texts: tuple[str, ...]


BAD_POLICIES = [
    BadPolicy({"where": Unhashable()}, TypeError, ("where", "hashable", "plain function")),
    BadPolicy({"where": 3}, TypeError, ("where=3", "function of a site")),
    BadPolicy({"algorithm": 3}, TypeError, ("algorithm=3", "name")),
    BadPolicy({"algorithm": {"psumm": "ring"}}, ValueError, ("'psumm'", "mean 'psum'")),
    BadPolicy({"algorithm": {"psum": 3}}, TypeError, ("'psum': 3",)),
    BadPolicy({"min_bytes": -1}, ValueError, ("min_bytes=-1", "negative")),
    BadPolicy({"min_bytes": 0.5}, TypeError, ("min_bytes=0.5", "integer")),
    BadPolicy({"deterministic": 1}, TypeError, ("deterministic=1", "True or False")),
]


@pytest.mark.parametrize("bad", BAD_POLICIES, ids=lambda bad: str(bad.arguments)[:40])
def test_bad_policy(bad):
    with refused(bad.error, *bad.texts):
        Policy(**bad.arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_algorithm(name):
    policy = Policy(algorithm="rong")
    with refused(ValueError, "'rong'", "'ring'", "'halving_doubling'", "Did you mean 'ring'?"):
        run(lambda x: FUNCTIONS[name](x, "data", policy=policy))


def test_unknown_option():
    policy = Policy(algorithm=xcoll.policy.Choice("tree", (("radx", 3),)))
    with refused(ValueError, "radx", "radix"):
        run(lambda x: xcoll.psum(x, "data", policy=policy))


CANNOT = [
    ("all_to_all", "ring"),
    ("psum", "bruck"),
    ("all_gather", "tree"),
    ("psum_scatter", "double_tree"),
    ("pbroadcast", "pairwise"),
    ("preduce", "ring"),
    ("pgather", "direct"),
    ("pscatter", "halving_doubling"),
    ("ppermute", "ring"),
]


@pytest.mark.parametrize(("name", "algorithm"), CANNOT)
def test_algorithm_that_cannot_do_the_collective(name, algorithm):
    for policy in (Policy(algorithm=algorithm), Policy(algorithm={name: algorithm})):
        with refused(ValueError, name, algorithm):
            run(lambda x, policy=policy: FUNCTIONS[name](x, "data", policy=policy))


def test_algorithm_that_cannot_do_it_says_what_it_can():
    with refused(ValueError, "ring has no all_to_all", "all_reduce", "reduce_scatter"):
        run(lambda x: FUNCTIONS["all_to_all"](x, "data", policy=Policy(algorithm="ring")))


@pytest.mark.parametrize("name", ["all_reduce", "preduce"])
def test_unknown_op(name):
    valid = ("sum", "mean", "max", "min", "prod", "any", "all")
    with refused(ValueError, name, "'sun'", *map(repr, valid), "Did you mean 'sum'?"):
        run(lambda x: FUNCTIONS[name](x, "data", op="sun"))


@pytest.mark.parametrize("root", [2, -1, 99])
@pytest.mark.parametrize("name", ["preduce", "pgather", "pscatter", "pbroadcast"])
def test_root_out_of_range(name, root):
    argument = "source" if name == "pbroadcast" else "root"
    with refused(ValueError, name, f"{argument}={root}", "2 ranks", "0 to 1"):
        run(lambda x: getattr(xcoll, name)(x[:2], "data", **{argument: root}))


@pytest.mark.parametrize("root", [1.0, "1", None])
@pytest.mark.parametrize("name", ["preduce", "pgather", "pscatter", "pbroadcast"])
def test_root_that_is_no_integer(name, root):
    argument = "source" if name == "pbroadcast" else "root"
    with refused(TypeError, name, argument, "integer"):
        run(lambda x: getattr(xcoll, name)(x[:2], "data", **{argument: root}))


BOTH = ("data", "model")
DOES_NOT_DIVIDE = {
    "psum_scatter tiled": (lambda x: xcoll.psum_scatter(x, BOTH, tiled=True), ("6", "4 ranks")),
    "psum_scatter": (lambda x: xcoll.psum_scatter(x, BOTH), ("6", "4 ranks", "tiled=True")),
    "all_to_all tiled": (lambda x: xcoll.all_to_all(x, BOTH, 0, 1, tiled=True), ("6", "4 ranks")),
    "all_to_all": (lambda x: xcoll.all_to_all(x, BOTH, 0, 1), ("6", "4 ranks", "tiled=True")),
    "pscatter tiled": (lambda x: xcoll.pscatter(x, BOTH, tiled=True), ("6", "4 ranks")),
    "pscatter": (lambda x: xcoll.pscatter(x, BOTH), ("6", "4 ranks", "tiled=True")),
}


@pytest.mark.parametrize("case", DOES_NOT_DIVIDE)
def test_dimension_that_does_not_divide(case):
    fn, texts = DOES_NOT_DIVIDE[case]
    with refused(ValueError, case.split()[0], "(6, 4)", *texts):
        run(fn, np.ones((4, 6, 4), np.float32))
    with refused(ValueError, "x['w']", *texts):
        run(lambda x: fn({"w": x}), np.ones((4, 6, 4), np.float32))


OUT_OF_RANGE = {
    "psum_scatter": lambda x, d: xcoll.psum_scatter(x, "data", scatter_dimension=d, tiled=True),
    "all_gather": lambda x, d: xcoll.all_gather(x, "data", axis=d, tiled=True),
    "all_to_all": lambda x, d: xcoll.all_to_all(x, "data", d, 0, tiled=True),
    "all_to_all ": lambda x, d: xcoll.all_to_all(x, "data", 0, d, tiled=True),
    "pgather": lambda x, d: xcoll.pgather(x, "data", axis=d, tiled=True),
    "pscatter": lambda x, d: xcoll.pscatter(x, "data", axis=d, tiled=True),
}


@pytest.mark.parametrize("dimension", [2, -3])
@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_dimension_out_of_range(case, dimension):
    with refused(ValueError, case.strip(), f"={dimension}", "out of range", "-2 to 1"):
        run(lambda x: OUT_OF_RANGE[case](x, dimension))


@pytest.mark.parametrize("name", ["all_gather", "pgather"])
def test_new_dimension_out_of_range(name):
    with refused(ValueError, name, "axis=3", "-3 to 2"):
        run(lambda x: FUNCTIONS[name](x, "data", axis=3))


@pytest.mark.parametrize(
    ("perm", "text"),
    [
        ([(0, 2)], "destination 2 is out of range"),
        ([(-1, 0)], "source -1 is out of range"),
        ([(0, 1), (0, 0)], "source 0 is there twice"),
        ([(0, 1), (1, 1)], "destination 1 is there twice"),
    ],
)
def test_permutation_that_is_none(perm, text):
    with refused(ValueError, "ppermute", text, "2"):
        run(lambda x: xcoll.ppermute(x, "data", perm))


def test_nothing_is_sent_before_the_error():
    # The check is at tracing: the program with the bad call never comes to be.
    def fn(x):
        y = xcoll.psum(x, "data")
        jax.debug.callback(lambda _: pytest.fail("it ran"), y)
        return xcoll.psum_scatter(y[:3], "data", tiled=True)

    with refused(ValueError, "psum_scatter", "3", "2 ranks"):
        run(fn)
