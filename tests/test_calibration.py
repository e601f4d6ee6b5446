"""Calibration: fits by hand, the time given is kept, profiles are read, or refused with why."""

import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import xcoll
from xcoll.calibration import tuning
from xcoll.calibration.agenda import MOST_ROUNDS, Agenda, Case
from xcoll.calibration.families import SIZES, STARTS, Family, families
from xcoll.calibration.fitting import fit
from xcoll.calibration.lines import line, rising
from xcoll.calibration.programs import Programs
from xcoll.calibration.reading import read_calibration
from xcoll.calibration.result import Sample
from xcoll.calibration.skeletons import skeleton
from xcoll.cli import main
from xcoll.hardware import profiles
from xcoll.topology import Curve, Topology

P = jax.P
HOSTS = Topology.parse("2*cpu:4@1Gbit", axes={"host": 2, "device": 4})
MIB = 2**20


# Fits.


@pytest.mark.parametrize(("intercept", "slope"), [(0.5, 0.25), (0.0, 1.0), (3.0, 0.0)])
def test_lines_through_exact_points(intercept, slope):
    points = [(x, intercept + slope * x) for x in (1, 8, 64, 512)]
    assert line(points) == pytest.approx((intercept, slope), abs=1e-6)


def test_an_outlier_hardly_moves_a_line():
    points = [(x, 1 + 0.5 * x) for x in (1, 2, 4, 8, 16, 32, 64, 128)]
    points[3] = (8, 40.0)
    intercept, slope = line(points)
    assert slope == pytest.approx(0.5, rel=0.1)
    assert intercept == pytest.approx(1, rel=0.3)


def test_no_line_falls_or_starts_below_zero():
    assert line([(1, 2.0), (10, 1.0)])[1] == 0
    intercept, slope = line([(10, 1.0), (20, 4.0)])
    assert intercept == 0 and slope > 0


def test_rising_times_are_pooled():
    assert rising([3.0, 1.0, 2.0, 9.0], [1, 1, 2, 1]) == [2.0, 2.0, 2.0, 9.0]
    assert rising([1.0, 5.0, 3.0], [1, 3, 1]) == [1.0, 4.5, 4.5]


# What is measured.


def test_pairs_of_permutes_between_hosts():
    by_kind = {f.kind: f for f in families(HOSTS) if f.of == "host"}
    assert by_kind["one_way"].pairs == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert by_kind["swap"].pairs == tuple((i, (i + 4) % 8) for i in range(8))
    # Half of each host's devices send, and no pair is another's reverse.
    assert by_kind["unlike"].pairs == ((0, 4), (1, 5), (6, 2), (7, 3))
    assert [by_kind[k].messages for k in ("one_way", "swap", "unlike")] == [4, 4, 2]
    # Chains: of all devices, and of one that sends to another, which sends back.
    assert by_kind["chain"].pairs == by_kind["swap"].pairs
    assert by_kind["lone"].pairs == ((0, 4),)
    (inside,) = (f for f in families(HOSTS) if f.kind == "shift")
    assert inside.pairs == ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4))


def test_every_collective_over_each_axis_and_over_all():
    over = Counter((f.kind, f.axes) for f in families(HOSTS) if f.kind.startswith("all_"))
    axes = [("host",), ("device",), ("host", "device")]
    kinds = ("all_reduce", "all_gather", "all_to_all")
    assert over == Counter((kind, each) for kind in kinds for each in axes)
    # Over three hosts the hosts' ring sends to the next one, with no swap in it.
    three = Topology.parse("3*cpu:2@1Gbit", axes={"host": 3, "device": 2})
    (unlike,) = (f for f in families(three) if f.kind == "unlike")
    assert unlike.pairs == ((0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1))
    assert unlike.messages == 2


