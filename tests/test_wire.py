"""The benchmark of slow links: its bounds, targets and checks by hand, and one small run."""

import dataclasses
import doctest
import importlib
import json
import re
from fractions import Fraction

import jax
import numpy as np
import pytest
from jax import lax

from bench.cluster import requirements
from bench.timing import Meeting
from bench.wire import __main__ as command_line
from bench.wire.bounds import bound_s, crossing, encoded_bytes, goodput_bound_s
from bench.wire.breakdown import link_pieces, stage_pieces
from bench.wire.cells import Cell
from bench.wire.checking import WrongResultError, check
from bench.wire.expected import Expected, payload_of
from bench.wire.jobs import parse_cluster, read_job
from bench.wire.options import jobs, parsed
from bench.wire.programs import BODIES, Program, compiled, mapped, mesh_of, place, program
from bench.wire.tables import cluster_tables
from bench.wire.targets import MIB, Target, target
from xcoll import Topology, codecs, explain
from xcoll.plan import Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.printing import as_text


@pytest.mark.parametrize("module", ["bounds", "jobs", "targets"])
def test_docstrings(module):
    found = doctest.testmod(importlib.import_module(f"bench.wire.{module}"))
    assert found.attempted and not found.failed


# Bounds.


@pytest.mark.parametrize(
    ("collective", "hosts", "devices", "payloads"),
    [
        # Each host ends with the sum of both: it gets the other's, once.
        ("psum", 2, 4, 1),
        ("psum", 4, 2, Fraction(3, 2)),
        # A host keeps half of the sums, and lacks the other host's part of them.
        ("psum_scatter", 2, 4, Fraction(1, 2)),
        ("psum_scatter", 4, 2, Fraction(3, 4)),
        # It has half of what all end with.
        ("all_gather", 2, 4, Fraction(1, 2)),
        ("all_gather", 4, 2, Fraction(3, 4)),
        # Four devices send half of theirs each; two send three quarters.
        ("all_to_all", 2, 4, 2),
        ("all_to_all", 4, 2, Fraction(3, 2)),
    ],
)
def test_what_has_to_cross(collective, hosts, devices, payloads):
    assert crossing(collective, hosts, devices) == payloads


def test_bounds_of_16_mib():
    # 2^24 bytes are 134.2 Mbit; of a frame of 1514 bytes 1448 are payload.
    assert bound_s(1 << 24, 200_000_000) == pytest.approx(0.67109, rel=1e-4)
    assert goodput_bound_s(1 << 24, 200_000_000) == pytest.approx(0.70168, rel=1e-4)
    assert goodput_bound_s(1 << 24, 50_000_000) == pytest.approx(2.8067, rel=1e-4)


def test_encoded_bytes_hold_the_scales():
    # int8: a code for each number, and a float32 scale for each 256; int4: two codes a byte.
    assert encoded_bytes(16 * MIB, None) == 16 * MIB
    assert encoded_bytes(16 * MIB, codecs.cast("bfloat16")) == 8 * MIB
    assert 4 * MIB < encoded_bytes(16 * MIB, codecs.int8()) <= 4 * MIB * 1.05
    assert 2 * MIB < encoded_bytes(16 * MIB, codecs.int4()) <= 2 * MIB * 1.2
    # 1024 codes and the scales of 32 blocks of 32, of a byte each: by the codec's own options.
    assert encoded_bytes(4096, codecs.int8(block=32)) == 1024 + 32


# Targets.


def test_targets_are_those_that_were_set():
    slow, middle, fast = (2, 4, 50_000_000), (2, 4, 200_000_000), (2, 4, 1_000_000_000)

    def ratios(cluster):
        found = (target("psum", 16 * MIB, name, cluster) for name in ("exact", "int8", "int4"))
        return tuple(one and one.ratio for one in found)

    assert ratios(slow) == (1.1, 6.5, 12)
    assert ratios(middle) == (1.1, 5.5, 9)
    assert ratios(fast) == (1.25, 3.5, 4.5)
    assert ratios((4, 2, 200_000_000)) == (None, 3.6, 6)
    assert ratios((4, 2, 50_000_000)) == (None, None, None)
    assert target("psum", 64, "exact", (4, 1, 200_000_000)) == Target(3.0, "lax")
    assert target("psum", MIB, "exact", middle) is None
    assert target("all_gather", 16 * MIB, "int8", middle) is None


