"""Times and lower bounds of audited collectives: by hand, and against every algorithm there is."""

import itertools
import math

import networks
import numpy as np
import pytest
from algorithm_table import CASES
from networks_of_programs import collective, mesh

from xcoll.algorithms import build
from xcoll.hlo.prices import Network
from xcoll.loads import span_digits
from xcoll.natives import native_ps
from xcoll.plan import Span
from xcoll.policy import Choice
from xcoll.simulate import simulate
from xcoll.topology import AxisLinks, Level, Link, Topology

B = 8000  # bytes; 8 µs on a link of 1e9 bytes/s, an eighth of it 1 µs
EIGHT = (tuple(range(8)),)
NATIVE = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
}


def on(topology):
    """The network of a mesh with a topology's axes."""
    return Network(mesh(**topology.axis_sizes), topology)


def groups_over(topology, axes):
    """Groups over some axes in the order of `axes`, as jax.lax's collectives make them."""
    names = list(topology.axis_sizes)
    sizes = tuple(topology.axis_sizes.values())
    inside = [names.index(axis) for axis in axes]
    outside = [i for i in range(len(names)) if i not in inside]
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(*outside, *inside)
    return grid.reshape(-1, math.prod(sizes[i] for i in inside)).tolist()


def bound_us(topology, kind, groups=EIGHT, num_bytes=B):
    row = collective(kind, num_bytes, groups, num_devices=math.prod(topology.axis_sizes.values()))
    return on(topology).bound_ps(row) / 10**6