def test_of_three_hosts_all_take_part_in_permutes_one_way():
    three = Topology.parse("3*cpu:2@1Gbit", axes={"host": 3, "device": 2})
    pairs = {k: [f.pairs for f in families(three) if f.kind == k] for k in ("one_way", "swap")}
    forth = [((0, 2), (1, 3)), ((2, 4), (3, 5))]
    assert pairs["one_way"] == forth
    back = [tuple((b, a) for a, b in each) for each in forth]
    assert pairs["swap"] == [there + again for there, again in zip(forth, back, strict=True)]


@pytest.mark.parametrize("sizes", [(3, 1), (5, 1), (2, 3), (3, 7)])
def test_every_family_is_measured_on_any_number_of_devices(sizes):
    hosts, devices = sizes
    topology = Topology.parse(
        f"{hosts}*cpu:{devices}@1Gbit", axes={"host": hosts, "device": devices}
    )
    for family in families(topology):
        found = [n for size in SIZES if (n := family.operand_bytes(size, topology))]
        assert found and all(found), family
        if family.kind in ("reduce_scatter", "all_to_all"):
            ranks = int(np.prod([topology.axis_sizes[axis] for axis in family.axes]))
            assert len(found) == len(SIZES)
            for size, num_bytes in zip(SIZES, found, strict=True):
                assert num_bytes % (4 * ranks) == 0 and size <= num_bytes < size + 4 * ranks


# The time given.


