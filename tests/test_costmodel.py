"""Prices against measurements and published figures; bytes, operations and bounds by hand."""

import math
import random
from dataclasses import replace
from fractions import Fraction

import networks
import numpy as np
import pytest

from xcoll.accounting import operations, wire_bytes
from xcoll.algorithms import ALGORITHMS
from xcoll.costmodel import Operand, Pricer, operands, packing_ps
from xcoll.emitted import UNROLLED_RANKS, permutes_in_program
from xcoll.execute import UNROLL_MAX_RANKS
from xcoll.loads import span_digits
from xcoll.natives import native_ps
from xcoll.plan import Operation, Request, Span, Stage
from xcoll.planner import plan
from xcoll.policy import Choice, Policy
from xcoll.roundoff import error_bound
from xcoll.topology import Topology

MIB = 2**20
MS = 10**9  # picoseconds in a millisecond
NATIVE = Choice("native")


def request(num_bytes, sizes, collective="all_reduce", op="sum", dtype="float32", itemsize=4):
    names = ("host", "device") if len(sizes) == 2 else ("device",)
    shapes = ((num_bytes // itemsize,),)
    return Request(collective, op, names, sizes, dtype, itemsize, shapes)


# Two hosts of four devices (and four of two), jax 0.12.0.1 over Gloo, 16 MiB of float32 a device;
# medians over all ranks, in milliseconds. Measured on real TCP between network namespaces whose
# links a token bucket limits: native psum over both axes, and reduce-scatter(device),
# psum(host), all-gather(device).
MEASURED = [
    ("50Mbit", (2, 4), 4960, 2917),
    ("200Mbit", (2, 4), 1258, 743),
    ("1Gbit", (2, 4), 260, 194),
    ("200Mbit", (4, 2), 1245, 1092),
]


@pytest.mark.parametrize(("rate", "sizes", "native_ms", "hierarchical_ms"), MEASURED)
def test_prices_are_within_15_percent_of_measurements(rate, sizes, native_ms, hierarchical_ms):
    topology = Topology.parse(
        f"{sizes[0]}*cpu:{sizes[1]}@{rate}", axes={"host": sizes[0], "device": sizes[1]}
    )
    made = plan(request(16 * MIB, sizes), topology, Policy(algorithm="hierarchical"))
    assert made.native_time_ps / MS == pytest.approx(native_ms, rel=0.15)
    assert made.predicted_time_ps / MS == pytest.approx(hierarchical_ms, rel=0.15)


def test_a_swap_between_hosts_is_half_duplex_as_measured():
    topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
    alone = Request("all_reduce", "sum", ("host",), (2,), "float32", 4, ((MIB,),))
    made = plan(alone, topology, Policy(algorithm="recursive_doubling"))
    # Measured: up to 1384 ms, where the exchange between hosts is one permute [(0, 1), (1, 0)].
    assert made.predicted_time_ps / MS == pytest.approx(1384, rel=0.15)


def test_hosts_that_swap_take_turns_as_measured():
    topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
    choice = Choice("hierarchical", (), (NATIVE, Choice("recursive_doubling")))
    made = plan(request(16 * MIB, (2, 4)), topology, Policy(algorithm=choice))
    # Measured: 770 ms with two permutes, each by half of the devices each way; 1410 ms with one.
    assert made.predicted_time_ps / MS == pytest.approx(770, rel=0.15)


def test_small_payloads_over_four_hosts_as_measured():
    topology = Topology.parse("4*cpu:2@200Mbit", axes={"host": 4, "device": 2})

    def price(num_bytes, name):
        policy = Policy(algorithm=name)
        return plan(request(num_bytes, (4, 2)), topology, policy).predicted_time_ps / MS

    # Measured at 64 bytes: psum 2.968 ms, recursive doubling 0.747; psum wins from 64 KiB.
    assert price(64, "native") == pytest.approx(2.968, rel=0.15)
    assert price(64, "recursive_doubling") == pytest.approx(0.747, rel=0.25)
    assert price(64 * 1024, "native") < price(64 * 1024, "recursive_doubling")
    assert price(64 * 1024, "native") < price(64 * 1024, "tree")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        # Pod figures of the Cloud TPU documentation for an all-reduce over 4096 chips (v4) and 256.
        ("v4:16x16x16", 1.1e15),
        ("v5e:16x16", 51.2e12),
        ("v6e:16x16", 102.4e12),
    ],
)
def test_all_reduce_of_a_pod_against_the_published_figure(text, bytes_per_s):
    topology = Topology.parse(text)
    num_bytes = 2**30
    ranks = math.prod(topology.axis_sizes.values())
    digits = span_digits(topology, Span(tuple(topology.axis_sizes), ranks))
    seconds = native_ps(topology.device, digits, "all_reduce", num_bytes) / 1e12
    # Bytes that all chips send in that time: each of them twice its payload.
    assert 2 * num_bytes * ranks / seconds == pytest.approx(bytes_per_s, rel=0.15)


