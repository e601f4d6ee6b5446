"""Meshes: heavy axes on fast links, whole rings, slices and hosts outermost; their reports."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time

import audits
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import xcoll
from xcoll import aot
from xcoll.axis_shapes import nearest_shapes
from xcoll.hardware.placement import gpu_dimensions, tpu_dimensions
from xcoll.layouts import System, choose, search
from xcoll.topology import Device, Topology

MIB, GIB = 2**20, 2**30


def devices(text):
    try:
        return [device for granule in aot.devices(text) for device in granule]
    except ImportError as error:  # on the oldest jax, whose environment has no such compiler
        pytest.skip(str(error))


def of(mesh, value):
    """Values of the devices of a mesh, in its shape."""
    return np.array([value(d) for d in mesh.devices.flat]).reshape(mesh.devices.shape)


def lines(array, axis):
    return np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]).tolist()


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int = 0
    device_kind: str = "abacus"
    platform: str = "abacus"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def fake_tpu(kind, sizes):
    places = itertools.product(*map(range, reversed(sizes)))
    return [
        FakeDevice(i, i // 4, kind, "tpu", (*reversed(place), 0)[:3])
        for i, place in enumerate(places)
    ]


# Where nothing is known, or nothing asked for: jax.make_mesh's.


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (1, 8), (2, 2), (1,), ()])
@pytest.mark.parametrize("traffic", [None, {}])
def test_one_process_on_cpu_is_as_jax_makes_it(shape, traffic):
    names = tuple("abc"[: len(shape)])
    mesh = xcoll.make_mesh(shape, names, traffic=traffic)
    assert mesh == jax.make_mesh(shape, names)
    assert mesh.axis_types == (AxisType.Explicit,) * len(shape)


def test_memory_is_the_same_everywhere_so_traffic_moves_nothing():
    mesh = xcoll.make_mesh((2, 4), ("a", "b"), traffic={"a": GIB})
    assert mesh == jax.make_mesh((2, 4), ("a", "b"))


@pytest.mark.parametrize("types", [(AxisType.Auto, AxisType.Explicit), (AxisType.Manual,) * 2])
def test_axis_types_and_devices_go_through(types):
    order = jax.devices()[::-1]
    mesh = xcoll.make_mesh((2, 4), ("a", "b"), axis_types=types, devices=order)
    assert mesh == jax.make_mesh((2, 4), ("a", "b"), types, devices=order)
    assert mesh.axis_types == types and list(mesh.devices.flat) == order
    assert xcoll.make_mesh((2, 4), ("a", "b"), types, devices=order) == mesh
    sorted_out = xcoll.make_mesh(
        (2, 4), ("b", "a"), types, devices=order, topology="2*cpu:4@1Gbit", traffic={"a": GIB}
    )
    assert sorted_out.axis_types == types


def test_one_name_may_be_a_string_as_in_jax():
    assert xcoll.make_mesh((8,), "x") == jax.make_mesh((8,), "x")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("v5e:4x4", (4, 4)),
        ("v5e:4x4", (2, 8)),
        ("v5p:4x4x4", (16, 4)),
        ("v5p:4x4x4", (64,)),
        ("h100:8", (2, 4)),
        ("4*h100:8", (4, 8)),
    ],
)
def test_without_traffic_accelerators_are_as_jax_makes_them(text, shape):
    names = tuple("ab"[: len(shape)])
    mesh = xcoll.make_mesh(shape, names, devices=devices(text))
    assert mesh == jax.make_mesh(shape, names, devices=devices(text))


def test_unknown_devices_are_as_jax_makes_them_and_unused_traffic_is_said():
    unknown = [FakeDevice(i) for i in range(4)]
    plain = jax.make_mesh((2, 2), ("a", "b"), devices=unknown)
    assert xcoll.make_mesh((2, 2), ("a", "b"), devices=unknown) == plain
    with pytest.warns(xcoll.XcollWarning, match="traffic is not used.*no hardware table.*abacus"):
        mesh = xcoll.make_mesh((2, 2), ("a", "b"), devices=unknown, traffic={"a": 1})
    assert mesh == plain


def test_the_rate_between_cpu_processes_is_asked_for():
    two = [FakeDevice(i, i // 2, "cpu", "cpu") for i in range(4)]
    with pytest.warns(xcoll.XcollWarning, match=r"topology='2\*cpu:2@10Gbit'"):
        xcoll.make_mesh((2, 2), ("a", "b"), devices=two, traffic={"a": 1})
    mesh = xcoll.make_mesh(
        (2, 2), ("a", "b"), devices=two, topology="2*cpu:2@1Gbit", traffic={"a": GIB}
    )
    assert of(mesh, lambda d: d.process_index).tolist() == [[0, 1], [0, 1]], "a stays in a process"


# Slices and hosts: the heavy axis inside, the light one between.


@pytest.mark.parametrize("heavy", ["model", "data"])
@pytest.mark.parametrize("order", [("model", "data"), ("data", "model")])
def test_the_heavy_axis_lies_on_ici_and_the_light_one_on_dcn(heavy, order):
    (light,) = {"model", "data"} - {heavy}
    shape = tuple(4 if name == heavy else 2 for name in order)
    mesh = xcoll.make_mesh(
        shape, order, devices=devices("2*v5e:2x2"), traffic={heavy: GIB, light: MIB}
    )
    slices = of(mesh, lambda d: d.slice_index)
    assert {len(set(line)) for line in lines(slices, order.index(heavy))} == {1}
    assert lines(slices, order.index(light)) == [[0, 1]] * 4


def test_a_small_heavy_axis_leaves_the_slices_to_a_large_light_one():
    # Only model=2 has the size of the slices; over them it would go at 3.125 GB/s, not 45.
    mesh = xcoll.make_mesh(
        (2, 4),
        ("model", "data"),
        devices=devices("2*v5e:2x2"),
        traffic={"model": GIB, "data": MIB},
    )
    slices = of(mesh, lambda d: d.slice_index)
    assert {len(set(line)) for line in lines(slices, 0)} == {1}
    # Slices are the outermost part of the axis that spans them.
    assert lines(slices, 1) == [[0, 0, 1, 1]] * 2
    x, y = of(mesh, lambda d: d.coords[0]), of(mesh, lambda d: d.coords[1])
    assert abs(x[0] - x[1]).tolist() == [1] * 4 and (y[0] == y[1]).all(), "neighbours in x"


def test_slices_lie_outermost_where_jax_makes_no_mesh():
    two = devices("2*v5e:2x2")
    with pytest.raises(ValueError, match="multi-slice"):
        jax.make_mesh((2, 2, 2), ("dcn", "data", "model"), devices=two)
    mesh = xcoll.make_mesh((2, 2, 2), ("dcn", "data", "model"), devices=two)
    assert of(mesh, lambda d: d.slice_index).tolist() == [[[0, 0]] * 2, [[1, 1]] * 2]
    assert mesh.axis_types == (AxisType.Explicit,) * 3


@pytest.mark.parametrize(
    ("text", "shape", "heavy"),
    [
        ("4*h100:8", (4, 8), 0),
        ("4*h100:8", (4, 8), 1),
        ("4*h100:8", (8, 4), 0),
        ("4*h100:8", (8, 4), 1),
        # No more GPUs than one node may have, in two nodes.
        ("2*h100:4", (2, 4), 0),
        ("2*h100:4", (4, 2), 1),
        ("4*h200:2", (2, 4), 0),
    ],
)
def test_the_heavy_axis_stays_inside_gpu_nodes(text, shape, heavy):
    names = ("a", "b")
    traffic = {names[heavy]: GIB, names[1 - heavy]: MIB}
    mesh = xcoll.make_mesh(shape, names, devices=devices(text), traffic=traffic)
    hosts = of(mesh, lambda d: d.process_index)
    assert {len(set(line)) for line in lines(hosts, heavy)} == {1}
    for line in lines(hosts, 1 - heavy):
        assert line == sorted(line) and set(line) == set(range(int(text[0]))), "hosts outermost"
    report = xcoll.explain_mesh(mesh)
    assert report.topology.name == text
    assert [axis.hosts for axis in report.axes][heavy] == 1


def test_virtual_hosts_of_a_topology():
    mesh = xcoll.make_mesh(
        (2, 4), ("a", "b"), topology="2*cpu:4@200Mbit", traffic={"a": GIB, "b": MIB}
    )
    hosts = of(mesh, lambda d: d.id // 4)
    assert [len(set(line)) for line in lines(hosts, 0)] == [1] * 4
    assert lines(hosts, 1) == [[0, 0, 1, 1]] * 2
    # A topology alone: later axes are taken for the heavier ones.
    plain = xcoll.make_mesh((2, 4), ("a", "b"), topology="2*cpu:4@200Mbit")
    assert of(plain, lambda d: d.id).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # A topology's axes do not matter, and the order of the devices neither.
    given = Topology.parse("2*cpu:4@200Mbit", axes={"all": 8})
    again = xcoll.make_mesh(
        (2, 4),
        ("a", "b"),
        devices=jax.devices()[::-1],
        topology=given,
        traffic={"a": GIB, "b": MIB},
    )
    assert again == mesh


# Rings.


def is_ring(coords, sizes):
    """Whether devices along a line are neighbours in a torus, the last and the first too."""
    steps = zip(coords, [*coords[1:], coords[0]], strict=True)
    apart = [
        sum(min((a - b) % n, (b - a) % n) for a, b, n in zip(p, q, sizes, strict=True))
        for p, q in steps
    ]
    return set(apart) == {1}


@pytest.mark.parametrize(
    ("kind", "sizes", "shape", "heavy"),
    [
        ("TPU v5 lite", (4, 16), (16, 4), 0),  # v5e wraps around where a side is 16
        ("TPU v5 lite", (4, 16), (4, 16), 1),
        ("TPU v5 lite", (16, 16), (16, 16), 0),
        ("TPU v5", (4, 4, 4), (4, 16), 0),  # v5p where it is a multiple of 4
        ("TPU v5", (4, 4, 8), (8, 16), 0),
        ("TPU v5", (16, 16, 16), (16, 16, 16), 0),
    ],
)
def test_the_heavy_axis_is_a_ring(kind, sizes, shape, heavy):
    names = tuple("abc"[: len(shape)])
    mesh = xcoll.make_mesh(shape, names, devices=fake_tpu(kind, sizes), traffic={names[heavy]: GIB})
    places = np.array([d.coords[: len(sizes)] for d in mesh.devices.flat]).reshape(*shape, -1)
    along = np.moveaxis(places, heavy, -2).reshape(-1, shape[heavy], len(sizes))
    assert all(is_ring(line.tolist(), sizes) for line in along)
    axis = xcoll.explain_mesh(mesh).axis(names[heavy])
    assert axis.is_ring and len(axis.levels) == 1


def test_a_ring_is_broken_rather_than_sent_between_slices():
    # Two rings of 16 x 16 chips: model=2 has no whole dimension but the slices, 14 times slower.
    system = System(
        device=Device.named("v5e", 2), dimensions=tuple(tpu_dimensions("v5e", (16, 16), 2, 1))
    )
    layout = choose(system, (256, 2), (MIB, GIB))
    assert [k for k, _, _ in layout.axes[1]] == [2], "slice is 0, x is 1, y is 2"
    # Without traffic on it, it does lie on the slices.
    assert choose(system, (256, 2), (GIB, 0)).axes == (((2, 16, 1), (1, 16, 1)), ((0, 2, 1),))


def test_a_shape_that_jax_refuses_to_split():
    every = devices("v5p:4x4x4")
    with pytest.raises(NotImplementedError):
        jax.make_mesh((2, 32), ("a", "b"), devices=every)
    mesh = xcoll.make_mesh((2, 32), ("a", "b"), devices=every)
    assert set(mesh.devices.flat) == set(every) and mesh.devices.shape == (2, 32)


# Traffic from an audit.


@pytest.mark.parametrize("heavy", ["model", "data"])
def test_traffic_of_an_audit(heavy):
    (light,) = {"model", "data"} - {heavy}
    sizes = {heavy: 4, light: 2}
    audit = audits.audit(axis_sizes=sizes, wire_bytes={heavy: 3 * GIB // 2, light: MIB})
    two = devices("2*v5e:2x2")
    mesh = xcoll.make_mesh(tuple(sizes.values()), tuple(sizes), devices=two, traffic=audit)
    assert {len(set(line)) for line in lines(of(mesh, lambda d: d.slice_index), 0)} == {1}
    # An all-reduce over four sends 2 * 3/4 of its payload, over two 2 * 1/2.
    report = xcoll.explain_mesh(mesh, traffic=audit)
    assert (report.axis(heavy).num_bytes, report.axis(light).num_bytes) == (GIB, MIB)
    assert report.axis(heavy).slices == 1 and report.axis(light).slices == 2
    said = {heavy: GIB, light: MIB}
    assert mesh == xcoll.make_mesh((4, 2), (heavy, light), devices=two, traffic=said)


def test_an_audit_of_other_sizes_or_of_an_axis_of_one():
    audit = audits.audit(axis_sizes={"b": 1, "a": 3}, wire_bytes={"b": 0, "a": 101})
    # Over three, 101 bytes are sent of a payload of 101 * 3/4, which is no whole number.
    report = xcoll.explain_mesh(xcoll.make_mesh((2, 4), ("a", "b")), traffic=audit)
    assert {axis.name: axis.num_bytes for axis in report.axes} == {"a": 76, "b": 0}


@pytest.mark.parametrize("names", [("a",), ("a", "c"), ("a", "b", "c")])
def test_an_audit_of_other_axes_is_refused(names):
    audit = audits.audit(axis_sizes={"a": 2, "b": 4}, wire_bytes={"a": 1, "b": 1})
    shape = (8, 1, 1)[: len(names)]
    message = r"audit of a program over the axes \('a', 'b'\), the mesh has \('a',"
    with pytest.raises(ValueError, match=message):
        xcoll.make_mesh(shape, names, traffic=audit)
    mesh = jax.make_mesh(shape, names)
    with pytest.raises(ValueError, match=message):
        xcoll.explain_mesh(mesh, traffic=audit)


# The search.


def layouts(sizes, shape):
    """Every layout: each prime digit of each dimension to an axis; parts that do not join, not."""
    digits = []
    for k, size in enumerate(sizes):
        stride = 1
        while size > 1:
            prime = next(p for p in range(2, size + 1) if size % p == 0)
            digits.append((k, prime, stride))
            stride, size = stride * prime, size // prime
    for owners in itertools.product(range(len(shape)), repeat=len(digits)):
        parts = [{} for _ in shape]
        is_joined = True
        for owner, (k, prime, stride) in zip(owners, digits, strict=True):
            size, start = parts[owner].get(k, (1, stride))
            is_joined &= start * size == stride
            parts[owner][k] = (size * prime, start)
        products = tuple(math.prod(size for size, _ in own.values()) for own in parts)
        if is_joined and products == shape:
            yield [[(k, *own[k]) for k in sorted(own, reverse=True)] for own in parts]


SYSTEMS = [
    System(device=Device.named("v5e", 2), dimensions=tuple(tpu_dimensions("v5e", (4, 4), 2, 1))),
    System(device=Device.named("v5p"), dimensions=tuple(tpu_dimensions("v5p", (2, 4, 4), 1, 1))),
    System(device=Device.named("tpu7x"), dimensions=tuple(tpu_dimensions("tpu7x", (4, 4), 1, 2))),
    System(device=Device.named("h100", 4), dimensions=tuple(gpu_dimensions("h100", 8, 4))),
]


@pytest.mark.parametrize("system", SYSTEMS, ids=["slices", "v5p", "cores", "gpu"])
@pytest.mark.parametrize("shape", [(2, 16), (8, 4), (2, 4, 4), (2, 2, 8)])
def test_no_layout_is_better_or_worse_than_the_one_found(system, shape):
    for num_bytes in [(GIB, MIB, 4096), (MIB, GIB, 0), (MIB, MIB, MIB)]:
        loads = num_bytes[: len(shape)]
        times = [
            sum(system.time_ps(system.levels(p), n) for p, n in zip(axes, loads, strict=True))
            for axes in layouts(system.sizes, shape)
        ]
        assert search(system, shape, loads).time_ps == min(times)
        assert search(system, shape, loads, worst=True).time_ps == max(times)


SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import xcoll
mesh = xcoll.make_mesh((2, 2, 2), tuple("abc"), topology="2*cpu:4@1Gbit", traffic={"c": 4, "a": 99})
print([d.id for d in mesh.devices.flat], xcoll.explain_mesh(mesh, "2*cpu:4@1Gbit").to_json())
"""


