"""Plans as JSON: both ways, and nothing else is read as one."""

import json
import re

import pytest

from xcoll.algorithms import ALGORITHMS, hierarchical, torus, tree
from xcoll.choosing import OPTIONS
from xcoll.plan import Plan, Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.schedule import COLLECTIVES
from xcoll.topology import Topology

HOSTS = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})


def made(collective="all_reduce", op="sum", algorithm=None, topology=HOSTS, dtype="float32"):
    request = Request(
        collective=collective,
        op=op,
        axes=("host", "device"),
        axis_sizes=(2, 4),
        dtype=dtype,
        itemsize=4,
        shapes=((1024, 1024), (), (0, 3)),
    )
    return plan(request, topology, Policy(algorithm=algorithm))


PLANS = {
    **{c: made(c, "sum" if "reduce" in c else "none") for c in COLLECTIVES},
    "permute": made("permute", "none"),
    "tree": made(algorithm=tree(radix=3)),
    "torus": made(algorithm=torus()),
    "two levels": made(algorithm=hierarchical("ring", tree(radix=2))),
    "unknown": made(topology=None),
    "max": made(op="max"),
}


@pytest.mark.parametrize("name", PLANS)
def test_json_both_ways(name):
    again = Plan.from_json(PLANS[name].to_json())
    assert again == PLANS[name]
    assert hash(again) == hash(PLANS[name])


def test_the_names_of_all_algorithms_are_known():
    assert sorted(OPTIONS) == sorted(ALGORITHMS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '"plan"',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"version": ' + "9" * 5000 + "}",
        '{"version": 1}',
        None,
        3,
        HOSTS.to_json(),
    ],
    ids=lambda text: str(text)[:20],
)
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match="^Plan.from_json: "):
        Plan.from_json(text)


def test_levels_that_are_nested_too_deeply():
    data = json.loads(PLANS["two levels"].to_json())
    data["stages"][0]["choice"] = "CHOICE"
    head, tail = '{"name": "hierarchical", "options": [], "levels": [', "]}"

    def nested(times):
        ring = '{"name": "ring", "options": [], "levels": []}'
        return json.dumps(data).replace('"CHOICE"', head * times + ring + tail * times)

    assert len(Plan.from_json(nested(1)).stages[0].choice.levels) == 1
    with pytest.raises(ValueError, match="a level cannot be hierarchical"):
        Plan.from_json(nested(2))
    with pytest.raises(ValueError, match="nested too deeply"):
        Plan.from_json(nested(50_000))


def tree_with(*options):
    return {"name": "tree", "options": options, "levels": []}


