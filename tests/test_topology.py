"""Topologies: from text, from meshes, written out; what each mesh axis lies on."""

import json
from importlib import resources
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from xcoll.hardware import kinds, load
from xcoll.topology import AxisLinks, Device, Level, Link, Topology


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


def test_check_shows_both():
    topology = Topology.parse("2*cpu:4@1Gbit", axes={"host": 2, "device": 4})
    topology.check("optimize", {"host": 2, "device": 4})
    with pytest.raises(ValueError, match="optimize") as caught:
        topology.check("optimize", {"data": 8})
    assert "host=2, device=4" in str(caught.value)
    assert "data=8" in str(caught.value)


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


def test_fingerprints_differ():
    unknown = Topology.unknown({"a": 8})
    assert len({t.fingerprint for t in [*map(Topology.parse, ALL), unknown]}) == len(ALL) + 1
    assert Topology.from_json(unknown.to_json()) == unknown


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"axes": 3}'])
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match="from_json"):
        Topology.from_json(text)


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


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Link(kind="x", network="switch", bandwidth_bytes_per_s=0),
        lambda: Link(kind="x", network="switch", bandwidth_bytes_per_s=1, latency_ps=-1),
        lambda: Level(size=0, link=LINK, dimension="x"),
        lambda: Level(size=4, link=LINK, dimension="x", extent=3),
        lambda: Level(size=2, link=LINK, dimension="x", rates_bytes_per_s=(1, 0)),
    ],
)
def test_impossible_links(bad):
    with pytest.raises(ValueError, match=r"Link|Level"):
        bad()


LINK = Link(kind="x", network="switch", bandwidth_bytes_per_s=1)


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
