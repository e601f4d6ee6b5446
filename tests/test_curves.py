"""Measured curves and rates in a topology: how they are read, kept, and priced by; all by hand."""

from dataclasses import replace

import pytest

from xcoll import codecs
from xcoll.algorithms import hierarchical
from xcoll.costmodel import Operand, Pricer
from xcoll.local_work import coding_ps
from xcoll.plan import Request, Span, Stage
from xcoll.planner import plan
from xcoll.policy import Choice, Policy
from xcoll.topology import CodecRate, Curve, Topology

NATIVE = Choice("native")
KIB, MIB = 1024, 1024**2
AXES = {"host": 2, "device": 4}
HOSTS = Topology.parse("2*cpu:4@200Mbit", axes=AXES)


def curve(*points, collective="all_reduce", axes=("host", "device")):
    return Curve(collective=collective, axes=axes, points=points)


@pytest.mark.parametrize(
    ("num_bytes", "time_ps"),
    [
        (0, 1000),
        (1024, 1000),
        (1536, 1500),  # half of the way from 1000 to 2000
        (2048, 2000),
        (2049, 2001),  # a 6144th of 4000 is rounded up
        (5120, 4000),
        (8192, 6000),
        (14336, 10000),  # as far again as from the second to the last
    ],
)
def test_between_points_and_beyond(num_bytes, time_ps):
    found = curve((1024, 1000), (2048, 2000), (8192, 6000)).time_ps(num_bytes)
    assert found == time_ps
    assert type(found) is int