REQUEST = ("request",)
STAGE = ("stages", 0)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), ..., "'version': 4"),
        (("version",), 1, "'version': 4"),
        (("version",), None, "'version': 4"),
        (("colour",), "red", "plan: unknown field 'colour'"),
        (("reason",), ..., "plan: 'reason' is missing"),
        (("reason",), 3, "plan.reason: str is expected, not 3"),
        (("topology",), None, "plan.topology: str is expected"),
        (("predicted_time_ps",), "x", "plan.predicted_time_ps: int or NoneType is expected"),
        (("predicted_time_ps",), 1.5, "plan.predicted_time_ps: int or NoneType is expected"),
        (("predicted_time_ps",), True, "plan.predicted_time_ps: int or NoneType is expected"),
        (("predicted_time_ps",), -1, "plan.predicted_time_ps: must not be negative"),
        (("error_bound",), None, "plan.error_bound: int is expected"),
        (("wire_bytes",), {"host": 3}, "plan.wire_bytes: a list is expected"),
        (("wire_bytes",), [["host"]], "plan.wire_bytes[0]: 2 items are expected"),
        (("wire_bytes",), [["host", "3"]], "plan.wire_bytes[0][1]: int is expected"),
        (("wire_bytes",), [["hosts", 3]], "unknown axis 'hosts'"),
        (("request",), [], "plan.request: an object is expected"),
        ((*REQUEST, "ranks"), 8, "plan.request: unknown field 'ranks'"),
        ((*REQUEST, "root"), ..., "plan.request: 'root' is missing"),
        ((*REQUEST, "root"), 8, "root 8 of 8 ranks"),
        ((*REQUEST, "itemsize"), 0, "dtype 'float32' with itemsize 0: its items have 4 bytes"),
        ((*REQUEST, "dtype"), "float", "dtype 'float' with itemsize 4: jax has no such dtype"),
        ((*REQUEST, "dtype"), "f4", "'f4' with itemsize 4: jax has no such dtype; write for"),
        ((*REQUEST, "dtype"), "object", "'object' with itemsize 4: jax has no such dtype"),
        ((*REQUEST, "dtype"), "float64", "its items have 8 bytes"),
        ((*REQUEST, "platform"), "cuda", "unknown platform 'cuda'; valid: 'cpu', 'tpu'"),
        ((*REQUEST, "itemsize"), 4.0, "plan.request.itemsize: int is expected, not 4.0"),
        ((*REQUEST, "collective"), "all_reduc", "Did you mean 'all_reduce'?"),
        ((*REQUEST, "op"), "plus", "unknown op 'plus'"),
        ((*REQUEST, "axes"), "host", "plan.request.axes: a list is expected"),
        ((*REQUEST, "axes"), ["host", "host"], "each axis needs one"),
        ((*REQUEST, "axis_sizes"), [8], "each axis needs one"),
        ((*REQUEST, "axis_sizes"), [0, 4], "root 0 of 0 ranks"),
        ((*REQUEST, "shapes"), [3], "plan.request.shapes[0]: a list is expected"),
        ((*REQUEST, "shapes"), [[-3]], "plan.request.shapes[0][0]: must not be negative"),
        (("stages",), [], "stages: a plan has at least one"),
        (("stages",), None, "plan.stages: a list is expected"),
        ((*STAGE, "collective"), "sum", "unknown collective 'sum'"),
        ((*REQUEST, "pairs"), [[0, 8]], "pairs ((0, 8),) of 8 ranks"),
        ((*STAGE, "dims"), [0], "at least 1"),
        ((*STAGE, "dims"), [2, 3], "dims (2, 3) make 6 ranks, and its span has 4"),
        ((*STAGE, "num_chunks"), 0, "at least 1"),
        ((*STAGE, "span", "axes"), ["rack"], "unknown axis 'rack'"),
        ((*STAGE, "span", "axes"), ["device", "device"], "each of its axes is named once"),
        ((*STAGE, "span", "axes"), [], "does not fit a mesh of"),
        ((*STAGE, "span", "num_ranks"), 0, "does not fit a mesh of"),
        ((*STAGE, "span", "num_ranks"), 3, "does not fit a mesh of"),
        ((*STAGE, "span", "num_ranks"), 8, "does not fit a mesh of"),
        ((*STAGE, "span", "stride"), 0, "does not fit a mesh of"),
        ((*STAGE, "span", "stride"), 4, "does not fit a mesh of {'host': 2, 'device': 4}"),
        (
            (*STAGE, "beside"),
            {"axes": ["host"], "num_ranks": 4, "stride": 1},
            "Span(axes=('host',), num_ranks=4, stride=1) does not fit a mesh of",
        ),
        ((*STAGE, "span", "stride"), ..., "plan.stages[0].span: 'stride' is missing"),
        ((*STAGE, "choice", "name"), "rng", "unknown algorithm 'rng'"),
        ((*STAGE, "choice", "options"), [["radix", "2"]], "options[0][1]: int is expected"),
        (
            (*STAGE, "choice"),
            tree_with(("radx", 4)),
            "unknown option of tree 'radx'",
        ),
        ((*STAGE, "choice"), tree_with(("radix", 1)), "tree(radix=1): must be at least 2"),
        ((*STAGE, "choice"), tree_with(("radix", 2), ("radix", 4)), "give each once"),
        ((*STAGE, "choice", "options"), [["radix", 2]], "unknown option of"),
        (
            (*STAGE, "choice"),
            {"name": "hierarchical", "options": [], "levels": [tree_with() | {"name": "rng"}]},
            "Did you mean 'ring'?",
        ),
        ((*STAGE, "choice", "levels"), [tree_with()], "only hierarchical has levels"),
        (("operations", 0, "axes"), ["rack"], "unknown axis 'rack'"),
        (("operations", 0, "count"), "many", "plan.operations[0].count: int is expected"),
        (("candidates", 0, "why"), "x", "plan.candidates[0]: unknown field 'why'"),
        (("candidates", 0, "wire_bytes"), [["rack", 1]], "unknown axis 'rack'"),
    ],
)
def test_json_with_one_thing_wrong(path, value, says):
    data = json.loads(PLANS["all_reduce"].to_json())
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Plan.from_json(json.dumps(data))
    assert str(caught.value).startswith("Plan.from_json: ")