EVERY = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-broadcast")
BOUNDS = {
    # 16 links, both ways. 2 · 7 · B over all of them; 7/8 · B out of each rank's two; 7 · B into
    # each rank's two; 8 · 8 messages of B/8 over 2 links on average; B into each rank's two.
    "ring": (networks.torus(8), (7, 3.5, 28, 8, 4)),
    # The rank at the end has one link: B, 7/8 · B, 7 · B, and B through it; 4 · 4 messages of B/8
    # over the link in the middle.
    "line": (networks.torus(8, wrap=False), (8, 7, 56, 16, 8)),
    # 2 · 7 · B over 8 ports; 7/8 · B out of one, 7 · B into one, 7/8 · B out of one, B into one.
    "switch": (networks.switch(8), (14, 7, 56, 7, 8)),
    # One port for each of 2 hosts of 4: 2 · B over both; half of B; 4 · B; 4 · 4 / 8 · B; B.
    "hosts": (networks.hosts(2, 4), (8, 4, 32, 16, 8)),
    # 4 x 4 ring by ring, 64 links, 4 a rank: 2 · 15 · B over 64; 15/16 · B and 15 · B over 4;
    # 16 · 16 messages of B/16 over one link on average in each dimension, of 32 links; B over 4.
    "torus": (networks.torus(4, 4), (3.75, 1.875, 30, 4, 2)),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_bounds_by_hand(case):
    topology, expected = BOUNDS[case]
    whole = (tuple(range(math.prod(topology.axis_sizes.values()))),)
    assert tuple(bound_us(topology, kind, whole) for kind in EVERY) == expected


def test_groups_that_share_links_are_counted_together():
    # Each device with its like on the other host: 2 · B for each group, over two ports.
    pairs = [(i, i + 4) for i in range(4)]
    assert bound_us(networks.hosts(2, 4), "all-reduce", pairs) == 32
    assert bound_us(networks.hosts(2, 4), "all-reduce", pairs[:1]) == 8
    assert bound_us(networks.hosts(2, 4), "reduce-scatter", pairs) == 16
    # Even and odd ranks of a ring of 8: 2 · 3 · B for each, over two links each time, on 16.
    interleaved = [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert bound_us(networks.torus(8), "all-reduce", interleaved) == 12
    assert bound_us(networks.torus(8), "all-reduce", interleaved[:1]) == 6
    # Exchanged: 4 · 4 messages of B/4 over 2 links on average, in each group: 128 · 1 µs on 16.
    assert bound_us(networks.torus(8), "all-to-all", interleaved) == 8
    # On a line, 2 · 2 messages of B/4 of each cross the middle.
    assert bound_us(networks.torus(8, wrap=False), "all-to-all", interleaved) == 16
    assert bound_us(networks.torus(8, wrap=False), "all-to-all", interleaved[:1]) == 8
    # A row of a 4 x 8 mesh of lines exchanges over one link in its middle, whatever a block of two
    # other rows does: 4 · 4 messages of B/8.
    block = [16, 17, 18, 19, 24, 25, 26, 27]
    lines = networks.torus(4, 8, wrap=False)
    assert bound_us(lines, "all-to-all", [range(8), block]) == 16
    # Host 0 is in both groups, B through its port for each.
    assert bound_us(networks.hosts(3, 4), "all-reduce", [(0, 4), (1, 8)]) == 16
    # Halves of the ring are lines, each with its own links: 2 · 3 · B over 6 of them.
    halves = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert bound_us(networks.torus(8), "all-reduce", halves) == 8
    # Across the middle of each 2 · 2 messages of B/4; the same for a half that passes the ends.
    assert bound_us(networks.torus(8), "all-to-all", halves) == 8
    assert bound_us(networks.torus(8), "all-to-all", [(6, 7, 0, 1)]) == 8


def test_a_slow_port_and_a_switch_that_adds():
    # A host's port with a tenth of the other's rate: B must pass it each way.
    link = Link(kind="network", network="switch", bandwidth_bytes_per_s=10**9)
    level = Level(size=2, link=link, dimension="host", rates_bytes_per_s=(10**9, 10**8))
    topology = Topology(axes=(AxisLinks(name="x", levels=(level,)),), device=networks.device())
    assert bound_us(topology, "all-reduce", [(0, 1)]) == 80
    # Out of the slow port B/2; the fast one sends the same in a tenth.
    assert bound_us(topology, "reduce-scatter", [(0, 1)]) == 40
    # NVLink adds by itself: B each way through 370 GB/s, not 2 · 7/8 · B.
    assert bound_us(Topology.parse("h100:8"), "all-reduce", EIGHT, 370_000) == 1
    # Between nodes nothing adds: 2 · B over the 16 ports of 50 GB/s of both.
    two = Topology.parse("2*h100:8")
    sixteen = [tuple(range(16))]
    assert bound_us(two, "all-reduce", sixteen, 400 * 370_000) == 400 * 370_000 * 2 / 800e9 * 1e6


def test_slices_and_chips_with_two_devices():
    # 2 slices of 4 chips, 8 devices each: 2 · B over 8 ports of 12.5 GB/s a chip; inside, what
    # all 8 links of 90 GB/s and these carry is less.
    topology = Topology.parse("2*tpu7x:2x2x1")
    dcn = next(level for level in topology.axes[0].levels)
    assert (dcn.link.bandwidth_bytes_per_s, dcn.shared_by) == (12_500_000_000, 2)
    assert bound_us(topology, "all-reduce", [tuple(range(16))], 50_000) == 1


KINDS = {v: k for k, v in NATIVE.items()} | {"broadcast": "collective-broadcast"}


@pytest.mark.parametrize("case", [c for c in CASES if c.collective in KINDS], ids=str)
def test_no_algorithm_beats_the_bound(case):
    makes = {
        "ring": networks.torus,
        "line": lambda n: networks.torus(n, wrap=False),
        "switch": networks.switch,
        "hosts of 2": lambda n: networks.hosts(n // 2, 2),
        "hosts of 4": lambda n: networks.hosts(n // 4, 4),
    }
    slot = 1000
    for n, (name, make) in itertools.product((2, 3, 6, 8), makes.items()):
        if name.startswith("hosts") and (n % int(name[-1]) or n == int(name[-1])):
            continue
        topology = make(n)
        for schedule in case.schedules(n)[:2]:
            slots = schedule.share if schedule.enter == "own" else schedule.num_slots
            row = collective(KINDS[case.collective], slots * slot, [range(n)], num_devices=n)
            took = simulate(schedule, topology, Span(("x",), n), slot).time_ps
            assert 0 < on(topology).bound_ps(row) <= took, (n, name, schedule.algorithm)


@pytest.mark.parametrize(
    ("choice", "make"),
    [(Choice("bidirectional_ring"), networks.torus), (Choice("ring"), networks.switch)],
    ids=["ring", "switch"],
)
def test_bounds_are_reached_by_the_best_algorithms(choice, make):
    # Of a large payload: starts and hops are a thousandth.
    topology, slot = make(8), 10**6
    schedule = build(choice, "reduce_scatter", 8)
    took = simulate(schedule, topology, Span(("x",), 8), slot).time_ps
    row = collective("reduce-scatter", schedule.num_slots * slot, EIGHT)
    assert 1 <= took / on(topology).bound_ps(row) < 1.001


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("v5e:16x16", {"a": 32, "b": 8}),
        # x and y are cut in two pieces each, which other orders of the axes tear apart.
        ("v5p:4x4x4", {"a": 2, "b": 4, "c": 8}),
        ("2*v5e:4x4", {"a": 2, "b": 16}),
        ("2*v5e:4x4@100Gbit", {"a": 4, "b": 8}),
        ("2*tpu7x:2x2x1", {"a": 2, "b": 4, "c": 2}),
        ("h100:8", {"a": 2, "b": 4}),
        ("4*h100:8", {"a": 8, "b": 4}),
        ("2*h200:8@400Gbit", {"a": 2, "b": 8}),
        ("gb200:72", {"a": 9, "b": 8}),
        ("cpu:8", {"a": 2, "b": 4}),
        ("2*cpu:4@200Mbit", {"a": 2, "b": 4}),
        ("4*cpu:4@1Gbit,1Gbit,2Gbit,4Gbit", {"a": 4, "b": 4}),
    ],
)
def test_whole_axes_have_the_price_of_xla_and_no_price_is_below_the_bound(text, axes):
    topology = Topology.parse(text, axes=axes)
    network = on(topology)
    devices = math.prod(axes.values())
    for count in range(1, len(axes) + 1):
        for used in itertools.permutations(axes, count):
            groups = groups_over(topology, used)
            ranks = len(groups[0])
            digits = span_digits(topology, Span(used, ranks))
            for kind, num_bytes in itertools.product(NATIVE, (ranks * 64, ranks * 2**22)):
                row = collective(kind, num_bytes, groups, num_devices=devices)
                native = native_ps(topology.device, digits, NATIVE[kind], num_bytes)
                assert network.time_ps(row) == native
                assert network.bound_ps(row) <= native
            # Parts of the ranks, next to each other or apart, as in a hierarchy.
            for kind, size in itertools.product(NATIVE, {2, ranks // 2} - {1, ranks}):
                rows = np.array(groups).reshape(-1, ranks // size, size)
                for part in (rows, rows.reshape(-1, size, ranks // size).swapaxes(1, 2)):
                    part = part.reshape(-1, size)
                    row = collective(kind, ranks * 2**22, part, num_devices=devices)
                    assert 0 <= network.bound_ps(row) <= network.time_ps(row)
            pairs = [pair for g in groups for pair in zip(g, g[1:] + g[:1], strict=True)]
            row = collective("collective-permute", 2**20, pairs=pairs, num_devices=devices)
            assert network.bound_ps(row) <= network.time_ps(row)
            if used == tuple(axes) or (count == 1 and "tpu7x" not in text):
                # In another order a message turns corners, and the devices of a chip that are in
                # other groups share its links: closed forms leave both out.
                assert network.time_ps(row) == native_ps(topology.device, digits, "permute", 2**20)


def test_parts_of_an_axis_are_levels_of_their_own():
    # Every second device of a ring of 16 is a ring of 8, two hops apart; the first four, a line.
    topology = Topology.parse("v5e:16x16", axes={"a": 16, "b": 16})
    link = topology.axes[1].levels[0].link
    rows = np.arange(256).reshape(16, 16)
    evens = collective("all-reduce", B, rows.reshape(16, 8, 2).swapaxes(1, 2).reshape(-1, 8))
    fours = collective("all-gather", B, rows.reshape(-1, 4), num_devices=256)
    for row, size, stride in ((evens, 8, 2), (fours, 4, 1)):
        level = Level(size=size, link=link, dimension="y", extent=16, stride=stride, wrap=True)
        alone = Topology(
            axes=(AxisLinks(name="x", levels=(level,)),), device=topology.device
        ).digits(("x",))
        row = collective(row.kind, B, row.groups, num_devices=256)
        assert on(topology).time_ps(row) == native_ps(topology.device, alone, NATIVE[row.kind], B)


def test_the_order_of_ranks_does_not_matter_to_xla():
    network = on(networks.torus(8))
    in_order = network.time_ps(collective("all-reduce", B, EIGHT))
    assert network.time_ps(collective("all-reduce", B, [(3, 1, 4, 0, 5, 2, 6, 7)])) == in_order
    # Nor which ports of a switch.
    three = on(networks.switch(3)).time_ps(collective("all-gather", B, [(0, 1, 2)], num_devices=3))
    assert on(networks.switch(8)).time_ps(collective("all-gather", B, [(5, 1, 6)])) == three


def test_pieces_of_a_torus_dimension_are_one_set_of_links_to_xla():
    # A line of four chips; its pairs and the two of them are digits apart where z lies between.
    x = {"link": networks.torus(2).axes[0].levels[0].link, "dimension": "x", "extent": 8}
    low, high = Level(size=2, **x), Level(size=2, stride=2, **x)
    z = networks.torus(4).axes[0].levels[0]

    def price(*levels):
        axes = (AxisLinks(name="i", levels=levels),)
        digits = Topology(axes=axes, device=networks.device()).digits(("i",))
        return native_ps(networks.device(), digits, "all_gather", B)

    assert price(low, z, high) == price(high, z, low) == price(Level(size=4, **x), z)


STEP, HOP, WORK = 10, 7, 8  # ps: of `networks`; B through memory of 1e15 bytes/s takes 8


def permute(topology, pairs):
    """Time in ps, less the start and the device's own work."""
    row = collective("collective-permute", B, pairs=pairs)
    return on(topology).time_ps(row) - STEP - WORK, on(topology).bound_ps(row)


def test_permutes_by_the_load_of_each_link():
    def shift(d):
        return [(i, (i + d) % 8) for i in range(8)]

    # Round a ring by 3, each link carries 3; by 6 the other way round, 2.
    us = 8 * 10**6
    assert permute(networks.torus(8), shift(3)) == (3 * us + 3 * HOP, 3 * us)
    assert permute(networks.torus(8), shift(6)) == (2 * us + 2 * HOP, 2 * us)
    # On a line 7 goes back 7 links to 0; each link carries one each way.
    assert permute(networks.torus(8, wrap=False), shift(1)) == (us + 7 * HOP, us)
    # One message alone, and two that meet on the link from 2 to 3.
    assert permute(networks.torus(8), [(0, 2)]) == (us + 2 * HOP, us)
    assert permute(networks.torus(8), [(1, 3), (2, 4)]) == (2 * us + 2 * HOP, 2 * us)
    # To the same device of the next host: four share a port. To the next device: only one leaves.
    assert permute(networks.hosts(2, 4), shift(4)) == (4 * us + HOP, 4 * us)
    assert permute(networks.hosts(2, 4), shift(1)) == (us + HOP, us)
    # Nothing moves.
    assert permute(networks.torus(8), [(i, i) for i in range(8)]) == (0, 0)


def test_irregular_groups_by_the_ring_of_their_ranks():
    # Ranks 0 and 1 on the one host, 4 on the other: 0 to 1 to 4 to 0, 2 · 2/3 of 6000 bytes over
    # each port, in 4 steps of one hop; B through memory takes 6 ps.
    network = on(networks.hosts(2, 4))
    reduced = collective("all-reduce", 6000, [(0, 1, 4)])
    assert network.time_ps(reduced) == 8 * 10**6 + 4 * HOP + STEP + 6
    # Into and out of each host B: 2 · B over two ports.
    assert network.bound_ps(reduced) == 6 * 10**6
    # Exchanged, two thirds of B leave host 0 and as much leaves host 1.
    exchanged = collective("all-to-all", 6000, [(0, 1, 4)])
    assert network.time_ps(exchanged) == 4 * 10**6 + HOP + STEP + 6
    assert network.bound_ps(exchanged) == 4 * 10**6
    # The slowest group decides: here one with all ranks inside.
    both = collective("all-reduce", 6000, [(0, 1, 4), (2, 3)])
    assert network.time_ps(both) == network.time_ps(reduced)


def test_bytes_by_physical_dimension():
    # b is all of z and the inner half of y, a the outer half of y and all of x.
    network = on(Topology.parse("v5p:4x4x4", axes={"a": 8, "b": 8}))
    over_b = [range(8 * i, 8 * i + 8) for i in range(8)]
    whole = [range(64)]

    def level_bytes(kind, groups):
        return network.level_bytes(collective(kind, B, groups, num_devices=64))

    # The ring turns from y = 0 to 1 at z = 3, where a device sends along both: 2 · 7/8 · B.
    assert level_bytes("all-reduce", over_b) == {"x": 0, "y": 14000, "z": 14000}
    # To 8 ranks B/8 each: 6 of them at another z, 4 at another y.
    assert level_bytes("all-to-all", over_b) == {"x": 0, "y": 4000, "z": 6000}
    # y is one dimension, whichever axis it belongs to: 48 of 64 ranks are elsewhere on each.
    assert level_bytes("all-to-all", whole) == {"x": 6000, "y": 6000, "z": 6000}
    assert network.total_level_bytes(
        [
            collective("all-to-all", B, over_b, num_devices=64, executions=3),
            collective("all-to-all", B, whole, num_devices=64, executions=None),
        ]
    ) == {"x": 6000, "y": 18000, "z": 24000}


def test_transfers_between_slices_are_priced_at_the_send():
    ids = [100_000 * (s + 1) + i for s in range(2) for i in range(4)]
    topology = Topology.parse("2*v5e:2x2", axes={"slice": 2, "chip": 4})
    network = Network(mesh(ids=ids, slice=2, chip=4), topology)
    targets = [(100_000 + i, 200_000 + i) for i in range(4)]
    send = collective("send", B, targets, num_devices=4, transfer="all-reduce")
    recv = collective("recv", B, targets, num_devices=4, transfer="all-reduce")
    digits = span_digits(topology, Span(("slice",), 2))
    assert network.time_ps(send) == native_ps(topology.device, digits, "all_reduce", B)
    # Each chip has a port of 3.125 GB/s: B each way.
    assert network.bound_ps(send) == 2_560_000
    assert (network.time_ps(recv), network.bound_ps(recv)) == (0, 0)
    assert network.level_bytes(send)["slice"] == B
    assert network.level_bytes(recv)["slice"] == 0
    moved = collective("send", B, pairs=targets[:1], num_devices=4, transfer="collective-permute")
    assert network.time_ps(moved) == native_ps(topology.device, digits, "permute", B)
    host = collective("send", B, ())
    assert network.axes_of(host) == ()
    assert network.time_ps(host) is network.bound_ps(host) is None


def test_unknown_topologies_have_bytes_and_no_times():
    network = Network(mesh(a=2, b=4), Topology.unknown({"a": 2, "b": 4}))
    row = collective("all-gather", B, EIGHT)
    assert network.time_ps(row) is network.bound_ps(row) is None
    assert network.level_bytes(row) == network.total_level_bytes([row]) == {}
    assert network.wire_bytes(row) == {"a": 7 * B, "b": 7 * B}


def test_the_topology_of_another_mesh():
    with pytest.raises(ValueError, match="audit: the topology does not match the mesh"):
        Network(mesh(a=4, b=2), Topology.unknown({"a": 2, "b": 4}))


def test_on_a_single_device_nothing_is_sent_and_nothing_takes_time():
    # XLA leaves some collectives in a program for one device, such as an all-reduce of maxima.
    alone = on(Topology.parse("cpu:1", axes={"a": 1}))
    for kind in NATIVE:
        each = collective(kind, B, groups=((0,),), num_devices=1)
        assert (alone.time_ps(each), alone.bound_ps(each)) == (0, 0)
        assert (alone.wire_bytes(each), alone.level_bytes(each)) == ({"a": 0}, {})
