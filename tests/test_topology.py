"""Topologies: from text, from meshes, written out; what each mesh axis lies on."""

import json
import re
from dataclasses import fields
from importlib import resources
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from xcoll.hardware import kinds, load
from xcoll.topology import AxisLinks, CodecRate, Curve, Device, Level, Link, Topology


def levels(topology, axis):
    """(dimension, size, stride) of an axis's levels, innermost first."""
    (found,) = [a for a in topology.axes if a.name == axis]
    return [(v.dimension, v.size, v.stride) for v in found.levels]


PLACEMENTS = [
    ("cpu:8", {"i": 8}, {"i": [("device", 8, 1)]}),
    ("cpu:8", {"a": 2, "b": 4}, {"a": [("device", 2, 4)], "b": [("device", 4, 1)]}),
    (
        "2*cpu:4@200Mbit",
        {"host": 2, "device": 4},
        {"host": [("host", 2, 1)], "device": [("device", 4, 1)]},
    ),
    ("2*cpu:4@200Mbit", {"data": 8}, {"data": [("device", 4, 1), ("host", 2, 1)]}),
    (
        "v5p:4x4x4",
        {"data": 16, "model": 4},
        {"data": [("y", 4, 1), ("x", 4, 1)], "model": [("z", 4, 1)]},
    ),
    (
        "v5e:16x16",
        {"data": 64, "model": 4},
        {"data": [("y", 4, 4), ("x", 16, 1)], "model": [("y", 4, 1)]},
    ),
    (
        "2*v5e:16x16",
        {"a": 2, "b": 256},
        {"a": [("slice", 2, 1)], "b": [("y", 16, 1), ("x", 16, 1)]},
    ),
    (
        "4*h100:8",
        {"a": 8, "b": 4},
        {"a": [("device", 2, 4), ("host", 4, 1)], "b": [("device", 4, 1)]},
    ),
    ("gb200:72", {"a": 1, "b": 72}, {"a": [], "b": [("device", 72, 1)]}),
    ("tpu7x:2x2x1", {"a": 8}, {"a": [("core", 2, 1), ("y", 2, 1), ("x", 2, 1)]}),
    ("v4:2x2x1", {"a": 4}, {"a": [("y", 2, 1), ("x", 2, 1)]}),
    ("v4:2x2x1", {"a": 8}, {"a": [("core", 2, 1), ("y", 2, 1), ("x", 2, 1)]}),
]


@pytest.mark.parametrize(("text", "axes", "expected"), PLACEMENTS)
def test_axes_lie_row_major_on_the_physical_dimensions(text, axes, expected):
    topology = Topology.parse(text, axes=axes)
    assert topology.axis_sizes == axes
    assert {axis: levels(topology, axis) for axis in axes} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v5e:16x16", {"x": 16, "y": 16}),
        ("2*v6e:4x8", {"slice": 2, "x": 4, "y": 8}),
        ("v5p:4x4x8", {"x": 4, "y": 4, "z": 8}),
        ("tpu7x:2x2x1", {"x": 2, "y": 2, "z": 1, "core": 2}),
        ("h200:8", {"device": 8}),
        ("b200:4", {"device": 4}),
        ("4*h100:8", {"host": 4, "device": 8}),
        ("cpu:3", {"device": 3}),
    ],
)
def test_default_axes_are_the_physical_dimensions(text, expected):
    assert Topology.parse(text).axis_sizes == expected


@pytest.mark.parametrize(
    ("text", "rings"),
    [
        # v5e and v6e wrap only where an axis has all 16; the others on multiples of 4.
        ("v5e:16x16", {"x": True, "y": True}),
        ("v5e:8x16", {"x": False, "y": True}),
        ("v6e:4x8", {"x": False, "y": False}),
        ("v4:4x4x8", {"x": True, "y": True, "z": True}),
        ("v5p:2x4x12", {"x": False, "y": True, "z": True}),
        ("tpu7x:4x4x4", {"x": True, "y": True, "z": True}),
    ],
)
def test_wrap_around(text, rings):
    topology = Topology.parse(text)
    found = {a.name: a.levels[0].is_ring for a in topology.axes if a.name in rings}
    assert found == rings