def test_native_on_a_torus_by_the_textbook():
    # All-gather over k wrapping axes: bytes / (both-way bandwidth * k); all-reduce twice that;
    # all-to-all a quarter, of the array over all devices ("How to Scale Your Model", sharding).
    topology = Topology.parse("v5e:16x16")
    whole = 2**30

    def seconds(axes, ranks, collective, operand):
        digits = span_digits(topology, Span(axes, ranks))
        return native_ps(topology.device, digits, collective, operand) / 1e12

    both_ways = 2 * 4.5e10
    one = seconds(("x",), 16, "all_gather", whole // 16)
    two = seconds(("x", "y"), 256, "all_gather", whole // 256)
    assert one == pytest.approx(whole / both_ways, rel=0.1)
    assert two == pytest.approx(whole / (2 * both_ways), rel=0.1)
    assert seconds(("x",), 16, "reduce_scatter", whole) == pytest.approx(one, rel=0.01)
    assert seconds(("x",), 16, "all_reduce", whole) == pytest.approx(2 * one, rel=0.01)
    quarter = seconds(("x",), 16, "all_to_all", whole // 16)
    assert quarter == pytest.approx(whole / both_ways / 4, rel=0.1)


def test_native_over_slices_is_scatter_between_gather():
    topology = Topology.parse("2*v5e:16x16", axes={"slice": 2, "chip": 256})
    digits = span_digits(topology, Span(("slice", "chip"), 512))
    both = native_ps(topology.device, digits, "all_reduce", 2**30) / 1e12
    inside = 2 * 2**30 * 255 / 256 / (4 * 4.5e10)
    between = 2 * (2**30 / 256) / 2 / 3.125e9
    assert both == pytest.approx(inside + between, rel=0.05)


def test_native_in_an_nvlink_node():
    topology = Topology.parse("h100:8")
    digits = span_digits(topology, Span(("device",), 8))
    seconds = native_ps(topology.device, digits, "all_reduce", 2**30) / 1e12
    # nccl-tests: about 480 GB/s of bus bandwidth with NVLS, busbw = 2 (n - 1) / n * bytes / time.
    assert 2 * 7 / 8 * 2**30 / seconds == pytest.approx(480e9, rel=0.1)
    launch = 100 * 10**6
    # Small all-reduces are one hop in XLA's own kernel; a gather is NCCL's ring, LL: 6.6 + 7 * 0.6.
    small = native_ps(topology.device, digits, "all_reduce", 8)
    assert small - launch == pytest.approx(3.4 * 10**6, rel=0.001)
    gather = native_ps(topology.device, digits, "all_gather", 8)
    assert gather - launch == pytest.approx(10.8 * 10**6, rel=0.001)


def test_nccl_over_four_nodes():
    topology = Topology.parse("4*h100:8", axes={"i": 32})
    digits = span_digits(topology, Span(("i",), 32))
    small = native_ps(topology.device, digits, "all_reduce", 8) - 100 * 10**6
    # The tree, LL: 6.8 + 2 * (7 * 0.6 + log2(4) * 5).
    assert small == pytest.approx((6.8 + 2 * (4.2 + 10)) * 10**6, rel=0.001)
    large = native_ps(topology.device, digits, "all_reduce", 2**32) / 1e12
    assert large == pytest.approx(2 * 31 / 32 * 2**32 / 370e9, rel=0.05)


def test_one_host_never_gains():
    for ranks in (2, 3, 4, 8):
        topology = Topology.parse(f"cpu:{ranks}")
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            for num_bytes in (32 * ranks, 1024 * ranks, MIB * ranks, 16 * MIB * ranks):
                op = "sum" if "reduce" in collective else "none"
                wanted = request(num_bytes, (ranks,), collective, op)
                assert plan(wanted, topology, Policy()).is_native, wanted


def test_slowest_host_bounds():
    even = Topology.parse("2*cpu:4@50Mbit", axes={"host": 2, "device": 4})
    uneven = Topology.parse("2*cpu:4@50Mbit,1Gbit", axes={"host": 2, "device": 4})
    wanted = request(16 * MIB, (2, 4))
    assert (
        plan(wanted, even, Policy()).native_time_ps == plan(wanted, uneven, Policy()).native_time_ps
    )


def test_where_few_devices_send_a_step_starts_sooner():
    topology = networks.hosts(2, 4, "cpu")

    def price(name, collective="all_reduce", **device):
        changed = replace(topology, device=replace(topology.device, **device))
        stage = Stage(collective, Span(("x",), 8), Choice(name))
        return Pricer(changed, 4).stage_ps(stage, Operand(1, 1))

    def saved(name, collective="all_reduce"):
        step = {"step_ps": 8000}
        return price(name, collective, **step) - price(name, collective, **step, lone_step_ps=800)

    # Of 8 devices 4 send, then 2, then 1; and back: a half, a quarter, an eighth of the rest.
    steps = [800 + 7200 // senders for senders in (2, 4, 8)]
    assert saved("tree") == 2 * sum(8000 - step for step in steps)
    assert saved("tree", "broadcast") == sum(8000 - step for step in steps)
    assert saved("recursive_doubling") == saved("ring") == 0
    assert price("tree", step_ps=800, lone_step_ps=8000) == price("tree", step_ps=800)


def test_operands_are_cut_and_padded_as_the_lowering_does():
    inner, outer = Span(("device",), 4), Span(("host",), 2)
    stages = [
        Stage("reduce_scatter", inner, NATIVE),
        Stage("all_reduce", outer, Choice("ring")),
        Stage("all_gather", inner, NATIVE),
    ]
    # 10,000 elements in 4 slots: 2500 rounded up to rows of 128 is 2560; the share in 2 slots:
    # 1280 each; the gather takes the share as it is.
    assert operands("all_reduce", stages, 10_000) == [
        Operand(10_000, 2560),
        Operand(2560, 1280),
        Operand(2560, 2560),
    ]
    # A reduce-scatter of 12 rows of 10 elements by digits: no row is padded into the next.
    stages = [Stage("reduce_scatter", inner, NATIVE), Stage("reduce_scatter", outer, NATIVE)]
    assert operands("reduce_scatter", stages, 80) == [Operand(80, 20), Operand(20, 10)]
    stages = [Stage("all_gather", outer, NATIVE), Stage("all_gather", inner, NATIVE)]
    assert operands("all_gather", stages, 10) == [Operand(10, 10), Operand(20, 20)]


def test_packing_costs_two_passes():
    topology = Topology.parse("cpu:8")
    assert packing_ps(topology.device, topology.device.copy_bytes_per_s) == 2 * 10**12


# Operations and bytes, by hand, for 2 hosts of 4 devices and 8192 float32 a rank (32,768 bytes).
N = 32_768
BOTH = ("host", "device")
BY_HAND = [
    ("all_reduce", "native", [("all-reduce", BOTH, N, 1)], (2 * 7 * N // 8,) * 2),
    # Ranks 3 and 7 send everything to the other host; all others to a neighbour.
    ("all_reduce", "ring", [("collective-permute", BOTH, N // 8, 14)], (14 * N // 8,) * 2),
    (
        "all_reduce",
        "hierarchical",
        [
            ("reduce-scatter", ("device",), N, 1),
            ("all-reduce", ("host",), N // 4, 1),
            ("all-gather", ("device",), N // 4, 1),
        ],
        (N // 4, 3 * N // 4 + 3 * N // 4),
    ),
    # Partners at distance 1 and 2 are in the same host, at distance 4 in the other.
    (
        "all_reduce",
        "recursive_doubling",
        [("collective-permute", ("device",), N, 2), ("collective-permute", ("host",), N, 1)],
        (N, 2 * N),
    ),
    (
        "all_reduce",
        "direct",
        [("all-to-all", BOTH, N, 1), ("all-gather", BOTH, N // 8, 1)],
        # All-to-all: 4 of 8 shares leave the host, 6 of 8 change device; all-gather: as a ring.
        (4 * N // 8 + 7 * N // 8, 6 * N // 8 + 7 * N // 8),
    ),
    ("reduce_scatter", "ring", [("collective-permute", BOTH, N // 8, 7)], (7 * N // 8,) * 2),
    (
        "reduce_scatter",
        "hierarchical",
        [("reduce-scatter", ("device",), N, 1), ("reduce-scatter", ("host",), N // 4, 1)],
        (N // 8, 3 * N // 4),
    ),
    (
        "all_gather",
        "hierarchical",
        [("all-gather", ("host",), N, 1), ("all-gather", ("device",), 2 * N, 1)],
        (N, 6 * N),
    ),
    (
        "all_to_all",
        "hierarchical",
        [("all-to-all", ("device",), N, 1), ("all-to-all", ("host",), N, 1)],
        (N // 2, 3 * N // 4),
    ),
    ("broadcast", "native", [("all-reduce", BOTH, N, 1)], (14 * N // 8,) * 2),
    # Binomial, root 0: to 4, then to 2 and 6, then to the odd ones: rank 0 sends once to the other
    # host and twice inside its own.
    (
        "broadcast",
        "tree",
        [("collective-permute", ("host",), N, 1), ("collective-permute", ("device",), N, 2)],
        (N, 2 * N),
    ),
]


@pytest.mark.parametrize(("collective", "name", "expected", "sent"), BY_HAND)
def test_operations_and_bytes_by_hand(collective, name, expected, sent):
    topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
    op = "sum" if "reduce" in collective else "none"
    made = plan(request(N, (2, 4), collective, op), topology, Policy(algorithm=name))
    assert made.operations == tuple(Operation(*e) for e in expected)
    assert made.wire_bytes == (("host", sent[0]), ("device", sent[1]))


def test_what_cpus_carry_wider():
    # XLA:CPU carries bfloat16 as float32 in its own collectives; what only moves inside a plan
    # keeps its width.
    topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
    wanted = request(N, (2, 4), dtype="bfloat16", itemsize=2)

    def sizes(name):
        made = plan(wanted, topology, Policy(algorithm=name))
        return [(op.kind, op.operand_bytes) for op in made.operations]

    assert sizes("native") == [("all-reduce", 2 * N)]
    assert sizes("ring") == [("collective-permute", N // 8)]
    assert sizes("hierarchical") == [
        ("reduce-scatter", 2 * N),
        ("all-reduce", N // 2),
        ("all-gather", N // 4),
    ]
    made = plan(replace(wanted, platform="tpu"), topology, Policy(algorithm="native"))
    assert made.operations[0].operand_bytes == N


def test_native_groups_list_each_operand():
    shapes = ((4, 2), (), (8,), (3, 0))
    wanted = Request("all_reduce", "sum", ("i",), (4,), "float32", 4, shapes)
    stages = (Stage("all_reduce", Span(("i",), 4), NATIVE),)
    assert operations(wanted, stages) == (
        Operation("all-reduce", ("i",), 32, 2),
        Operation("all-reduce", ("i",), 4, 1),
    )
    assert wire_bytes(wanted, stages) == (("i", 2 * (2 * 3 * 32 // 4) + 2 * 3 * 4 // 4),)


# Over two slices of four: an all-reduce is cut so that only the shares go between slices.
# collective, dtype, shape, operations (bytes as parts of the operand N), bytes over a and b
SLICED = [
    (
        "all_reduce",
        "float32",
        [("reduce-scatter", "b", 1), ("all-reduce", "a", 1 / 4), ("all-gather", "b", 1 / 4)],
        (1 / 4, 3 / 4 + 3 / 4),
    ),
    (
        "all_reduce",
        "int32",
        [("all-reduce", "b", 1), ("all-reduce", "a", 1 / 4), ("all-gather", "b", 1 / 4)],
        (1 / 4, 6 / 4 + 3 / 4),
    ),
    (
        "reduce_scatter",
        "float32",
        [("all-reduce", "b", 1), ("reduce-scatter", "a", 1 / 4)],
        (1 / 8, 6 / 4),
    ),
    ("all_gather", "float32", [("all-gather", "a", 1), ("all-gather", "b", 2)], (1, 3 * 2)),
    ("all_to_all", "float32", [("all-to-all", "ab", 1)], (4 / 8, 6 / 8)),
]


@pytest.mark.parametrize(("collective", "dtype", "expected", "sent"), SLICED)
def test_native_collectives_over_several_tpu_slices(monkeypatch, collective, dtype, expected, sent):
    topology = Topology.parse("2*v5e:2x2", axes={"a": 2, "b": 4})
    wanted = Request(
        collective, "sum", ("a", "b"), (2, 4), dtype, 4, ((1024, 128),), platform="tpu"
    )
    num_bytes = 4 * 1024 * 128
    made = plan(wanted, topology, Policy(algorithm="native"))
    assert made.operations == tuple(
        Operation(kind, tuple(axes), int(part * num_bytes), 1) for kind, axes, part in expected
    )
    assert made.wire_bytes == (("a", sent[0] * num_bytes), ("b", sent[1] * num_bytes))
    # Where the slices are not known, it is one ring over all.
    (flat,) = operations(wanted, made.stages)
    assert flat.axes == ("a", "b") and flat.operand_bytes == num_bytes
    # Beyond 64 ranks, by formula.
    monkeypatch.setattr("xcoll.accounting.EXACT_MAX_RANKS", 1)
    assert wire_bytes(wanted, made.stages, topology) == made.wire_bytes


def test_slices_inside_an_axis_or_numbered_fastest():
    wanted = Request(
        "reduce_scatter", "sum", ("a",), (8,), "float32", 4, ((1024, 128),), platform="tpu"
    )
    num_bytes = 4 * 1024 * 128
    native = Policy(algorithm="native")
    one = plan(wanted, Topology.parse("2*v5e:2x2", axes={"a": 8}), native)
    assert one.wire_bytes == (("a", num_bytes * 6 // 4 + num_bytes // 8),)
    # Then the shares inside a slice lie together, and are scattered there.
    swapped = replace(wanted, axes=("b", "a"), axis_sizes=(4, 2))
    made = plan(swapped, Topology.parse("2*v5e:2x2", axes={"a": 2, "b": 4}), native)
    assert [(o.kind, o.axes) for o in made.operations] == [
        ("reduce-scatter", ("b",)),
        ("reduce-scatter", ("a",)),
    ]
    assert made.wire_bytes == (("b", num_bytes * 3 // 4), ("a", num_bytes // 8))
    # Four slices over both axes: the exchange goes over both.
    four = plan(
        replace(wanted, axes=("a", "b"), axis_sizes=(2, 8), collective="all_reduce"),
        Topology.parse("4*v5e:2x2", axes={"a": 2, "b": 8}),
        native,
    )
    assert [o.axes for o in four.operations] == [("b",), ("a", "b"), ("b",)]
    # Each sends 2 * 3/4 of a quarter to the next slice, which differs in b at every step.
    assert four.wire_bytes == (
        ("a", num_bytes * 3 // 8),
        ("b", num_bytes * 6 // 4 + num_bytes * 3 // 8),
    )


def test_a_reduce_scatter_over_slices_is_priced_as_the_all_reduce_inside_that_it_is():
    topology = Topology.parse("2*v5e:4x4", axes={"a": 2, "b": 16})
    wanted = Request(
        "reduce_scatter", "sum", ("a", "b"), (2, 16), "float32", 4, ((2**24,),), platform="tpu"
    )
    made = plan(wanted, topology, Policy())
    # So the two levels by themselves, which send half of that inside, are worth it.
    assert made.name == "hierarchical(native, native)"
    inside = native_ps(topology.device, topology.digits(("b",)), "all_reduce", 2**26)
    across = native_ps(topology.device, topology.digits(("a",)), "reduce_scatter", 2**26 // 16)
    assert made.native_time_ps == inside + across - topology.device.step_ps
    # Slices that vary fastest leave the shares together: nothing is undone, nothing to gain.
    swapped = replace(wanted, axes=("b", "a"), axis_sizes=(16, 2))
    assert plan(swapped, topology, Policy()).is_native


def test_small_all_reduces_over_slices_are_not_cut():
    topology = Topology.parse("2*v5e:2x2", axes={"a": 2, "b": 4})
    wanted = Request(
        "all_reduce", "sum", ("a", "b"), (2, 4), "float32", 4, ((1024,),), platform="tpu"
    )
    made = plan(wanted, topology, Policy(algorithm="native"))
    assert made.wire_bytes == (("a", 4096), ("b", 6 * 4096 // 4))


def test_what_accelerators_carry_otherwise():
    wanted = Request("all_reduce", "sum", ("i",), (4,), "int16", 2, ((64,),), platform="gpu")
    stages = (Stage("all_reduce", Span(("i",), 4), NATIVE),)
    assert operations(wanted, stages) == (Operation("all-reduce", ("i",), 256, 1),)
    # A TPU sends the two parts of complex numbers each by itself, and combines all-reduces.
    wanted = Request("all_gather", "none", ("i",), (4,), "complex64", 8, ((64,),), platform="tpu")
    stages = (Stage("all_gather", Span(("i",), 4), NATIVE),)
    assert operations(wanted, stages) == (Operation("all-gather", ("i",), 256, 2),)
    stages = (Stage("all_reduce", Span(("i",), 4), NATIVE),)
    wanted = replace(wanted, collective="all_reduce", op="sum")
    assert operations(wanted, stages) == (Operation("all-reduce", ("i",), 512, 1),)


@pytest.mark.parametrize("size", [60, 64])
@pytest.mark.parametrize("name", ["ring", "bidirectional_ring", "recursive_doubling", "tree"])
def test_beyond_64_ranks_bytes_are_bounds_on_what_is_counted_below(monkeypatch, name, size):
    wanted = Request("all_reduce", "sum", ("a", "b"), (size // 4, 4), "float32", 4, ((size * 64,),))
    stages = (Stage("all_reduce", Span(("a", "b"), size), Choice(name)),)
    counted = wire_bytes(wanted, stages)
    monkeypatch.setattr("xcoll.accounting.EXACT_MAX_RANKS", 1)
    for (axis, exact), (same, bound) in zip(counted, wire_bytes(wanted, stages), strict=True):
        assert axis == same
        assert exact <= bound <= (1 if name == "ring" else 3) * exact


def test_programs_are_written_out_as_the_lowering_does():
    assert UNROLLED_RANKS == UNROLL_MAX_RANKS


def test_ring_programs_do_not_grow():
    def permutes(ranks, name):
        return permutes_in_program([Stage("all_reduce", Span(("i",), ranks), Choice(name))])

    assert permutes(64, "ring") == permutes(131_072, "ring") == 2
    assert permutes(16, "ring") == 30, "written out"
    assert permutes(131_072, "recursive_doubling") == 17
    assert permutes(1024, "tree") == 20


STAGED = [
    ("ring", 8, 7),
    ("native", 8, 7),
    ("direct", 8, 7),
    # Three levels: 3 / (1 - 3 u), rounded up.
    ("recursive_doubling", 8, 4),
    ("halving_doubling", 8, 4),
    ("tree", 8, 4),
    ("tree", 2, 1),
    ("recursive_doubling", 2, 1),
]


@pytest.mark.parametrize(("name", "ranks", "expected"), STAGED)
def test_error_bounds(name, ranks, expected):
    wanted = request(1024, (ranks,))
    stages = (Stage("all_reduce", Span(("device",), ranks), Choice(name)),)
    assert error_bound(wanted, stages) == expected


@pytest.mark.parametrize(
    ("collective", "op", "dtype"),
    [
        ("all_reduce", "max", "float32"),
        ("all_reduce", "sum", "int32"),
        ("all_reduce", "prod", "bool"),
        ("all_gather", "none", "float32"),
    ],
)
def test_nothing_is_rounded(collective, op, dtype):
    wanted = request(1024, (8,), collective, op, dtype)
    assert error_bound(wanted, (Stage(collective, Span(("device",), 8), NATIVE),)) == 0


def test_error_bound_holds_for_trees_of_half_precision_sums():
    # The worst of many sums by a binary tree, in float16 (u = 2**-11), against exact fractions.
    random.seed(0)
    stages = (Stage("all_reduce", Span(("device",), 64), Choice("recursive_doubling")),)
    bound = error_bound(request(128, (64,), dtype="float16", itemsize=2), stages)
    assert bound == 7  # 6 / (1 - 6 / 2048) rounded up
    for _ in range(200):
        terms = [np.float16(random.uniform(-1, 1)) for _ in range(64)]
        level = terms
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
        exact = sum(Fraction(float(t)) for t in terms)
        size = sum(abs(Fraction(float(t))) for t in terms)
        assert abs(Fraction(float(level[0])) - exact) <= Fraction(bound, 2048) * size


def test_products_count_their_factors():
    wanted = request(1024, (8,), op="prod")
    assert error_bound(wanted, (Stage("all_reduce", Span(("device",), 8), Choice("ring")),)) == 8


@pytest.mark.parametrize("text", ["v5p:4x4x4", "4*h100:8", "2*cpu:4@1Gbit"])
def test_every_algorithm_has_a_price_that_grows_with_the_payload(text):
    topology = Topology.parse(text)
    axes = tuple(topology.axis_sizes)
    ranks = math.prod(topology.axis_sizes.values())
    dims = tuple(d.level.size for d in reversed(topology.digits(axes)))
    pricer = Pricer(topology, 4)
    for name, algorithm in ALGORITHMS.items():
        for collective in algorithm.collectives:
            if name == "hierarchical":
                choice = Choice(name, (("num_segments", 2),))
                cut = (ranks // dims[-1], dims[-1])
            else:
                choice, cut = Choice(name), dims if algorithm.needs_dims else ()
            stage = Stage(collective, Span(axes, ranks), choice, cut)
            small, large = (
                pricer.plan_ps(collective, [stage], ranks * n) for n in (1024, 1024 * 1024)
            )
            assert type(small) is int
            assert 0 < small < large