def test_targets_met_and_missed():
    assert Target(1.1, "bound").is_met(1.1, 0.0)
    assert not Target(1.1, "bound").is_met(1.11, 9.0)
    assert Target(5.5, "lax").is_met(9.0, 5.5)
    assert not Target(5.5, "lax").is_met(1.0, 5.4)


# What results have to be.

SIGNS = [np.float32([1, -2, 3, -4]), np.float32([10, 20, 30, 40])]


@pytest.mark.parametrize(
    ("collective", "results"),
    [
        ("psum", [[11, 18, 33, 36], [11, 18, 33, 36]]),
        ("psum_scatter", [[11, 18], [33, 36]]),
        ("all_gather", [[1, -2, 3, -4, 10, 20, 30, 40]] * 2),
        ("all_to_all", [[1, -2, 10, 20], [3, -4, 30, 40]]),
    ],
)
def test_exact_results_deviate_by_nothing(collective, results):
    expected = Expected(collective, SIGNS)
    for rank, result in enumerate(results):
        assert expected.deviation(rank, np.float32(result)) == 0
        with pytest.raises(ValueError, match="not finite"):
            expected.deviation(rank, np.full(len(result), np.nan, np.float32))
    with pytest.raises(ValueError, match=r"shape \(3,\), not"):
        expected.deviation(0, np.zeros(3, np.float32))
    is_sum = collective in ("psum", "psum_scatter")
    assert expected.roundoff == (2 * 2.0**-24 if is_sum else 0)


def test_deviation_is_over_what_ranks_put_into_a_block():
    # Blocks of two: largest magnitudes 2 and 4, 20 and 40.
    result = np.float32([11, 18, 33, 36 + 11])
    assert Expected("psum", SIGNS).deviation(0, result, block=2) == 11 / 44
    assert Expected("psum", SIGNS).deviation(0, result) == 11 / 44
    moved = np.float32([1, -2, 3, -4, 10, 20, 30 + 5, 40])
    assert Expected("all_gather", SIGNS).deviation(1, moved, block=2) == 5 / 40
    assert Expected("all_gather", SIGNS).deviation(1, moved) == pytest.approx(5 / 30)


@pytest.mark.parametrize(
    ("collective", "place_of_error", "largest"),
    [("psum", 0, 6 + 60), ("psum_scatter", 0, 6 + 60), ("all_to_all", 1, 60)],
)
def test_shares_that_are_no_whole_blocks_count_all(collective, place_of_error, largest):
    # Shares of three: a block of two holds parts of two shares, or of two ranks.
    inputs = [np.float32([1, 2, 3, 4, 5, 6]), np.float32([10, 20, 30, 40, 50, 60])]
    expected = Expected(collective, inputs)
    sums = np.float32([11, 22, 33, 44, 55, 66])
    moved = np.float32([1, 2, 3, 10, 20, 30])
    result = {"psum": sums, "psum_scatter": sums[:3], "all_to_all": moved}[collective].copy()
    result[place_of_error] += 5
    assert expected.deviation(0, result, block=2) == 5 / largest


def test_ranks_put_in_different_numbers():
    first, second = payload_of(0, 100), payload_of(1, 100)
    assert first.dtype == np.float32 and not np.array_equal(first, second)
    assert np.array_equal(first, payload_of(0, 100))


@pytest.fixture(scope="module")
def eight():
    """A mesh as of 2 hosts with 4 devices, what its ranks put in, and that as one array."""
    mesh = mesh_of(2, 4)
    inputs = [payload_of(rank, 64) for rank in range(8)]
    return mesh, inputs, place(mesh, inputs)


@pytest.mark.parametrize("collective", ["psum", "psum_scatter", "all_gather", "all_to_all"])
def test_programs_return_what_numpy_does(collective, eight):
    mesh, inputs, x = eight
    topology = Topology.parse("2*cpu:4@200Mbit", axes=dict(mesh.shape))
    for variant in ("lax", "exact", "int8"):
        made = program(variant, collective, mesh, topology, x)
        assert (made.plan is None) == (variant == "lax")
        found = check(variant, made, x, Expected(collective, inputs), Meeting("check"), mesh)
        assert found.deviation <= found.limit < 1e-5  # payloads under 64 KiB stay exact