def test_every_process_finds_the_same_order():
    found = set()
    for seed in ("0", "1"):
        env = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("shape", [(16, 16, 16), (8, 512), (4, 4, 4, 4, 4, 4), (2,) * 12])
def test_an_order_for_4096_devices_takes_less_than_a_second(shape):
    system = System(
        device=Device.named("v5p", 8), dimensions=tuple(tpu_dimensions("v5p", (8, 8, 8), 8, 1))
    )
    loads = [MIB * (i + 1) for i in range(len(shape))]
    taken = []
    for _ in range(2):  # the best of two: other work on the machine is not at stake
        start = time.perf_counter()
        layout = choose(system, shape, loads)
        taken.append(time.perf_counter() - start)
    assert math.prod(n for axis in layout.axes for _, n, _ in axis) == 4096
    assert min(taken) < 1


# Reports.


def test_a_report_of_slices_by_hand():
    mesh = xcoll.make_mesh(
        (2, 4), ("dcn", "ici"), devices=devices("2*v5e:2x2"), traffic={"ici": GIB, "dcn": MIB}
    )
    report = xcoll.explain_mesh(mesh)
    dcn, ici = report.axes
    assert (dcn.slices, dcn.hosts, dcn.bandwidth_bytes_per_s) == (2, 2, 3_125_000_000)
    assert (ici.slices, ici.hosts, ici.bandwidth_bytes_per_s) == (1, 1, 45_000_000_000)
    assert not dcn.is_ring and not ici.is_ring, "2 x 2 chips do not wrap around"
    # 64 MiB between two slices, everything at once: 1 µs to start, 50 µs, 2^26 / 3.125e9 s.
    assert dcn.num_bytes == 2**26
    assert dcn.time_ps == 1_000_000 + 50_000_000 + 21_474_836_480
    # Over two lines of two at once: twice (two hops of 1 µs, 3/4 of 2^26 bytes at 90 GB/s).
    assert ici.time_ps == 1_000_000 + 2 * (2_000_000 + 559_240_534)
    # At worst two chips of each of two slices: the halves cross the DCN.
    assert [level.dimension for level in ici.worst_levels] in (["x", "slice"], ["y", "slice"])
    half = 2**25
    inner = 2 * (1_000_000 + -(-(2**25) * 10**12 // 45_000_000_000))
    outer = 50_000_000 + -(-half * 10**12 // 3_125_000_000)
    at_once = 1_000_000 + -(-(2**26) * 10**12 // 45_000_000_000)
    assert ici.worst_time_ps == 1_000_000 + min(inner, at_once) + outer


def test_a_worse_order_costs_what_the_report_says():
    both = {"model": GIB, "data": MIB}
    two = devices("2*v5e:2x2")
    good = xcoll.explain_mesh(
        xcoll.make_mesh((2, 4), ("model", "data"), devices=two, traffic=both), traffic=both
    )
    assert good.time_ps == good.best_time_ps
    # model over the slices: 1 µs, 50 µs and 2^30 / 3.125e9 s.
    assert good.axis("model").worst_time_ps == 51_000_000 + 343_597_383_680
    slow = Mesh(np.array(two).reshape(2, 4), ("model", "data"))  # row-major: slices first
    bad = xcoll.explain_mesh(slow, traffic=both)
    assert bad.axis("model").time_ps == 51_000_000 + 343_597_383_680
    assert bad.time_ps == bad.worst_time_ps == good.worst_time_ps
    assert bad.best_time_ps == good.time_ps
    assert "xcoll.make_mesh(" in str(bad) and "finds none better" in str(good)
    assert "this is the worst" in str(bad) and "this is the worst" not in str(good)


def test_a_report_of_rings_by_hand():
    mesh = xcoll.make_mesh((16, 4), ("data", "model"), devices=devices("v5p:4x4x4"))
    data, model = xcoll.explain_mesh(mesh).axes
    assert data.is_ring and model.is_ring
    assert data.bandwidth_bytes_per_s == model.bandwidth_bytes_per_s == 90_000_000_000
    # A ring both ways: 180 GB/s, half of 4 hops, 3/4 of 2^26 bytes, there and back.
    assert model.time_ps == 1_000_000 + 2 * (2_000_000 + 279_620_267)
    # Two rings at once: 360 GB/s, 4 hops, 15/16 of it.
    assert data.time_ps == 1_000_000 + 2 * (4_000_000 + -(-15 * 2**22 * 10**12 // 360_000_000_000))


def test_parts_of_a_ring_share_its_links():
    mesh = Mesh(np.array(fake_tpu("TPU v5", (1, 1, 8))).reshape(4, 2), ("a", "b"))
    a, b = xcoll.explain_mesh(mesh).axes
    # a is every second chip: a ring, whose two lines pass the same links. b is a line of two.
    assert (a.is_ring, a.bandwidth_bytes_per_s) == (True, 45_000_000_000)
    assert (b.is_ring, b.bandwidth_bytes_per_s) == (False, 90_000_000_000)


def test_a_report_of_gpu_nodes():
    mesh = xcoll.make_mesh((4, 8), ("data", "model"), devices=devices("4*h100:8"))
    report = xcoll.explain_mesh(mesh)
    data, model = report.axes
    assert (data.hosts, data.bandwidth_bytes_per_s, data.is_ring) == (4, 50_000_000_000, False)
    assert (model.hosts, model.bandwidth_bytes_per_s, model.slices) == (1, 370_000_000_000, 1)
    assert data.time_ps > model.time_ps


def test_a_report_of_virtual_hosts_and_its_topology():
    text = "2*cpu:4@200Mbit"
    mesh = xcoll.make_mesh((2, 4), ("a", "b"), topology=text, traffic={"a": GIB})
    report = xcoll.explain_mesh(mesh, text)
    a, b = report.axes
    assert (a.hosts, a.bandwidth_bytes_per_s) == (1, None), "memory has no wire"
    # 1448 of 1514 bytes of 25 MB/s are payload, and four devices share them.
    assert (b.hosts, b.bandwidth_bytes_per_s) == (2, 25_000_000 * 1448 // 1514 // 4)
    # The report's topology is that of this order, and reads back as the same.
    report.topology.check("test", {"a": 2, "b": 4})
    assert [[v.dimension for v in x.levels] for x in report.topology.axes] == [
        ["device"],
        ["device", "host"],
    ]
    assert xcoll.explain_mesh(mesh, report.topology).axes == report.axes


def test_what_is_not_known_is_said():
    mesh = Mesh(np.array([FakeDevice(0), FakeDevice(1)]), ("a",))
    report = xcoll.explain_mesh(mesh)
    assert report.time_ps is None and report.axes[0].time_ps is None
    assert "no hardware table for device kind 'abacus'" in str(report)
    assert json.loads(report.to_json())["axes"][0]["bandwidth_bytes_per_s"] is None
    # Devices in no regular order.
    order = np.array(devices("v5e:4x4"))[[0, 5, 2, 3, 4, 1, *range(6, 16)]]
    report = xcoll.explain_mesh(Mesh(order.reshape(4, 4), ("a", "b")))
    assert "no product of axes" in str(report)


def test_a_mesh_of_some_devices_of_a_system():
    every = fake_tpu("TPU v5 lite", (4, 4))
    mesh = xcoll.make_mesh((2, 4), ("a", "b"), devices=every, traffic={"a": GIB})
    assert set(mesh.devices.flat) == set(every[:8])
    report = xcoll.explain_mesh(mesh, traffic={"a": GIB})
    assert report.topology.name == "v5e:4x2" and report.best_time_ps == report.time_ps


def test_a_report_is_data_and_text():
    mesh = xcoll.make_mesh((2, 4), ("dcn", "ici"), devices=devices("2*v5e:2x2"))
    report = xcoll.explain_mesh(mesh)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.time_ps = 0
    data = json.loads(report.to_json())
    assert [axis["name"] for axis in data["axes"]] == ["dcn", "ici"]
    assert data["axes"][0]["bandwidth_bytes_per_s"] == 3_125_000_000
    assert data["time_ps"] == sum(axis["time_ps"] for axis in data["axes"])
    text = str(report)
    for part in ("dcn=2", "slice 2 (dcn)", "3.1 GB/s", "64 MiB", "21.5 ms", "at worst"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120
    with pytest.raises(KeyError, match="no axis 'x'; there are"):
        report.axis("x")


# Bad input.


@pytest.mark.parametrize(
    ("shape", "names", "options", "error", "message"),
    [
        ((4, 8), ("a", "b"), {}, ValueError, r"make 32 devices, there are 8; .*\(2, 4\)"),
        ((9,), ("a",), {}, ValueError, r"make 9 devices, there are 8; the nearest .*: \(8,\)"),
        ((0, 8), ("a", "b"), {}, ValueError, r"axis_shapes=\(0, 8\).*at least 1"),
        ((-1, 8), ("a", "b"), {}, ValueError, "at least 1"),
        ((2.0, 4), ("a", "b"), {}, TypeError, "sequence of integers"),
        (8, ("a",), {}, TypeError, "sequence of integers"),
        ((2, 4), ("a",), {}, ValueError, "2 sizes for 1 names"),
        ((2, 4), ("a", "a"), {}, ValueError, "twice"),
        ((2, 4), ("a", "b"), {"traffic": [1, 2]}, TypeError, "must map axes to bytes, .*audit ret"),
        ((2, 4), ("a", "b"), {"traffic": xcoll.hlo}, TypeError, "must map axes to bytes"),
        ((2, 4), ("data", "b"), {"traffic": {"dta": 1}}, ValueError, "Did you mean 'data'"),
        ((2, 4), ("a", "b"), {"traffic": {"a": -1}}, ValueError, r"traffic\['a'\]=-1"),
        ((2, 4), ("a", "b"), {"traffic": {"a": 1.5}}, TypeError, "in bytes"),
        ((2, 4), ("a", "b"), {"traffic": {"a": True}}, TypeError, "in bytes"),
        ((2, 4), ("a", "b"), {"topology": 8}, TypeError, "must be a Topology, or text"),
        ((2, 4), ("a", "b"), {"topology": "v5e"}, ValueError, "malformed"),
        ((2, 4), ("a", "b"), {"topology": "cpu:4"}, ValueError, "describes 4 devices.* has 8"),
        (
            (2, 4),
            ("a", "b"),
            {"topology": Topology.parse("cpu:4")},
            ValueError,
            "describes 4 devices.* has 8",
        ),
        ((2, 4), ("a", "b"), {"axis_types": (AxisType.Auto,)}, ValueError, "axis_types"),
    ],
)
def test_bad_input_says_what_is_wrong(shape, names, options, error, message):
    with pytest.raises(error, match=message):
        xcoll.make_mesh(shape, names, **options)


def test_a_topology_of_other_chips_is_refused():
    every = devices("v5e:4x4")
    with pytest.raises(ValueError, match="'v5e:2x8' does not match.*'v5e:4x4'"):
        xcoll.make_mesh((4, 4), ("a", "b"), devices=every, topology="v5e:2x8")
    # The same with a rate of its own is taken.
    two = devices("2*v5e:2x2")
    mesh = xcoll.make_mesh((2, 4), ("a", "b"), devices=two, topology="2*v5e:2x2@8GB")
    dcn = xcoll.explain_mesh(mesh, "2*v5e:2x2@8GB").axes[0]
    assert dcn.bandwidth_bytes_per_s == 2_000_000_000, "four chips share the slice's 8 GB/s"


def test_a_part_of_some_slices_is_refused_with_shapes_that_fit():
    with pytest.raises(ValueError, match=r"make 6 devices, there are 8, .*no box.*\(2, 4\)"):
        xcoll.make_mesh((2, 3), ("a", "b"), devices=devices("2*v5e:2x2"))


def test_unknown_devices_that_jax_refuses_too():
    mixed = [*fake_tpu("TPU v5", (2, 2, 1))[:3], FakeDevice(9, 0, "TPU v5 lite", "tpu", (0, 0, 0))]
    with pytest.raises(ValueError, match="mixes kinds|refuses"):
        xcoll.make_mesh((4,), ("a",), devices=mixed, traffic={"a": 1})


def test_explain_mesh_wants_a_mesh():
    with pytest.raises(TypeError, match="must be a jax.sharding.Mesh"):
        xcoll.explain_mesh("mesh")
    mesh = xcoll.make_mesh((8,), ("a",))
    with pytest.raises(ValueError, match="unknown axis 'b'"):
        xcoll.explain_mesh(mesh, traffic={"b": 1})
    with pytest.raises(ValueError, match="describes 4 devices"):
        xcoll.explain_mesh(mesh, "cpu:4")


def test_nearest_shapes():
    # Squares of base-two logarithms: 1, 1, then 4 + 1, as (8, 2) which comes later.
    assert nearest_shapes((4, 8), 16) == [(2, 8), (4, 4), (1, 16)]
    assert nearest_shapes((5, 3), 12)[0] == (4, 3)
    assert nearest_shapes((), 8) == []
    start = time.perf_counter()
    assert nearest_shapes((7, 9, 11, 13, 15), 2**17)
    assert time.perf_counter() - start < 2