def test_a_part_of_a_ring_is_a_line_and_its_complement_a_ring():
    topology = Topology.parse("v5e:16x16", axes={"a": 16, "b": 2, "c": 8})
    b, c = (axis.levels[0] for axis in topology.axes[1:])
    assert (c.size, c.stride, c.is_ring) == (8, 1, False)
    assert (b.size, b.stride, b.is_ring) == (2, 8, True)
    assert b.dimension == c.dimension == "y", "they share the links of one torus axis"


def test_rates_and_sharing():
    host = Topology.parse("2*cpu:4@200Mbit").axes[0].levels[0]
    # 200 Mbit/s is 25 MB/s on the wire; 1448 of 1514 bytes of a frame are payload.
    assert host.bandwidth_bytes_per_s == 25_000_000 * 1448 // 1514
    assert host.shared_by == 4
    unequal = Topology.parse("3*cpu:2@1Gbit,100Mbit,0.5Gbit").axes[0].levels[0]
    payload = [rate * 1448 // 1514 for rate in (125_000_000, 12_500_000, 62_500_000)]
    assert unequal.rates_bytes_per_s == tuple(payload)
    assert unequal.bandwidth_bytes_per_s == payload[1], "the slowest host bounds"
    # A rate that is given is the whole host's; the table's is each device's.
    given = Topology.parse("2*h100:8@10GB").axes[0].levels[0]
    assert (given.bandwidth_bytes_per_s, given.shared_by) == (10**10, 8)
    tabled = Topology.parse("2*h100:8").axes[0].levels[0]
    assert (tabled.bandwidth_bytes_per_s, tabled.shared_by) == (5 * 10**10, 1)
    given = Topology.parse("2*v5e:4x4@1GB").axes[0].levels[0]
    assert (given.bandwidth_bytes_per_s, given.shared_by) == (10**9, 16)
    assert Topology.parse("2*v5e:4x4").axes[0].levels[0].bandwidth_bytes_per_s == 3_125_000_000


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("v5e", None, "':'"),
        ("v5e:", 4, "size"),
        ("v5e:4x", 6, "size"),
        ("v5e:4x0", 6, "size"),
        ("v5e:4", 4, "2 sizes"),
        ("cpu:4x2", 6, "cpu takes 1 size, for example 'cpu:4'"),
        ("cpu:\uff18", 4, "size"),
        ("\u0662*cpu:8@1Gbit", 0, "kind"),
        ("2*cpu:8@\uff12Gbit", 8, "rate"),
        ("cpu:2147483649", 4, "at most 2147483648"),
        ("9999999999999999999*cpu:1@1Gbit", 0, "at most 2147483648"),
        ("2*cpu:4@9999999999999999999MB", 8, "digits"),
        ("2*cpu:4@999999999999999999TB", 8, "bytes/s"),
        ("v5p:4x4", 6, "3 sizes"),
        ("v5e:4x4x4", 8, "2 sizes"),
        ("v5e:32x4", 4, "at most 16"),
        ("h100:16", 5, "at most 8"),
        ("h100:8!", 6, "should end"),
        ("*v5e:4x4", 0, "kind"),
        ("0*v5e:4x4", 0, "count"),
        ("2*cpu:4", 7, "rate"),
        ("2*cpu:4@", 8, "rate"),
        ("2*cpu:4@200Mb", 8, "rate"),
        ("2*cpu:4@0Mbit", 8, "rate"),
        ("3*cpu:4@1Gbit,2Gbit", 7, "one for each of the 3"),
        ("cpu:8@1Gbit", 5, "only one"),
        ("2*v3:4x4", 8, "rate"),
    ],
)
def test_malformed_text_is_marked_where_it_went_wrong(text, at, says):
    with pytest.raises(ValueError, match="malformed") as caught:
        Topology.parse(text)
    first, shown, mark = str(caught.value).split("\n")
    assert says in first
    assert shown == f"  {text}"
    assert mark == "  " + " " * (len(text) if at is None else at) + "^"