class FakeClock:
    """Seconds that pass where an operation is run."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def play(budget_s, rate_bytes_per_s=25e6, compile_s=0.1, noise=0.3):
    """Follows an agenda as if each operation took its bytes; returns the time, and the cases."""
    clock = FakeClock()
    agenda = Agenda(families(HOSTS), lambda f, n: f.operand_bytes(n, HOSTS), clock, budget_s)
    counts = Counter()
    rng = random.Random(0)
    while (step := agenda.next()) is not None:
        case, calls = step
        assert agenda.case(*agenda.numbers(case, calls)) == step
        wire = 0 if case.family.is_local or "host" not in case.family.axes else case.num_bytes
        call_s = (5e-4 + wire / rate_bytes_per_s) * (1 + noise * rng.random())
        took_s = call_s * calls + 0.003
        if not counts[case]:
            took_s += compile_s + call_s
        clock.now += took_s
        counts[case] += 1
        agenda.record(case, call_s, calls, took_s)
    return clock.now, counts


@pytest.mark.parametrize("budget_s", [5, 20, 60, 300])
def test_the_budget_is_used_and_kept(budget_s):
    took_s, counts = play(budget_s)
    assert took_s < 1.05 * budget_s
    # All is measured once, and some rounds, before the time is over, or all rounds are done.
    assert took_s > 0.7 * budget_s or set(counts.values()) == {MOST_ROUNDS + 1}


def test_more_time_is_more_sizes_and_more_rounds():
    (_, few), (_, many) = play(10), play(200)
    assert len(many) > 1.5 * len(few)
    assert np.median(list(many.values())) > np.median(list(few.values())) >= 1
    assert max(case.num_bytes for case in many) == SIZES[-1]


def test_with_no_time_what_is_needed_is_measured_all_the_same():
    took_s, counts = play(1e-6)
    kinds = Counter(case.family.kind for case in counts)
    assert kinds == {"launch": 1, "chain": 1, "lone": 1, "shift": 2, "one_way": 2, "all_reduce": 2}
    assert took_s < 2


# From samples to a topology.


def sample(kind, num_bytes, time_s, axes=("host",), of="", spread_s=0.0):
    return Sample(
        kind=kind,
        axes=axes,
        of=of,
        num_bytes=num_bytes,
        median_s=time_s,
        spread_s=spread_s,
        count=5,
    )


LAUNCH_S, STEP_S, LATENCY_S = 2e-4, 3e-4, 5e-5
MEMORY, WIRE = 500e6, 20e6  # bytes per second: of a device's memory, of a host's link


def written_samples():
    """Samples as the cost model has them, four devices behind each port."""
    out = [sample("launch", 1024, LAUNCH_S, axes=("host", "device"))]
    for size in (1024, 8192, 65536, 524288, 4 * MIB):
        inside = LAUNCH_S + STEP_S + size / MEMORY
        wire = 4 * size / WIRE
        out.append(sample("shift", size, inside, ("device",), "device"))
        out.append(sample("one_way", size, inside + LATENCY_S + wire, of="host"))
        out.append(sample("swap", size, inside + LATENCY_S + 1.9 * wire, of="host"))
        out.append(sample("unlike", size, inside + LATENCY_S + 1.05 * wire / 2, of="host"))
    both = ("host", "device")
    for size, time_s in ((1024, 3e-3), (MIB, 13e-3), (2 * MIB, 12e-3)):
        out.append(sample("all_reduce", size, LAUNCH_S + time_s, both, spread_s=1e-3))
    out.append(sample("copy", 4 * MIB, LAUNCH_S + 4 * MIB / 2e9, both))
    out.append(sample("sum", 4 * MIB, LAUNCH_S + 4 * MIB / 1e9, both))
    out.append(sample("encode", 4 * MIB, LAUNCH_S + 4 * MIB / 4e8, both, "int8"))
    out.append(sample("decode", 4 * MIB, LAUNCH_S + 4 * MIB / 8e8, both, "int8"))
    out.append(sample("encode", 4 * MIB, LAUNCH_S + 4 * MIB / 1e9, both, "bfloat16"))
    # Of 20 ms of work beside 80 ms on the wire, 15 are hidden.
    for kind, time_s in (("wire", 0.08), ("work", 0.02), ("both", 0.085)):
        out.append(sample(kind, 4 * MIB, LAUNCH_S + time_s))
    return out


def test_terms_are_found_again():
    topology, terms = fit(HOSTS, families(HOSTS), written_samples())
    device, link = topology.device, topology.axes[0].levels[0].link
    assert device.memory_bytes_per_s == pytest.approx(MEMORY, rel=0.02)
    assert device.step_ps == pytest.approx(STEP_S * 1e12, rel=0.05)
    assert link.bandwidth_bytes_per_s == pytest.approx(WIRE, rel=0.02)
    # What 1 KiB takes on the wire, 205 us, is more than the latency: it is found to a part of it.
    assert link.latency_ps / 1e12 == pytest.approx(LATENCY_S, abs=2e-5)
    assert link.swap_percent == pytest.approx(190, abs=3)
    assert link.unlike_percent == pytest.approx(105, abs=3)
    assert device.copy_bytes_per_s == pytest.approx(1e9, rel=1e-6), "the slower of the two"
    assert device.overlap_percent == 75
    (rate,) = device.codec_rates  # of bfloat16 only one way is known
    assert (rate.codec, rate.encode_bytes_per_s) == ("int8", pytest.approx(4e8, rel=1e-6))
    assert rate.decode_bytes_per_s == pytest.approx(8e8, rel=1e-6)
    # Times that fall are pooled: (13 + 12) / 2.
    points = ((1024, 3 * 10**9), (MIB, 12_500_000_000), (2 * MIB, 12_500_000_000))
    both = ("host", "device")
    assert topology.measured == (Curve(collective="all_reduce", axes=both, points=points),)
    by_name = {term.name: term for term in terms}
    assert by_name["host: bandwidth"].error < 0.02
    # The spread of the middle one of three points: 1 ms over 12 ms.
    assert by_name["all_reduce over host, device"].error == pytest.approx(1 / 12, rel=0.01)
    assert set(by_name) >= {"step", "copy", "sum", "encode int8", "host: swap", "host: unlike"}
    assert topology.axis_sizes == HOSTS.axis_sizes


def test_of_pairs_with_unequal_links_the_slowest_counts():
    wire = [s for s in written_samples() if s.kind in ("launch", "shift", "one_way")]
    faster = [replace(s, median_s=s.median_s / 4) for s in wire if s.kind == "one_way"]
    (topology, terms), (same, _) = (
        fit(HOSTS, families(HOSTS), found) for found in ([*faster, *wire], wire)
    )
    assert topology == same
    assert {term.name: term.points for term in terms}["host: bandwidth"] == 5


def test_the_error_of_a_launch_is_its_spread():
    spread = replace(sample("launch", 1024, LAUNCH_S), spread_s=LAUNCH_S / 8)
    _, terms = fit(HOSTS, families(HOSTS), [spread, *written_samples()[1:]])
    assert (terms[0].name, terms[0].error, terms[0].worst) == ("launch", 1 / 8, 1 / 8)


@pytest.mark.parametrize("chain_step_s", [STEP_S / 2, 0.01])
def test_a_step_takes_no_longer_than_a_permute_alone(chain_step_s):
    chain = sample("chain", 1024, LAUNCH_S + 8 * chain_step_s, ("host",), "host")
    topology, _ = fit(HOSTS, families(HOSTS), [*written_samples(), chain])
    # Of the three between hosts, that one way is the middle one.
    alone_s = STEP_S + 1024 / MEMORY + LATENCY_S + 4 * 1024 / WIRE
    assert topology.device.step_ps / 1e12 == pytest.approx(min(chain_step_s, alone_s), rel=1e-6)


@pytest.mark.parametrize("lone_step_s", [STEP_S / 8, 1.0])
def test_a_step_in_which_one_device_sends(lone_step_s):
    lone = sample("lone", 1024, LAUNCH_S + 8 * lone_step_s, ("host",), "host")
    topology, terms = fit(HOSTS, families(HOSTS), [*written_samples(), lone])
    step_ps = topology.device.step_ps
    assert topology.device.lone_step_ps == pytest.approx(min(lone_step_s * 1e12, step_ps), rel=1e-6)
    assert "step in which one device sends" in {term.name for term in terms}
    assert fit(HOSTS, families(HOSTS), written_samples())[0].device.lone_step_ps == 0


def test_hosts_of_one_device_have_a_step_as_measured_too():
    alone = Topology.parse("4*cpu:1@1Gbit", axes={"host": 4, "device": 1})
    between = [sample("launch", 1024, LAUNCH_S, ("host", "device"))]
    between.append(sample("one_way", 1024, LAUNCH_S + 9e-4, ("host",), "host"))
    between.append(sample("chain", 1024, LAUNCH_S + 8 * 5e-4, ("host",), "host"))
    between.append(sample("lone", 1024, LAUNCH_S + 8 * 1e-4, ("host",), "host"))
    device = fit(alone, families(alone), between)[0].device
    assert device.step_ps == pytest.approx(5e8, rel=1e-6)
    assert device.lone_step_ps == pytest.approx(1e8, rel=1e-6)
    assert device.memory_bytes_per_s == alone.device.memory_bytes_per_s
    assert fit(alone, families(alone), [])[0].device.step_ps == alone.device.step_ps


def test_a_chain_of_one_device_brings_a_payload_there_and_back():
    mesh = jax.make_mesh((2, 2), ("host", "device"), devices=jax.devices()[:4])
    lone = Family(kind="lone", axes=("host",), pairs=((0, 2),))
    programs = Programs(mesh)
    value = np.asarray(programs.call(Family(kind="launch", axes=()), 1024)())[:256] - 1
    got = np.asarray(programs.call(lone, 1024)()).reshape(4, 256) / value
    # Each of the two adds what it is sent to what it has, eight times in turns: 2, 3, 5, 8 ...
    assert np.allclose(got, np.array([[55], [1], [34], [1]]), rtol=1e-3)


def test_what_large_results_take_beyond_the_rates():
    samples = written_samples()
    # 16 MiB at the rate of 4 MiB, 64 MiB at half of it.
    for size, rate in ((16 * MIB, 2e9), (64 * MIB, 1e9)):
        samples.append(sample("copy", size, LAUNCH_S + size / rate, ("host", "device")))
    topology, _ = fit(HOSTS, families(HOSTS), samples)
    assert topology.device.copy_bytes_per_s == pytest.approx(1e9, rel=1e-6), "of 4 MiB, the sum's"
    (usual, nothing), (larger, little), (largest, much) = topology.device.fresh_points
    assert (usual, larger, largest) == (4 * MIB, 16 * MIB, 64 * MIB)
    assert nothing == 0
    assert little == pytest.approx(0, abs=10**6)
    assert much == pytest.approx(64 * MIB / 2e9 * 1e12, rel=1e-6)


def test_a_call_of_local_work_takes_its_share_of_the_whole(monkeypatch):
    # Two of three calls are quick, since other processes are waiting: the median would say 10 ms.
    now = FakeClock()
    monkeypatch.setattr(tuning.time, "monotonic", now)

    def call():
        now.now += next(times)

    class Once:
        share_done = 0.0

        def __init__(self, kind):
            self.steps = [(Case(Family(kind=kind, axes=("host",)), 2**22), 3)]

        def next(self):
            return self.steps.pop() if self.steps else None

        def numbers(self, case, calls):
            self.made = case, calls
            return [0]

        def case(self, _):
            return self.made

        def record(self, *_):
            pass

    group = SimpleNamespace(is_first=True, first_says=lambda text: text, wait=lambda: None)
    programs = SimpleNamespace(call=lambda family, num_bytes: call)
    calls_s = []
    for kind in ("decode", "all_reduce"):
        times = iter([0.0, 0.1, 0.01, 0.01])  # the first one is not timed
        ((measured,),) = tuning._measure(programs, Once(kind), group, None).values()
        calls_s.append(measured)
    assert calls_s == [pytest.approx(0.04), pytest.approx(0.01)]


def test_what_is_short_is_measured_more_often():
    _, counts = play(40, rate_bytes_per_s=6e6)
    small = [count for case, count in counts.items() if case.num_bytes <= 2**13]
    large = [
        count
        for case, count in counts.items()
        if case.num_bytes >= 2**20 and "host" in case.family.axes and not case.family.is_local
    ]
    assert min(small) > max(large) >= 2
    # The start of a step and of a program are part of every price.
    starts = [count for case, count in counts.items() if case.family.kind in STARTS]
    assert min(starts) > 2 * np.median(small)


def test_permutes_inside_a_host_are_kept_size_by_size():
    samples = written_samples()
    samples.append(sample("shift", 32 * MIB, LAUNCH_S + STEP_S + 0.2, ("device",), "device"))
    topology, _ = fit(HOSTS, families(HOSTS), samples)
    points = dict(topology.device.permute_points)
    assert points[0] == 0
    assert points[32 * MIB] == pytest.approx(0.2e12, rel=1e-3)
    assert points[4 * MIB] == pytest.approx(4 * MIB / MEMORY * 1e12, rel=0.01)


def test_a_byte_of_a_small_permute_takes_no_longer_than_one_of_a_large_one():
    samples = written_samples()
    samples.append(sample("shift", 65536, LAUNCH_S + STEP_S + 5e-3, ("device",), "device"))
    samples.append(sample("shift", 16 * MIB, LAUNCH_S + STEP_S + 0.064, ("device",), "device"))
    points = dict(fit(HOSTS, families(HOSTS), samples)[0].device.permute_points)
    at_4_mib_ps = points[4 * MIB]
    assert points[65536] == pytest.approx(at_4_mib_ps / 64, rel=1e-3), "not 5 ms"
    assert points[16 * MIB] == pytest.approx(0.064e12, rel=1e-3)


def test_without_time_for_all_the_rest_is_the_tables():
    few = [s for s in written_samples() if s.kind in ("launch", "shift", "one_way")]
    topology, terms = fit(HOSTS, families(HOSTS), few)
    assert topology.measured == () and topology.device.codec_rates == ()
    assert topology.device.copy_bytes_per_s == HOSTS.device.copy_bytes_per_s
    assert topology.device.overlap_percent == HOSTS.device.overlap_percent
    assert topology.axes[0].levels[0].link.swap_percent == 196
    assert Topology.from_json(topology.to_json()) == topology
    assert {term.name for term in terms} >= {"step", "host: bandwidth", "host: latency"}


# On devices.


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device"))


@pytest.fixture(scope="module")
def tuned(mesh, tmp_path_factory):
    """What a calibration of a second found, the seconds it took, and what was told of it."""
    told = []
    start = time.monotonic()
    found = xcoll.tune(
        mesh,
        budget_s=2,
        out=tmp_path_factory.mktemp("profiles") / "four.json",
        progress=lambda share, text: told.append((share, text)),
    )
    return found, time.monotonic() - start, told


def test_tune_keeps_its_budget(tuned):
    # Ignored, it would take minutes: all sizes up to 64 MiB, 15 rounds. Compiling on a loaded
    # machine may take a while longer than was foreseen.
    _, took_s, _ = tuned
    assert took_s < 20


def test_progress_is_told(tuned):
    _, _, told = tuned
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert any("all_reduce over host, device, 1 KiB" in text for _, text in told)


def test_a_profile_is_read_back(tuned, mesh):
    found, _, _ = tuned
    topology = Topology.load(found.path, mesh)
    assert topology == found.topology
    assert topology.name == f"profile four.json {topology.fingerprint}"
    assert topology.axis_sizes == {"host": 2, "device": 2}
    assert topology.curve("all_reduce", ("host", "device")) is not None
    assert topology.device.step_ps > 0
    again = read_calibration(found.path, mesh)
    assert again == found
    assert json.loads(found.to_json())["version"] == profiles.FORMAT
    shown = str(found)
    for name in ("term", "all_reduce over host", "error", "four.json"):
        assert name in shown


def test_reports_say_which_profile_planned(tuned, mesh):
    found, _, _ = tuned
    psum = jax.shard_map(
        lambda x: jax.lax.psum(x, ("host", "device")),
        mesh=mesh,
        in_specs=P(("host", "device")),
        out_specs=P(),
    )
    x = np.ones(4096, np.float32)
    for topology in (found.topology, found.path, f"profile:{found.path}"):
        report = xcoll.explain(psum, x, topology=topology)
        assert f"profile four.json {found.topology.fingerprint}" in str(report)
        curve = found.topology.curve("all_reduce", ("host", "device"))
        assert report.sites[0].plan.native_time_ps == curve.time_ps(4096)
    step = xcoll.optimize(psum, topology=found.path)
    assert float(jax.jit(step)(x)[0]) == 4
    assert "profile four.json" in str(step.reports[-1])


def test_the_default_place_is_the_users_cache(monkeypatch, tmp_path, mesh):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    system = profiles.System.of(mesh)
    assert profiles.default_path(system) == (
        tmp_path / "xcoll" / "profiles" / f"{system.fingerprint}.json"
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profiles.default_path(system).parent == tmp_path / ".cache" / "xcoll" / "profiles"


# What is refused.


def stored(tuned, tmp_path, **changes):
    """A profile with some of its content changed, written as tune writes it."""
    content = json.loads(tuned[0].to_json())
    del content["version"], content["checksum"]
    for path, value in changes.items():
        at = content
        *parents, last = path.split("__")
        for key in parents:
            at = at[key]
        at[last] = value
    path = tmp_path / "changed.json"
    profiles.write(path, profiles.encode(content))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "corrupt: no JSON"),
        (lambda text: "", "corrupt: no JSON"),
        (lambda text: "[" * 100_000, "corrupt: no JSON"),
        (lambda text: text.replace('"took_s": ', '"took_s": 1'), "its checksum does not fit"),
        (lambda text: re.sub(r'"step_ps": \d+', '"step_ps": 1', text), "its checksum does not fit"),
        (lambda text: "[]", "no profile"),
        (lambda text: "{}", "no profile"),
        (lambda text: text.replace('"version": 3', '"version": 2', 1), "version 2 of the format"),
        (lambda text: text.replace('"version": 3', '"version": 3.0', 1), "version 3.0 of the"),
        (lambda text: HOSTS.to_json(), "no profile"),
    ],
)
def test_a_corrupt_profile_is_refused(tuned, mesh, tmp_path, change, says):
    path = tmp_path / "corrupt.json"
    path.write_text(change(tuned[0].to_json()))
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Topology.load(path, mesh)
    assert str(path) in str(caught.value) and "xcoll tune" in str(caught.value)


def test_what_is_no_text_or_not_there(mesh, tmp_path):
    path = tmp_path / "bits.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no text"):
        Topology.load(path, mesh)
    with pytest.raises(FileNotFoundError, match="xcoll tune"):
        Topology.load(tmp_path / "none.json", mesh)
    with pytest.raises(
        OSError, match="Topology.load: can't be read: Is a directory; give the path"
    ):
        Topology.load(tmp_path, mesh)
    with pytest.raises(FileNotFoundError, match="no such profile"):
        xcoll.optimize(lambda x: x, topology=f"profile:{tmp_path / 'none.json'}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"system__jax_version": "0.4.1"}, "measured with jax 0.4.1, and this is"),
        ({"system__device_kind": "TPU v4"}, "of TPU v4 (cpu), the mesh of cpu (cpu)"),
        ({"system__platform": "tpu"}, "of cpu (tpu), the mesh of cpu (cpu)"),
        ({"system__axis_sizes": [4, 1]}, "axes host=4, device=1, the mesh has host=2, device=2"),
        ({"system__axes": ["device", "host"]}, "axes device=2, host=2, the mesh has host=2"),
        ({"system__places": [[0, 0], [0, 1], [1, 0], [1, 1]]}, "of 2 processes, the mesh has 1"),
        ({"system__places": [[0, 1], [0, 0], [0, 2], [0, 3]]}, "in another order"),
        ({"system": 3}, "an object is expected"),
        ({"system__axes": 3}, "a list is expected"),
        ({"system__axes": ["host"]}, "axes ('host',) of sizes (2, 2) and 4 places"),
        ({"system__axis_sizes": []}, "axes ('host', 'device') of sizes () and 4 places"),
        ({"system__places": [[0, 0], [0, 1]]}, "of sizes (2, 2) and 2 places"),
        ({"system__places": [[], [0, 1], [0, 2], [0, 3]]}, "each device a place"),
        ({"topology": json.loads(HOSTS.to_json())}, "does not match the mesh"),
        ({"topology": None}, "not a topology"),
        ({"topology__version": 1}, "not a topology"),
    ],
)
def test_a_foreign_or_older_profile_is_refused(tuned, mesh, tmp_path, changes, says):
    path = stored(tuned, tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Topology.load(path, mesh)
    assert "xcoll tune" in str(caught.value) and str(path) in str(caught.value)


def test_a_profile_of_another_mesh_of_the_same_devices(tuned):
    other = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("all",))
    with pytest.raises(ValueError, match="the mesh has all=4"):
        Topology.load(tuned[0].path, other)
    with pytest.raises(TypeError, match=r"must be a jax\.sharding\.Mesh"):
        Topology.load(tuned[0].path, {"all": 4})


@pytest.mark.parametrize(
    ("budget_s", "error"),
    [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("60s", TypeError)],
)
def test_bad_budgets(mesh, budget_s, error):
    with pytest.raises(error, match="budget_s"):
        xcoll.tune(mesh, budget_s=budget_s)


def test_a_mesh_without_devices_has_no_profile(mesh, tmp_path):
    for wrong in (None, mesh.abstract_mesh):
        with pytest.raises(TypeError, match="must be a jax.sharding.Mesh, with its devices"):
            Topology.load(tmp_path / "none.json", wrong)


def test_meshes_that_cannot_be_measured(mesh):
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    with pytest.raises(ValueError, match="no links"):
        xcoll.tune(one)
    with pytest.raises(TypeError, match="Mesh"):
        xcoll.tune("cpu:4")
    assert skeleton(mesh).is_known


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "host=2,device=x"], "no name=size"),
        (["--mesh", "device=2", "--budget", "soon"], "write it as 60s, 2min or 500ms"),
        (["--mesh", "device=2", "--budget", "0s"], "more than nothing"),
        (["--mesh", "device=2", "--virtual-devices", "0"], "must be from 1 to"),
        (["--mesh", "device=1"], "no links"),
        (["--mesh", "device=4096"], "has 4096 devices, and there are 8; see --virtual-devices"),
        (["--mesh", "device=2", "--distributed", "here"], "ADDRESS,COUNT,INDEX"),
        (["--mesh", "device=2", "--virtual-devices", "2", "--distributed"], "not allowed with"),
        ([], "--mesh"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, says, capsys):
    assert main(["tune", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err and "Traceback" not in printed.err


def test_the_command_writes_a_profile_and_shows_the_fit(mesh, tmp_path, capsys):
    path = tmp_path / "two" / "profile.json"
    arguments = ["tune", "--mesh", "host=2,device=2", "--virtual-devices", "8", "--budget", "1s"]
    assert main([*arguments, "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    for word in ("xcoll tune: host=2, device=2 of cpu", "step", "error", "worst", str(path)):
        assert word in shown
    assert Topology.load(path, mesh).measured


def test_stopped_while_it_measures_it_leaves_no_file(tmp_path, monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("xcoll.calibration.tuning.fit", stopped)
    arguments = ["tune", "--mesh", "a=2", "--virtual-devices", "8", "--budget", "1s"]
    assert main([*arguments, "--out", str(tmp_path / "two.json")]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[-1]) == ("", "xcoll: stopped by Ctrl-C")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["", "/dev/null/x.json", "/dev/null", "{file}/x.json"])
def test_a_place_that_cannot_be_written_is_found_before_measuring(mesh, tmp_path, place):
    (tmp_path / "file").write_text("kept")
    out = place.format(file=tmp_path / "file")
    told = []
    with pytest.raises(OSError, match=f"tune: the profile can't be written to '{out}'.*--out FILE"):
        xcoll.tune(mesh, budget_s=1, out=out, progress=lambda *what: told.append(what))
    assert told == []
    assert (tmp_path / "file").read_text() == "kept"


def test_what_is_looked_at_before_measuring_is_not_changed(tmp_path):
    (tmp_path / "old.json").write_text("kept")
    profiles.prepare("tune", tmp_path / "old.json")
    profiles.prepare("tune", tmp_path / "made" / "new.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["made", "old.json"]


def test_a_pipe_is_written_to():
    """As /dev/stdout is one in a shell's pipeline: a path that leads to no place of its own."""
    reads, writes = os.pipe()
    with open(reads) as pipe:
        profiles.write(f"/proc/self/fd/{writes}", "all of it")
        os.close(writes)
        assert pipe.read() == "all of it"


def test_a_failed_write_leaves_what_was_there(tuned, tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    profiles.write(path, "before")

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="No space left"):
        profiles.write(path, "after")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["kept.json"]


def test_unlike_topologies_have_unlike_fingerprints(tuned):
    topology = tuned[0].topology
    slower = replace(topology, device=replace(topology.device, step_ps=topology.device.step_ps + 1))
    assert slower.fingerprint != topology.fingerprint