def request(num_bytes, collective="all_reduce"):
    op = "sum" if collective in ("all_reduce", "reduce_scatter") else "none"
    shapes = ((num_bytes // 4,),)
    return Request(collective, op, tuple(AXES), tuple(AXES.values()), "float32", 4, shapes)


def test_native_is_priced_by_its_curve():
    measured = replace(HOSTS, measured=(curve((KIB, 3 * 10**9), (65 * KIB, 11 * 10**9)),))
    made = plan(request(33 * KIB), measured, Policy(algorithm="native"))
    assert made.native_time_ps == made.predicted_time_ps == 7 * 10**9
    # Other collectives, and other axes, by the links, as without the curve.
    other = plan(request(64 * KIB, "all_gather"), measured, Policy(algorithm="native"))
    assert (
        other.native_time_ps
        == plan(request(64 * KIB, "all_gather"), HOSTS, Policy()).native_time_ps
    )


def test_far_beyond_its_points_a_curve_goes_on_at_the_rate_of_the_links():
    # Two small points that lie level, as noise leaves them: the line through them would stay there.
    flat = curve((KIB, 10**9), (2 * KIB, 10**9))
    topology = replace(HOSTS, measured=(flat,))
    request = Request("all_reduce", "sum", ("host", "device"), (2, 4), "float32", 4, ((2**22,),))
    made = plan(request, topology, Policy())
    # In a ring of 8, 14 shares of 2 MiB cross a link of 200 Mbit/s; TCP leaves 1448 / 1514 of it.
    at_least = 14 * 2**21 * 8 / 200e6 * 1514 / 1448
    assert at_least <= made.native_time_ps / 1e12 <= 1.2 * at_least


@pytest.mark.parametrize(
    ("percent", "corrected"), [(60, 60), (100, 100), (150, 150), (20, 50), (300, 200)]
)
def test_far_beyond_its_points_a_curve_goes_on_as_it_grew_between_them(percent, corrected):
    """By how far off the links' rate was between the last two; twice or half at the most."""

    def price(topology, num_bytes):
        return plan(request(num_bytes), topology, Policy(algorithm="native")).native_time_ps

    small, large, far = 256 * KIB, KIB * KIB, 16 * KIB * KIB
    by_links = {size: price(HOSTS, size) for size in (small, large, far)}
    grown = (by_links[large] - by_links[small]) * percent // 100
    points = (small, grown // 3), (large, grown // 3 + grown)
    found = price(replace(HOSTS, measured=(curve(*points),)), far)
    expected = points[1][1] + (by_links[far] - by_links[large]) * corrected // 100
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("percent", "corrected"), [(60, 100), (100, 100), (150, 150)])
def test_as_a_stage_native_does_not_grow_less_than_the_links_say(percent, corrected):
    """Devices come from the stage before at the same time, and may get in each other's way."""
    stage = Stage("all_to_all", Span(("host",), 2), NATIVE)

    def price(topology, num_bytes):
        return Pricer(topology, 4).stage_ps(stage, Operand(num_bytes // 4, num_bytes // 8))

    small, large, far = 256 * KIB, KIB * KIB, 16 * KIB * KIB
    by_links = {size: price(HOSTS, size) for size in (small, large, far)}
    grown = (by_links[large] - by_links[small]) * percent // 100
    points = (small, grown // 3), (large, grown // 3 + grown)
    measured = curve(*points, collective="all_to_all", axes=("host",))
    found = price(replace(HOSTS, measured=(measured,)), far)
    expected = points[1][1] + (by_links[far] - by_links[large]) * corrected // 100
    assert found == pytest.approx(expected, rel=1e-6)


def test_what_takes_no_time_at_all_is_kept():
    over = [("all_reduce", tuple(AXES)), ("all_reduce", ("host",))]
    over += [("reduce_scatter", ("device",)), ("all_gather", ("device",))]
    free = [curve((0, 0), (KIB**3, 0), collective=c, axes=axes) for c, axes in over]
    made = plan(request(8 * KIB), replace(HOSTS, measured=tuple(free)), Policy())
    assert made.is_native and made.native_time_ps == 0
    assert made.reason.endswith("is predicted not faster; 10 % are needed")


def test_stages_are_priced_by_theirs():
    points = {
        "reduce_scatter": ((KIB, 100), (1025 * KIB, 1124)),
        "all_gather": ((KIB, 500), (257 * KIB, 756)),
    }
    curves = [curve(*p, collective=c, axes=("device",)) for c, p in points.items()]
    curves.append(curve((KIB, 10_000), (257 * KIB, 20_000), axes=("host",)))
    measured = replace(HOSTS, measured=tuple(curves))
    hierarchical = plan(request(KIB * KIB), measured, Policy(algorithm="hierarchical"))
    assert hierarchical.name == "hierarchical(native, native)"
    # 1 MiB enters; a quarter, 256 KiB, goes between hosts, and enters the gather: 1 KiB before the
    # last point of each curve, of 1, 39.0625 and 1 a KiB.
    by_hand = (1124 - 1) + (20_000 - 39) + (756 - 1)
    assert hierarchical.predicted_time_ps == by_hand


def test_part_of_an_axis_is_no_whole_axis():
    flat = Topology.parse("2*cpu:4@200Mbit", axes={"all": 8})
    measured = replace(flat, measured=(curve((KIB, 1), (2 * KIB, 2), axes=("all",)),))
    inner = Stage("all_reduce", Span(("all",), 4, 1), NATIVE)
    operand = Operand(1024, 1024)
    assert Pricer(measured, 4).stage_ps(inner, operand) == Pricer(flat, 4).stage_ps(inner, operand)
    whole = Stage("all_reduce", Span(("all",), 8, 1), NATIVE)
    assert Pricer(measured, 4).stage_ps(whole, Operand(256, 256)) == 1


def test_axes_in_any_order_and_those_of_one_position_aside():
    sizes = {"pod": 1, "host": 2, "device": 4}
    topology = Topology.parse("2*cpu:4@200Mbit", axes=sizes)
    measured = replace(topology, measured=(curve((1, 1), (2, 2)),))
    for axes in (("host", "device"), ("device", "host"), ("pod", "host", "device")):
        assert measured.curve("all_reduce", axes) == measured.measured[0]
    assert measured.curve("all_reduce", ("host",)) is None
    assert measured.curve("all_gather", ("host", "device")) is None
    over_all = replace(measured, measured=(curve((1, 1), (2, 2), axes=tuple(sizes)),))
    assert over_all.curve("all_reduce", ("host", "device")) is not None


def test_what_is_measured_twice_or_over_no_axis_is_refused():
    with pytest.raises(ValueError, match="twice; keep one"):
        both = curve((1, 1), (2, 2)), curve((1, 2), (2, 3), axes=("device", "host"))
        replace(HOSTS, measured=both)
    with pytest.raises(ValueError, match="Did you mean 'host'"):
        replace(HOSTS, measured=(curve((1, 1), (2, 2), axes=("hots",)),))


def test_json_and_fingerprint_hold_what_was_measured():
    rate = CodecRate(codec="int8", encode_bytes_per_s=10**9, decode_bytes_per_s=2 * 10**9)
    device = replace(HOSTS.device, codec_rates=(rate,), overlap_percent=90)
    measured = replace(HOSTS, device=device, measured=(curve((1, 1), (2, 2)),))
    assert Topology.from_json(measured.to_json()) == measured
    assert len({HOSTS.fingerprint, measured.fingerprint}) == 2
    other = replace(measured, measured=(curve((1, 1), (2, 3)),))
    assert other.fingerprint != measured.fingerprint
    # What it is called makes no difference to any plan.
    assert replace(measured, name="mine").fingerprint == measured.fingerprint
    assert "measured: XLA's own collectives over host and device" in str(measured)


def test_swaps_by_the_link():
    def swapped(percent, unlike):
        host, device = HOSTS.axes
        (level,) = host.levels
        link = replace(level.link, swap_percent=percent, unlike_percent=unlike)
        host = replace(host, levels=(replace(level, link=link),))
        topology = replace(HOSTS, axes=(host, device))
        stage = Stage("all_reduce", Span(("host",), 2, 1), Choice("recursive_doubling"))
        return Pricer(topology, 4).stage_ps(stage, Operand(2**20, 2**20))

    # Four devices, 4 MiB each, over an uplink of 200 Mbit/s in frames of 1448 bytes out of 1514.
    wire = 4 * 2**22 / (25e6 * 1448 / 1514) * 10**12
    assert swapped(200, 100) - swapped(100, 100) == pytest.approx(wire, rel=1e-6)
    assert swapped(200, 150) == swapped(200, 100)


def test_codecs_by_their_rates():
    plain = HOSTS.device
    # Two passes to encode and one to decode, at 4,194,304,000 bytes a second.
    assert coding_ps(plain, codecs.int8(), 2**20, 2**22) == 6 * 2**20 * 10**12 // 4_194_304_000
    rates = tuple(
        CodecRate(codec=name, encode_bytes_per_s=encode, decode_bytes_per_s=decode)
        for name, encode, decode in [("int8", 10**9, 2 * 10**9), ("int4", 10**8, 10**9)]
    )
    device = replace(plain, codec_rates=rates)
    assert coding_ps(device, codecs.int8(), 10**6, 10**6) == 10**9 + 5 * 10**8
    assert coding_ps(device, codecs.int4(block=32), 10**6, 10**6) == 10**10 + 10**9
    cast = codecs.cast("bfloat16")
    assert coding_ps(device, cast, 10**6, 10**6) == coding_ps(plain, cast, 10**6, 10**6)
    named = CodecRate(codec="cast(bfloat16)", encode_bytes_per_s=10**9, decode_bytes_per_s=10**9)
    assert coding_ps(replace(plain, codec_rates=(named,)), cast, 10**6, 10**6) == 2 * 10**9


@pytest.mark.parametrize("policy", [Policy(), Policy(codec={"host": "int8"})])
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_beaten_plan_says_by_how_much_it_had_to_be_faster(is_measured, policy):
    """10 %, 50 % of a start; where prices are measured, 2 % between decompositions."""
    # As long as the link takes: what is not native is priced by the topology's links.
    curves = (curve((KIB, 10**9), (64 * KIB * KIB, 10**13)),)
    topology = replace(HOSTS, measured=curves) if is_measured else HOSTS
    seen = set()
    for shift in range(4, 25):
        made = plan(request(4 << shift), topology, policy)
        for beaten in made.candidates:
            if beaten.predicted_time_ps is None or "too" in beaten.reason:
                continue
            ratio = beaten.predicted_time_ps / made.predicted_time_ps
            if ratio >= 1:
                assert beaten.reason.startswith("predicted"), beaten
                continue
            percents = [n for n in (2, 10, 50) if f"by less than {n} %" in beaten.reason]
            assert len(percents) == 1, beaten
            assert ratio > 1 - percents[0] / 100
            seen.add(percents[0])
    assert seen == ({2, 50} if is_measured else {10})


@pytest.mark.parametrize(
    ("percent", "start_percent", "is_native"),
    [(125, 30, False), (125, 40, True), (105, 30, True), (250, 40, False)],
)
def test_what_is_by_a_third_the_start_has_to_be_twice_as_fast(percent, start_percent, is_native):
    """Native takes ``percent`` of the best decomposition, ``start_percent`` of it for 1 KiB."""
    asked = request(64 * KIB)

    def planned(native_ps, start_ps):
        points = (KIB, start_ps), (64 * KIB, native_ps)
        return plan(asked, replace(HOSTS, measured=(curve(*points),)), Policy())

    best_ps = planned(10**13, 10**12).predicted_time_ps
    native_ps = best_ps * percent // 100
    made = planned(native_ps, native_ps * start_percent // 100)
    assert made.is_native == is_native
    if is_native:
        assert f"{50 if start_percent == 40 else 10} % are needed" in made.reason


# What large results take beyond the rates.

FRESH = replace(HOSTS, device=replace(HOSTS.device, fresh_points=((MIB, 0), (3 * MIB, 2 * 10**12))))
"""Of each byte beyond 1 MiB, a second for a MiB."""


@pytest.mark.parametrize(
    ("collective", "num_bytes", "flat_s", "levels_s"),
    [
        ("all_gather", MIB // 4, 2, 1),  # 2 MiB on 8 devices, 1/2 MiB over the hosts
        ("all_to_all", 2 * MIB, 2, 2),
        ("all_reduce", 3 * MIB, 4, 2),  # of the hosts' stage 3/4 MiB
        ("reduce_scatter", 8 * MIB, 0, 0),  # 1 MiB
    ],
)
def test_results_are_given_their_memory(collective, num_bytes, flat_s, levels_s):
    """Those of the plan, and of its stages that are not native."""
    name = "bruck" if collective == "all_to_all" else "ring"
    for choice, result_s in ((name, flat_s), (hierarchical("native", name), levels_s)):
        before, after = (
            plan(request(num_bytes, collective), topology, Policy(algorithm=choice))
            for topology in (HOSTS, FRESH)
        )
        assert after.predicted_time_ps == before.predicted_time_ps + result_s * 10**12
        assert after.native_time_ps == before.native_time_ps, "it is priced at its best"


def test_native_as_a_stage_is_given_memory_beyond_its_curve():
    # Of its curve's last size, 2 MiB, one is in the curve; of 3 MiB one more is added, and of
    # the other stage's result and of the plan's two each.
    points = curve((KIB, 10**9), (2 * MIB, 2 * 10**9), collective="all_to_all", axes=("device",))
    choice = hierarchical("native", "pairwise")
    before, after = (
        plan(
            request(3 * MIB, "all_to_all"),
            replace(topology, measured=(points,)),
            Policy(algorithm=choice),
        )
        for topology in (HOSTS, FRESH)
    )
    assert after.predicted_time_ps == before.predicted_time_ps + (1 + 2 + 2) * 10**12


def test_a_payload_of_whole_blocks_is_not_packed():
    def priced(num_bytes):
        int8 = Policy(algorithm="ring", codec="int8", min_bytes=0)
        made = plan(request(num_bytes), HOSTS, int8)
        stages = Pricer(HOSTS, 4).plan_ps("all_reduce", made.stages, num_bytes // 4)
        return made.predicted_time_ps - stages

    # int8 encodes blocks of 256 elements, 1 KiB. What is longer is padded, and cut again.
    assert priced(MIB) == 0
    assert priced(MIB + 4) >= 2 * MIB * 10**12 // HOSTS.device.copy_bytes_per_s


@pytest.mark.parametrize(
    ("levels", "is_mixed"),
    [
        (("native", "ring"), True),
        (("ring", "native"), True),
        (("ring", "ring"), False),
        (("native", "native"), False),
        (("direct", "native"), False),
    ],
)
def test_small_permutes_beside_collectives_of_xla_pay_for_a_start(levels, is_mixed):
    policy = Policy(algorithm=hierarchical(*levels))
    before = plan(request(64 * KIB), HOSTS, policy).predicted_time_ps
    for most_ps, is_small in ((9 * 10**9, True), (16 * 10**9, False)):
        points = curve((KIB, 5 * 10**9), (64 * KIB, most_ps))
        after = plan(request(64 * KIB), replace(HOSTS, measured=(points,)), policy)
        more_ps = 5 * 10**9 if is_mixed and is_small else 0
        assert after.predicted_time_ps == before + more_ps