def test_unknown_hardware_lists_the_valid_and_the_nearest():
    with pytest.raises(ValueError, match="unknown hardware 'v5f'") as caught:
        Topology.parse("v5f:4x4")
    message = str(caught.value)
    assert all(repr(kind) in message for kind in kinds())
    assert "Did you mean 'v5" in message


def test_axes_that_do_not_fit():
    with pytest.raises(ValueError, match="8 devices, the axes make 6"):
        Topology.parse("cpu:8", axes={"a": 2, "b": 3})
    with pytest.raises(ValueError, match="axis 'b' of 3 does not line up with dimension 'device'"):
        Topology.parse("3*cpu:8@1Gbit", axes={"a": 8, "b": 3})


@pytest.mark.parametrize(
    ("axes", "error", "says"),
    [
        ({"a": -2, "b": -4}, ValueError, "'a' has size -2; it must be at least 1"),
        ({"a": 0, "b": 8}, ValueError, "'a' has size 0"),
        ({"a": "8"}, TypeError, "'a' has size '8'; write an integer"),
        ({"a": 8.0}, TypeError, "'a' has size 8.0; write an integer"),
        ({"a": True}, TypeError, "'a' has size True; write an integer"),
        ({"a": None}, TypeError, "'a' has size None; write an integer"),
        ({1: 8}, TypeError, "axis 1 must be a string"),
        ([("a", 8)], TypeError, "must be a mapping from axis to size"),
        ("a=8", TypeError, "must be a mapping from axis to size"),
    ],
)
def test_axes_that_are_none(axes, error, says):
    with pytest.raises(error, match=re.escape(says)):
        Topology.parse("cpu:8", axes=axes)
    with pytest.raises(error, match=re.escape(says)):
        Topology.unknown(axes)


def test_axes_of_numpy_integers():
    topology = Topology.parse("cpu:8", axes={"a": np.int64(8)})
    assert topology == Topology.parse("cpu:8", axes={"a": 8})
    assert type(topology.axis_sizes["a"]) is int


@pytest.mark.parametrize("text", [8, None, ["cpu:8"], b"cpu:8"])
def test_text_that_is_none(text):
    with pytest.raises(TypeError, match="must be text"):
        Topology.parse(text)


def test_check_shows_both():
    topology = Topology.parse("2*cpu:4@1Gbit", axes={"host": 2, "device": 4})
    topology.check("optimize", {"host": 2, "device": 4})
    with pytest.raises(ValueError, match="optimize") as caught:
        topology.check("optimize", {"data": 8})
    assert "host=2, device=4" in str(caught.value)
    assert "data=8" in str(caught.value)


def test_check_wants_the_axes_in_the_order_of_the_mesh():
    # The same names and sizes, but here the hosts are the inner axis: other links.
    topology = Topology.parse("2*cpu:4@1Gbit", axes={"device": 4, "host": 2})
    mesh = {"host": 2, "device": 4}
    assert topology.axes != Topology.parse("2*cpu:4@1Gbit", axes=mesh).axes[::-1]
    with pytest.raises(ValueError, match="in another order") as caught:
        topology.check("optimize", mesh)
    assert "(device=4, host=2, 8 devices)" in str(caught.value)
    assert "(host=2, device=4, 8 devices)" in str(caught.value)


ALL = ["2*cpu:4@200Mbit", "2*cpu:2@1Gbit,2Gbit", "v5p:4x4x4", "2*v5e:16x16", "4*h100:8", "gb200:72"]


@pytest.mark.parametrize("text", ALL)
def test_json_both_ways_hash_and_fingerprint(text):
    topology = Topology.parse(text)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert hash(again) == hash(topology)
    assert again.fingerprint == topology.fingerprint
    assert len(topology.fingerprint) == 12
    assert text in str(topology)