@pytest.mark.parametrize("collective", ["psum", "psum_scatter", "all_gather", "all_to_all"])
def test_codecs_of_shares_that_are_no_whole_blocks(collective):
    mesh = mesh_of(2, 4)
    # Of 64 KiB or more, so that a codec is used, and 4 numbers more than whole blocks of 256.
    num_elements = 64 * 256 + 4 if collective == "all_gather" else 8 * (32 * 256 + 4)
    inputs = [payload_of(rank, num_elements) for rank in range(8)]
    x = place(mesh, inputs)
    topology = Topology.parse("2*cpu:4@50Mbit", axes=dict(mesh.shape))
    for variant in ("int8", "int4"):
        made = program(variant, collective, mesh, topology, x)
        assert made.plan.is_lossy
        check(variant, made, x, Expected(collective, inputs), Meeting("shares"), mesh)


@pytest.mark.parametrize("payload", [4, 100])
def test_the_smallest_payloads_have_stages(payload, eight):
    mesh = eight[0]
    x = place(mesh, [np.ones(payload // 4, np.float32)] * 8)
    forced = Policy(algorithm="hierarchical")
    (site,) = explain(
        mapped(mesh, BODIES["psum"]), x, policy=forced, topology="2*cpu:4@200Mbit"
    ).sites
    pieces = stage_pieces(site.plan)
    assert len(pieces) == 3
    for piece in pieces:
        x = place(mesh, [np.ones(piece.num_items, np.float32)] * 8)
        assert np.isfinite(compiled(mapped(mesh, piece.body), x)(x)).all()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x: lax.psum(x, ("host", "device")) * 1.001, "deviation of 0.00"),
        (lambda x: lax.psum(x, "device"), "deviation"),
        (
            lambda x: lax.psum(x, ("host", "device"))[:2],
            "rank 0: a result of shape .2,., not .64,.",
        ),
        # Right within roundoff, but not the same bits everywhere.
        (
            lambda x: lax.psum(x, ("host", "device")) * (1 + 2**-23 * (lax.axis_index("host") > 0)),
            "2 different results on replicas",
        ),
    ],
)
def test_wrong_results_are_refused(body, said, eight):
    mesh, inputs, x = eight
    wrong = Program(run=compiled(mapped(mesh, body), x))
    with pytest.raises(WrongResultError, match=said):
        check("wrong", wrong, x, Expected("psum", inputs), Meeting("wrong"), mesh)


# The command line.


def test_clusters():
    assert parse_cluster("2x4") == (2, 4)
    for text in ("1x4", "2x0", "2", "2x4x1", "ax4", ""):
        with pytest.raises(ValueError, match="2x4"):
            parse_cluster(text)


def test_jobs_are_each_cluster_at_each_rate_and_survive_json(tmp_path):
    words = ["--cluster", "2x4,4x2", "--rate", "50mbit,1gbit", "--small-cluster", "4x1"]
    found = jobs(parsed(words))
    assert [job.cluster for job in found] == [
        (2, 4, 50_000_000),
        (2, 4, 1_000_000_000),
        (4, 2, 50_000_000),
        (4, 2, 1_000_000_000),
        (4, 1, 200_000_000),
    ]
    assert found[0].payloads_bytes == (MIB, 16 * MIB, 64 * MIB)
    assert found[-1].payloads_bytes == (64, 256, 1024, 4096)
    assert found[-1].collectives == ("psum",) and found[-1].calls > 1
    assert found[1].topology == "2*cpu:4@1000Mbit"
    path = tmp_path / "job.json"
    path.write_text(found[0].to_json())
    assert read_job(path) == found[0]
    path.write_text(json.dumps({**dataclasses.asdict(found[0]), "hosts": "2"}))
    with pytest.raises(ValueError, match="hosts"):
        read_job(path)


def test_quick_is_one_cluster_and_small_messages():
    large, small = jobs(parsed(["--quick", "--rate", "50mbit"]))
    assert (large.cluster, large.payloads_bytes) == ((2, 4, 50_000_000), (16 * MIB,))
    assert large.collectives == ("psum", "psum_scatter", "all_gather", "all_to_all")
    assert small.collectives == ("psum",) and small.hosts == 4