def test_times_are_written_as_everywhere():
    assert "one way, shared by 4, 60 µs" in str(Topology.parse("2*cpu:4@200Mbit"))


def test_fingerprints_differ():
    unknown = Topology.unknown({"a": 8})
    assert len({t.fingerprint for t in [*map(Topology.parse, ALL), unknown]}) == len(ALL) + 1
    assert Topology.from_json(unknown.to_json()) == unknown


@pytest.mark.parametrize("text", ["runs/two.json", "profile:two"])
def test_a_profile_is_no_text_of_a_topology(text):
    with pytest.raises(ValueError, match=r"names a profile.*Topology\.load\(path, mesh\)"):
        Topology.parse(text)


NOT_JSON = ["", "[]", "{}", '{"axes": 3}', "[" * 100_000, '{"version": ' + "9" * 5000 + "}", "3"]


@pytest.mark.parametrize("text", [*NOT_JSON, None, 3], ids=lambda text: str(text)[:20])
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match="Topology.from_json"):
        Topology.from_json(text)


def changed(text, path, value):
    """JSON text with one field set; of ``...``, removed."""
    data = json.loads(text)
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


LEVEL = ("axes", 0, "levels", 0)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 1, "'version': 2"),
        (("version",), "2", "'version': 2"),
        (("version",), 2.0, "'version': 2"),
        (("version",), ..., "'version': 2"),
        (("colour",), "red", "unknown field 'colour'"),
        (("nam",), "x", "Did you mean 'name'"),
        (("axes",), ..., "'axes' is missing"),
        (("axes",), {}, "axes={}"),
        (("axes", 0), "host", "AxisLinks: an object is expected"),
        (("axes", 0, "size"), 2, "AxisLinks: unknown field 'size'"),
        (("axes", 0, "name"), 3, "AxisLinks(name=3)"),
        (("axes", 0, "name"), "device", "axis 'device' is there twice"),
        (("axes", 0, "levels"), None, "AxisLinks(levels=None)"),
        (LEVEL, [], "Level: an object is expected"),
        ((*LEVEL, "width"), 2, "Level: unknown field 'width'"),
        ((*LEVEL, "size"), ..., "'size' is missing"),
        ((*LEVEL, "size"), "2", "Level(size='2')"),
        ((*LEVEL, "wrap"), "no", "Level(wrap='no')"),
        ((*LEVEL, "rates_bytes_per_s"), 3, "Level(rates_bytes_per_s=3)"),
        ((*LEVEL, "link"), None, "Link: an object is expected"),
        ((*LEVEL, "link", "speed"), 2, "Link: unknown field 'speed'"),
        ((*LEVEL, "link", "network"), "swich", "Did you mean 'switch'"),
        (("device",), "cpu", "Device: an object is expected"),
        (("device", "cores"), 3, "Device: unknown field 'cores'"),
        (("device", "platform"), "CPU", "Did you mean 'cpu'"),
        (("device", "version"), "1999.1", "version '1999.1' of the table of cpu"),
        (("device", "version"), 2026.1, "Device(version=2026.1)"),
        (("name",), None, "Topology(name=None)"),
    ],
)
def test_json_with_one_thing_wrong(path, value, says):
    text = Topology.parse("2*cpu:4@1Gbit").to_json()
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Topology.from_json(changed(text, path, value))
    assert str(caught.value).startswith("Topology.from_json: ")


def test_json_by_hand_may_leave_out_what_has_a_default_and_write_floats():
    link = {"kind": "lan", "network": "switch", "bandwidth_bytes_per_s": 25e6}
    level = {"size": 2, "link": link, "dimension": "host"}
    data = {"version": 2, "axes": [{"name": "host", "levels": [level]}]}
    found = Topology.from_json(json.dumps(data))
    lan = Link(kind="lan", network="switch", bandwidth_bytes_per_s=25_000_000)
    host = Level(size=2, link=lan, dimension="host")
    assert found == Topology(axes=(AxisLinks(name="host", levels=(host,)),))


def test_written_out():
    fast = Link(kind="nvlink", network="switch", bandwidth_bytes_per_s=10**11, latency_ps=10**6)
    slow = Link(kind="network", network="switch", bandwidth_bytes_per_s=10**10, latency_ps=10**7)
    topology = Topology(
        axes=(
            AxisLinks(
                name="data",
                levels=(
                    Level(size=4, link=fast, dimension="gpu"),
                    Level(size=2, link=slow, dimension="host", rates_bytes_per_s=(10**10, 10**9)),
                ),
            ),
        ),
        device=Device.named("h100", num_hosts=2),
    )
    assert topology.axis_sizes == {"data": 8}
    assert [(d.stride, d.level.size) for d in topology.digits(["data"])] == [(1, 4), (4, 2)]
    assert topology.axes[0].levels[1].bandwidth_bytes_per_s == 10**9
    assert "unequal" in str(topology)


LINK = Link(kind="x", network="switch", bandwidth_bytes_per_s=1)
HARDWARE = {
    Link: {
        "kind": "x",
        "network": "switch",
        "bandwidth_bytes_per_s": 1,
        "latency_ps": 0,
        "swap_percent": 100,
        "unlike_percent": 100,
    },
    Curve: {"collective": "all_reduce", "axes": ("a",), "points": ((1, 1), (2, 2))},
    CodecRate: {"codec": "int8", "encode_bytes_per_s": 1, "decode_bytes_per_s": 1},
    Level: {
        "size": 2,
        "link": LINK,
        "dimension": "x",
        "extent": 2,
        "stride": 1,
        "shared_by": 1,
        "wrap": False,
        "rates_bytes_per_s": (1, 2),
    },
    AxisLinks: {"name": "a", "levels": (Level(size=2, link=LINK, dimension="x"),)},
    Device: {
        "kind": "mine",
        "platform": "gpu",
        "memory_bytes_per_s": 1,
        "copy_bytes_per_s": 1,
        "step_ps": 0,
        "num_hosts": 1,
        "version": "",
        "codec_rates": (CodecRate(codec="int8", encode_bytes_per_s=1, decode_bytes_per_s=1),),
        "permute_points": ((0, 0), (1, 1)),
        "fresh_points": ((0, 0), (1, 1)),
        "overlap_percent": 0,
        "lone_step_ps": 0,
    },
    Topology: {
        "axes": (AxisLinks(name="a", levels=()),),
        "device": None,
        "name": "n",
        "why_unknown": "",
        "measured": (),
    },
}
"""Fields of everything that users write, with valid values."""

LEAST = {
    Link: {"bandwidth_bytes_per_s": 1, "latency_ps": 0, "swap_percent": 1, "unlike_percent": 1},
    CodecRate: {"encode_bytes_per_s": 1, "decode_bytes_per_s": 1},
    Level: {"size": 1, "extent": 0, "stride": 1, "shared_by": 1},
    Device: {
        "memory_bytes_per_s": 1,
        "copy_bytes_per_s": 1,
        "step_ps": 0,
        "lone_step_ps": 0,
        "num_hosts": 1,
        "overlap_percent": 0,
    },
}
"""Their numbers, and the least that each may be."""