def test_empty_lists_leave_out():
    (small,) = jobs(parsed(["--payload", ""]))
    assert small.collectives == ("psum",) and small.hosts == 4
    assert all(job.hosts * job.devices == 8 for job in jobs(parsed(["--small-payload", ""])))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "1x4"], "at least 2 hosts"),
        (["--rate", "200"], "200mbit"),
        (["--payload", "2"], "at least one float32"),
        (["--collective", "psum,sum"], "all_to_all"),
        (["--torch-python", "/no/such/python"], "no such program"),
        (["--rounds", "0"], "of at least 1, not '0'"),
        (["--profile", "none.json"], "no file 'none.json'"),
        (["--json", "/proc/none/figures.json"], "No such file or directory"),
        (["--cluster", "", "--small-cluster", ""], "nothing to measure"),
        (["--variant", "", "--small-payload", ""], "nothing to measure"),
    ],
)
def test_what_is_wrong_is_said(words, said, capsys):
    with pytest.raises(SystemExit):
        command_line.main(words)
    assert said in capsys.readouterr().err


# Where the time goes.


def all_reduce_plan(policy):
    topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
    request = Request(
        collective="all_reduce",
        op="sum",
        axes=("host", "device"),
        axis_sizes=(2, 4),
        dtype="float32",
        itemsize=4,
        shapes=((4 << 20,),),
    )
    return plan(request, topology, policy)


def test_a_native_plan_is_one_stage_over_all_axes():
    (piece,) = stage_pieces(all_reduce_plan(Policy.native()))
    assert piece.name == "1. all-reduce over host, device of 16 MiB: native"
    assert piece.num_items == 4 << 20 and piece.policy == Policy(algorithm="native", min_bytes=0)


@pytest.mark.parametrize(
    ("codec", "sent", "wire_items"),
    [
        (None, 4096, None),
        (codecs.cast("bfloat16"), 2048, 1024),
        # int8: 1024 codes, 32 scales of a byte; int4: 512 bytes of codes, 16 of scales.
        (codecs.int8(block=32), 1024 + 32, 1024 + 32),
        (codecs.int4(), 512 + 16, 512 + 16),
    ],
)
def test_the_link_carries_what_its_codec_makes(codec, sent, wire_items, eight):
    mesh = eight[0]
    (job,) = jobs(parsed(["--cluster", "2x4", "--rate", "200mbit", "--small-cluster", ""]))
    # One whole payload of 16 KiB crosses, and each of a host's 4 devices sends a quarter of it.
    cell = Cell(job, mesh, Topology.unknown(dict(mesh.shape)), Meeting("link"), "psum", 16384)
    made = all_reduce_plan(Policy(codec={"host": codec}))
    assert {stage.codec for stage in made.stages} - {None} == {codec} - {None}
    link, *coding = link_pieces(cell, made)
    assert (link.num_items, link.dtype) == (sent, "int8")
    if codec is None:
        assert not coding
        return
    encode, decode = coding
    assert (encode.num_items, decode.num_items) == (1024, wire_items)
    for piece in coding:
        jax.eval_shape(piece.body, jax.ShapeDtypeStruct((piece.num_items,), piece.dtype))


# The tables.


def figures():
    rows = [
        {
            "variant": variant,
            "plan": None if variant == "lax" else "hierarchical(native, native)",
            "wire_bytes": 1 << 24,
            "bound_s": 0.671,
            "rounds_s": rounds_s,
            "median_s": rounds_s[0],
            "times_lax": 1.2 / rounds_s[0],
            "over_bound": rounds_s[0] / 0.671,
            "predicted_s": None if variant == "lax" else 0.75,
            "native_predicted_s": None if variant == "lax" else 1.32,
            "target": None if variant == "lax" else "≤ 1.1 x bound",
            "met": None if variant == "lax" else False,
        }
        for variant, rounds_s in (("lax", [1.2, 1.2, 1.2]), ("exact", [0.8, 0.8, 0.8]))
    ]
    piece = {"piece": "1. reduce-scatter", "is_stage": True, "rounds_s": [0.2], "median_s": 0.2}
    found = {
        "variant": "exact",
        "plan": "hierarchical(native, native)",
        "whole_s": 0.8,
        "stages_s": 0.2,
        "pieces": [piece],
    }
    cell = {
        "collective": "psum",
        "payload_bytes": 16 * MIB,
        "rounds": 3,
        "notes": ["mpi has no psum: of this test"],
        "rows": rows,
        "breakdowns": [found],
    }
    return {
        "hosts": 2,
        "devices": 4,
        "rate_bits_per_s": 200_000_000,
        "topology": "2*cpu:4@200Mbit",
        "header": "a machine; TCP reno",
        "peers": {"torch": "torch 2, Gloo"},
        "notes": ["mpi is left out: of this test"],
        "cells": [cell],
    }