def test_every_field_of_what_users_write_is_tried():
    for kind, values in HARDWARE.items():
        assert values.keys() == {f.name for f in fields(kind)}
        kind(**values)
        numbers = {name for name, value in values.items() if type(value) is int}
        assert numbers == LEAST.get(kind, {}).keys()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, values in HARDWARE.items() for name in values]
)
def test_fields_of_a_wrong_type(kind, name):
    for value in (object(), {"a": 1}, [object()], 1j, b"x"):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\({name}="):
            kind(**{**HARDWARE[kind], name: value})


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [(kind, name, least) for kind, bounds in LEAST.items() for name, least in bounds.items()],
)
def test_numbers(kind, name, least):
    def make(value):
        free = {"extent": 0, "rates_bytes_per_s": ()} if kind is Level else {}
        return getattr(kind(**{**HARDWARE[kind], **free, name: value}), name)

    for value in (2.0, np.int64(2), np.float32(2)):
        assert make(value) == 2
        assert type(make(value)) is int, "so that equal topologies are written alike"
    make(least)
    for value in (least - 1, 1.5, float("nan"), float("inf"), 2**62 + 1, 10**5000):
        with pytest.raises(ValueError, match=rf"^{kind.__name__}\({name}=.*must be"):
            make(value)
    for value in ("2", True, None):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\({name}=.*whole number"):
            make(value)


def test_floats_of_whole_numbers_make_the_same_topology():
    link = Link(kind="x", network="switch", bandwidth_bytes_per_s=25e6, latency_ps=2e3)
    level = Level(size=2.0, link=link, dimension="x", rates_bytes_per_s=[25e6, 1e6])
    whole = Level(
        size=2,
        link=Link(kind="x", network="switch", bandwidth_bytes_per_s=25_000_000, latency_ps=2000),
        dimension="x",
        rates_bytes_per_s=(25_000_000, 1_000_000),
    )
    made = [Topology(axes=[AxisLinks(name="a", levels=[v])]) for v in (level, whole)]
    assert made[0] == made[1]
    assert made[0].fingerprint == made[1].fingerprint
    assert hash(made[0].axes) == hash(made[1].axes)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (Link, {"network": "swich"}, "Did you mean 'switch'?"),
        (Link, {"network": ""}, "'torus', 'switch', 'memory'"),
        (Link, {"kind": ""}, "must not be empty"),
        (Level, {"size": 4, "extent": 3, "rates_bytes_per_s": ()}, "does not fit the dimension"),
        (Level, {"rates_bytes_per_s": (1, 0)}, "rates_bytes_per_s=0"),
        (Level, {"rates_bytes_per_s": (1, 2, 3)}, "one rate for each of the 2 positions"),
        (Level, {"rates_bytes_per_s": (1,)}, "one rate for each of the 2 positions"),
        (Device, {"platform": "CPU"}, "Did you mean 'cpu'?"),
        (Device, {"kind": "v5e", "platform": "gpu"}, "v5e is of platform 'tpu'"),
        (Topology, {"axes": (AxisLinks(name="a", levels=()),) * 2}, "axis 'a' is there twice"),
        (Curve, {"collective": "allreduce"}, "Did you mean 'all_reduce'?"),
        (Curve, {"axes": ()}, "name one mesh axis or several"),
        (Curve, {"axes": ("a", "a")}, "each once"),
        (Curve, {"points": ((1, 1),)}, "at least two"),
        (Curve, {"points": ((1, 1), (1, 2))}, "by rising bytes"),
        (Curve, {"points": ((1, 2), (2, 1))}, "times that do not fall"),
        (Curve, {"points": ((1, 2, 3), (2, 1, 3))}, "no pair"),
        (Curve, {"points": ((1, 2), (2, -1))}, "at least 0"),
        (CodecRate, {"codec": ""}, "must not be empty"),
    ],
)
def test_impossible_hardware(kind, changes, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        kind(**{**HARDWARE[kind], **changes})
    assert str(caught.value).startswith(kind.__name__)


def test_rates_are_those_of_the_whole_dimension():
    topology = Topology.parse("4*cpu:2@1Gbit,2Gbit,3Gbit,4Gbit", axes={"a": 2, "b": 4})
    (outer,), (_, inner) = (axis.levels for axis in topology.axes)
    assert (outer.size, inner.size) == (2, 2)
    assert outer.rates_bytes_per_s == inner.rates_bytes_per_s
    assert len(outer.rates_bytes_per_s) == outer.extent == 4


def test_named_devices():
    with pytest.raises(ValueError, match="unknown hardware 'h10'.*Did you mean 'h100'"):
        Device.named("h10")


def test_digits_of_several_axes():
    topology = Topology.parse("2*cpu:4@1Gbit", axes={"a": 4, "b": 2})
    found = [(d.axis, d.stride, d.axis_stride, d.level.size) for d in topology.digits(["a", "b"])]
    assert found == [("b", 1, 1, 2), ("a", 2, 1, 2), ("a", 4, 2, 2)]
    # Ranks are numbered by the order in which the axes are named, not by that of the mesh.
    found = [(d.axis, d.stride) for d in topology.digits(["b", "a"])]
    assert found == [("a", 1), ("a", 2), ("b", 4)]


def mesh(devices, shape, names):
    array = np.empty(len(devices), object)
    array[:] = devices
    return SimpleNamespace(devices=array.reshape(shape), axis_names=names)


def tpu(x, y, *, core=0, where=0, kind="TPU v5 lite"):
    return SimpleNamespace(
        device_kind=kind, coords=[x, y, 0], core_on_chip=core, slice_index=where, process_index=0
    )


def test_mesh_of_this_process():
    here = jax.make_mesh((2, 4), ("a", "b"), devices=jax.devices()[:8])
    topology = Topology.from_mesh(here)
    assert topology.is_known
    assert topology.platform == "cpu"
    topology.check("test", dict(here.shape))
    assert {v.link.network for axis in topology.axes for v in axis.levels} == {"memory"}


def test_mesh_of_a_tpu_slice():
    devices = [tpu(x, y) for x in range(4) for y in range(4)]
    topology = Topology.from_mesh(mesh(devices, (2, 8), ("a", "b")))
    assert levels(topology, "a") == [("x", 2, 2)]
    assert levels(topology, "b") == [("y", 4, 1), ("x", 2, 1)]
    assert topology.device == Device.named("v5e", 1)


def test_mesh_of_two_slices_and_two_cores():
    devices = [
        tpu(x, y, core=c, where=s, kind="TPU7x")
        for s in (4, 7)
        for y in range(2)
        for x in range(2)
        for c in range(2)
    ]
    topology = Topology.from_mesh(mesh(devices, (2, 8), ("s", "i")))
    assert levels(topology, "s") == [("slice", 2, 1)]
    assert levels(topology, "i") == [("core", 2, 1), ("x", 2, 1), ("y", 2, 1)]
    assert topology.device is not None
    assert topology.device.num_hosts == 2


def test_mesh_that_winds_through_a_slice_fills_a_box():
    order = [(0, 0), (1, 0), (1, 1), (0, 1)]
    topology = Topology.from_mesh(mesh([tpu(*c) for c in order], (4,), ("i",)))
    assert sorted(levels(topology, "i")) == [("x", 2, 1), ("y", 2, 1)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 1, 3, 5, 7]])
def test_mesh_of_gpu_nodes_by_process_or_nvlink_domain(order):
    def gpu(i, domain):
        return SimpleNamespace(
            device_kind="NVIDIA H100 80GB HBM3",
            process_index=i if domain else i // 4,
            slice_index=i // 4 if domain else None,
        )

    for domain in (False, True):
        devices = [gpu(i, domain) for i in order]
        topology = Topology.from_mesh(mesh(devices, (2, 4), ("a", "b")))
        if order[1] == 1:
            assert levels(topology, "a") == [("host", 2, 1)]
            assert levels(topology, "b") == [("device", 4, 1)]
        else:
            # Even devices first: either half is two devices of each node.
            assert levels(topology, "b") == [("device", 2, 1), ("host", 2, 1)]
            assert levels(topology, "a") == [("device", 2, 2)]


def test_meshes_about_which_nothing_is_known():
    abacus = [SimpleNamespace(device_kind="abacus", process_index=0)] * 2
    assert "abacus" in Topology.from_mesh(mesh(abacus, (2,), ("i",))).why_unknown
    cpus = [SimpleNamespace(device_kind="cpu", process_index=i // 2) for i in range(4)]
    several = Topology.from_mesh(mesh(cpus, (4,), ("i",)))
    assert not several.is_known
    assert "2*cpu:2@" in several.why_unknown, "it says what to write"
    mixed = [tpu(0, 0), tpu(1, 0, kind="TPU v4")]
    assert "mixes" in Topology.from_mesh(mesh(mixed, (2,), ("i",))).why_unknown
    scattered = [tpu(*c) for c in [(0, 0), (1, 1), (2, 0), (3, 3)]]
    assert "order" in Topology.from_mesh(mesh(scattered, (4,), ("i",))).why_unknown


def test_names_that_are_no_text_look_like_none():
    def gpus(count):
        return [SimpleNamespace(device_kind="NVIDIA H100", process_index=0)] * count

    assert Topology.from_mesh(mesh(gpus(8), (8,), ("i",))).name == "h100:8"
    many = Topology.from_mesh(mesh(gpus(16), (16,), ("i",)))
    assert many.name == "a mesh of 16 h100", "as text, a node has at most 8"
    assert many.is_known
    nodes = [SimpleNamespace(device_kind="NVIDIA H100", process_index=i // 16) for i in range(32)]
    assert Topology.from_mesh(mesh(nodes, (2, 16), ("a", "b"))).name == "a mesh of 2 x 16 h100"


def test_slices_whose_network_is_not_known():
    devices = [tpu(x, 0, where=s, kind="TPU v3") for s in range(2) for x in range(2)]
    topology = Topology.from_mesh(mesh(devices, (2, 2), ("s", "i")))
    assert "rate between v3 slices is not known" in topology.why_unknown


def test_no_mesh():
    empty = jax.sharding.Mesh(np.empty((0, 4), object), ("a", "b"))
    with pytest.raises(ValueError, match="no devices; make one with jax.make_mesh"):
        Topology.from_mesh(empty)
    with pytest.raises(TypeError, match="must be a jax.sharding.Mesh"):
        Topology.from_mesh("cpu:8")


@pytest.mark.parametrize(
    ("text", "shape", "network"),
    [
        ("v5e:4x4", (2, 8), ["torus", "torus", "torus"]),
        ("v5e:4x4", (16,), ["torus", "torus"]),
        ("2*v5e:2x2", (2, 4), ["switch", "torus", "torus"]),
        ("v5p:4x4x4", (16, 4), ["torus", "torus", "torus"]),
        ("tpu7x:2x2x1", (4, 2), ["torus", "torus", "switch"]),
    ],
)
def test_meshes_of_the_real_tpu_compiler(text, shape, network):
    pytest.importorskip("libtpu", reason="the extra aot is not installed")
    from xcoll import aot

    names = ("a", "b")[: len(shape)]
    topology = Topology.from_mesh(aot.mesh(text, shape, names))
    assert topology.is_known, topology.why_unknown
    assert topology.axis_sizes == dict(zip(names, shape, strict=True))
    assert [v.link.network for axis in topology.axes for v in axis.levels] == network
    written = Topology.parse(text, axes=topology.axis_sizes)
    assert topology.device == written.device


@pytest.mark.parametrize("kind", [*kinds(), "nccl"])
def test_every_figure_has_a_unit_and_a_source(kind):
    table = load(kind)
    assert table["version"]
    assert table["name"] == kind
    entries = [*table["figures"].values(), *(v for v in table.values() if isinstance(v, dict))]
    for entry in entries:
        if entry is not table["figures"]:
            assert entry["unit"] and entry["source"], entry
            assert "value" in entry


def test_tables_are_package_data():
    names = {entry.name for entry in resources.files("xcoll.hardware").iterdir()}
    assert {f"{kind}.json" for kind in kinds()} <= names
    for kind in kinds():
        json.loads(resources.files("xcoll.hardware").joinpath(f"{kind}.json").read_text())