def test_tables_say_what_is_met_and_missed():
    text = "\n".join(as_text(one, least_width=150) for one in cluster_tables(figures(), 150))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["16"][2:] == [  # 16 MiB
        *["lax", "-", "1.2", "s", "[1.2,", "1.2]", "1.00", "671", "ms", "1.79", "1.32", "s", "+10%"]
    ]
    exact = " ".join(lines["exact"])
    assert "1.50 671 ms 1.19 750 ms -6% ≤ 1.1 x bound: MISSED" in exact
    assert "a machine; TCP reno" in text and "torch 2, Gloo" in text
    assert "mpi is left out" in text and "mpi has no psum" in text
    assert "1. reduce-scatter 200 ms [200, 200] 25%" in " ".join(text.split())
    assert "median [quartiles]" in text


@pytest.mark.parametrize("width", [80, 120, 140, 150])
def test_tables_fit_a_terminal_and_cut_nothing(width):
    found = figures()
    codec = "hierarchical(direct/cast(bfloat16), recursive_doubling/int8 in 2 chunks)"
    found["cells"][0]["rows"][1]["plan"] = codec
    shown = [as_text(one, least_width=width) for one in cluster_tables(found, width)]
    table = next(text for text in shown if "psum, float32" in text)
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    words = set(re.split(r"[^a-zA-Z0-9.%≤]+", table))
    wanted = "16 MiB exact cast bfloat16 recursive int8 chunks 671 1.50 1.19 750 6% ≤ 1.1 MISSED"
    assert words >= set(wanted.split())


# On hosts.


def test_plain_processes_have_no_congestion_control_of_their_own(capfd):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["--loopback", "--congestion", "bbr"])
    (line,) = capfd.readouterr().err.splitlines()
    assert "--loopback has no network of its own: no --congestion" in line


def test_a_profile_that_is_none_is_said_in_a_line(tmp_path, capfd):
    path = tmp_path / "profile.json"
    path.write_text("{}")
    words = ["--loopback", "--cluster", "2x1", "--small-cluster", "", "--rate", "1gbit"]
    assert command_line.main([*words, "--payload", "64", "--profile", str(path)]) == 1
    said = capfd.readouterr().err
    assert f"bench.wire: --profile: Topology.load: {path}" in said
    assert "Traceback" not in said


def test_a_small_run_on_hosts(tmp_path, capsys, monkeypatch):
    if reason := requirements.lacking():
        pytest.skip(reason)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "wire.json"
    words = ["--cluster", "2x2", "--rate", "200mbit", "--payload", "128KiB,1000"]
    words += [
        "--collective",
        "psum,psum_scatter",
        "--variant",
        "lax,exact,int8",
        "--small-cluster",
        "",
        "--rounds",
        "2",
    ]
    code = command_line.main([*words, "--breakdown", "--json", str(out)])
    said = capsys.readouterr()
    assert code == 0, said.err
    (cluster,) = json.loads(out.read_text())["clusters"]
    assert cluster["machine"]["congestion"] == ["reno", "reno"]
    assert cluster["machine"]["rates_bits_per_s"] == [200_000_000] * 2
    cell, small, _, scattered = cluster["cells"]
    # A codec takes no payloads under 64 KiB: as many bytes cross as exact, one payload.
    assert {row["wire_bytes"] for row in small["rows"]} == {1000}
    # Four ranks have as many of the 250 numbers: 62 each.
    assert scattered["payload_bytes"] == 4 * 4 * 62
    rows = {row["variant"]: row for row in cell["rows"]}
    assert list(rows) == ["lax", "exact", "int8"]
    for row in rows.values():
        # No run beats the link: 128 KiB at 200 Mbit/s, of which the queue passes 128 kB at once.
        assert len(row["rounds_s"]) == 2 and min(row["rounds_s"]) > 0
        assert 0 <= row["deviation"] <= row["largest_deviation_allowed"]
    assert rows["exact"]["bound_s"] == pytest.approx(0.00524288)
    assert rows["int8"]["deviation"] > rows["exact"]["deviation"]
    assert {found["variant"] for found in cell["breakdowns"]} == {"exact", "int8"}
    assert "psum, float32, 2 hosts x 2 devices, 200 Mbit/s" in said.out
