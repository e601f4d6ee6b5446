"""Regret and errors of prediction: figures by hand, what is timed, and a run on real hosts."""

import argparse
import dataclasses
import doctest
import importlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bench.cluster import requirements
from bench.regret import __main__ as command_line
from bench.regret import figures, measuring, options, programs, results, tables
from bench.regret.considered import FACTOR, considered, kind_of, worth_timing
from bench.regret.grid import COLLECTIVES, SIZES, Case, Setting, cases
from bench.regret.results import Result, Timed
from xcoll.options import Option
from xcoll.plan import Span, Stage
from xcoll.policy import Choice
from xcoll.printing import as_text
from xcoll.topology import Topology

ROOT = Path(__file__).parent.parent
SETTING = Setting(hosts=2, devices=4, rate_bits_per_s=200_000_000)
CASE = Case(setting=SETTING, collective="all_reduce", num_bytes=4 << 20)


def timed(name: str, *rounds_s: float, predicted_s: float = 1.0, **fields) -> Timed:
    values = {"kind": "flat", "policies": ("exact", "int8@host"), "same_as": ""}
    values |= {"is_contender": True, **fields}
    return Timed(name=name, predicted_s=predicted_s, rounds_s=rounds_s, **values)


def result(*plans: Timed, chosen=("a", "c"), noise=0.0, case=CASE, **fields) -> Result:
    values = {"too_slow": (), "barred": (), "topology": "profile p", "machine": "m"}
    values |= {"launch_s": 0.0, **fields}
    return Result(
        case=case,
        chosen=dict(zip(("exact", "int8@host"), chosen, strict=True)),
        timed=plans,
        native_noise=noise,
        **values,
    )


def measured(**fields) -> Result:
    return result(
        timed("native", 10.0, 9.0, 30.0, predicted_s=8.0, kind="native"),
        timed("a", 8.0, 7.0, 12.0, predicted_s=6.0),
        timed("b", 5.0, 4.0, 9.0, predicted_s=6.5),
        timed("c", 11.0, 2.0, 11.0, predicted_s=2.2, policies=("int8@host",), kind="flat, int8"),
        timed("d", 11.0, 2.0, 11.0, predicted_s=99.0, policies=("int8@host",), same_as="c"),
        **fields,
    )


def test_regret_is_the_chosen_time_over_the_bests():
    exact, int8 = figures.regrets([measured(noise=0.04)])
    assert (exact.policy, exact.chosen.name, exact.best.name) == ("exact", "a", "b")
    # Of the halves, rounds 0 and 2, and round 1: a takes 10 and 7, b takes 7 and 4.
    assert exact.regret == pytest.approx((10 / 7 + 7 / 4) / 2 - 1)
    assert exact.loss == pytest.approx(-0.24)  # 8 / 10 - 1 - 0.04
    # c takes 11 and 2. By the first half b is the best: 2 / 4. By the second c is: 11 / 11.
    assert int8.regret == pytest.approx((2 / 4 + 11 / 11) / 2 - 1)
    assert int8.loss == pytest.approx(0.06)  # 11 / 10 - 1 - 0.04


def test_luck_in_one_half_of_the_rounds_makes_no_regret():
    # By all rounds b is best. By the first it is, too, and then takes 2.5; by the second it is not.
    plans = (timed("native", 9.0), timed("a", 2.0, 2.0), timed("b", 1.0, 2.5))
    (choice,) = figures.regrets([result(*plans, chosen=("a", "a"))])
    assert choice.best.name == "b"
    assert choice.regret == pytest.approx((2 / 2 + 2 / 2.5) / 2 - 1)


def test_the_best_is_one_that_the_policy_considers_and_that_was_timed_further():
    plans = (
        timed("native", 10.0),
        timed("a", 8.0),
        timed("c", 1.0, policies=("int8@host",)),
        timed("d", 0.5, is_contender=False),
    )
    exact, int8 = figures.regrets([result(*plans)])
    assert (exact.best.name, exact.regret) == ("a", 0.0)
    assert (int8.best.name, int8.regret) == ("c", 0.0)


def test_a_choice_that_another_policy_has_too_counts_once():
    (choice,) = figures.regrets([result(timed("native", 1.0), timed("a", 2.0), chosen=("a", "a"))])
    assert choice.policy == "exact" and choice.regret == 1.0


@pytest.mark.parametrize("same_as", ["", "native"])
def test_native_is_no_slower_than_itself(same_as):
    plans = (timed("native", 1.0), timed("a", 1.5, same_as=same_as))
    (choice,) = figures.regrets([result(*plans, chosen=("a", "a"))])
    assert choice.loss == (0.0 if same_as else 0.5)


def test_percentiles_lie_between_the_nearest_values():
    values = [float(number) for number in range(21)]
    random.Random(0).shuffle(values)
    assert figures.percentile(values, 95) == pytest.approx(19.0)
    assert figures.percentile([3.0, 1.0], 50) == 2.0
    assert figures.percentile([7.0], 95) == 7.0
    assert math.isnan(figures.percentile([], 95)) and math.isnan(figures.median([]))


def test_errors_are_parts_of_the_measured_time_and_each_program_counts_once():
    by_name = {point.timed.name: point for point in figures.points([measured()])}
    assert list(by_name) == ["native", "a", "b", "c"]
    assert by_name["a"].error == pytest.approx(0.25)  # 6 for 8
    assert by_name["b"].ratio == pytest.approx(1.3)  # 6.5 for 5
    assert by_name["b"].error == pytest.approx(0.3)
    (native, *_) = figures.points([measured(launch_s=1.0)])
    assert native.ratio == pytest.approx(0.9)  # 8 and 1 for 10


@pytest.mark.parametrize(
    ("num_bytes", "mbit", "is_wire", "size_class"),
    [
        (4 << 20, 200, True, "from 4 MiB"),
        (4 << 20, 201, False, "from 4 MiB"),
        ((4 << 20) - 4096, 50, False, "64 KiB to 4 MiB"),
        (64 << 10, 50, False, "64 KiB to 4 MiB"),
        (4096, 50, False, "under 64 KiB"),
    ],
)
def test_what_the_wire_decides(num_bytes, mbit, is_wire, size_class):
    setting = Setting(hosts=2, devices=4, rate_bits_per_s=mbit * 10**6)
    case = Case(setting=setting, collective="all_gather", num_bytes=num_bytes)
    assert figures.on_the_wire(case) == is_wire
    assert figures.size_class(case) == size_class


def test_targets_are_met_missed_or_not_measured():
    # Regrets 33/56 and -1/4; losses -0.2 and 0.1; errors 0.2, 0.25, 0.3 and 0.8, all on the wire.
    found = {target.name: target for target in figures.targets([measured()])}
    assert [target.value for target in found.values()][:4] == pytest.approx(
        [(33 / 56 - 1 / 4) / 2, -1 / 4 + 0.95 * (33 / 56 + 1 / 4), 0.1, 0.275]
    )
    assert [target.count for target in found.values()] == [2, 2, 2, 4, 0]
    assert not any(target.is_met for target in found.values())
    assert dataclasses.replace(found["regret, median"], value=0.05).is_met


def test_what_is_near_the_best_of_a_policy_is_timed_further():
    medians_s = {"native": 9.0, "a": 4.0, "b": 5.0, "c": 5.1, "d": 1.0, "e": 1.3, "f": 8.0}
    both, lossy = ("exact", "int8"), ("int8",)
    policies = {name: lossy if name in "de" else both for name in medians_s}
    near = measuring.contenders(medians_s, policies, ["f", "d"])
    assert near == {"native", "a", "b", "d", "f"}


def test_variants_alike_in_time_take_turns():
    found = measuring.groups({"a": 9.0, "b": 4.0, "c": 1.0, "d": 1.5, "e": 2.2, "f": 6.1})
    # More than half as long again as the one before: 4 after 2.2, 6.1 after 4.
    assert [list(group) for group in found] == [["c", "d", "e"], ["b"], ["f", "a"]]


def test_what_is_predicted_over_four_times_slower_is_not_timed():
    def option(name: str, time_ps: int) -> Option:
        return Option(name, (Stage("all_reduce", Span(("host",), 2), Choice(name)),), time_ps)

    native, best, chosen = option("native", 900), option("ring", 100), option("tree", 500)
    limit, over = option("direct", 100 * FACTOR), option("bruck", 100 * FACTOR + 1)
    every = [native, best, limit, over, chosen]
    assert worth_timing(every, chosen.stages) == [native, best, limit, chosen]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_considered_are_native_the_chosen_and_their_rivals(collective):
    case = Case(setting=SETTING, collective=collective, num_bytes=16 << 20)
    topology = Topology.parse("2*cpu:4@200Mbit", SETTING.axis_sizes)
    found = considered(case.request(), topology)
    plans = {candidate.plan.name: candidate for candidate in found.candidates}
    assert len(plans) == len(found.candidates)
    assert found.candidates[0].plan.is_native
    assert set(found.chosen.values()) <= set(plans)
    assert "int8" in found.chosen["int8@host"] and "int8" not in found.chosen["exact"]
    for name, candidate in plans.items():
        assert ("exact" not in candidate.policies) == candidate.plan.is_lossy == ("int8" in name)
    kinds = {kind_of(candidate.plan.stages) for candidate in found.candidates}
    assert {"native", "levels", "flat", "levels, int8"} <= kinds
    assert not set(found.too_slow) & set(plans)


def test_an_unknown_topology_predicts_nothing():
    with pytest.raises(ValueError, match="nothing is known of the topology: no idea"):
        considered(CASE.request(), Topology.unknown(SETTING.axis_sizes, "no idea"))


def test_a_cluster_has_every_case_once_in_an_order_of_its_own():
    every = list(cases(SETTING))
    assert len(every) == len(set(every)) == len(COLLECTIVES) * len(SIZES)
    assert every == list(cases(SETTING))
    other = dataclasses.replace(SETTING, hosts=4, devices=2)
    keys = [[(case.collective, case.num_bytes) for case in cases(s)] for s in (SETTING, other)]
    assert keys[0] != keys[1] and sorted(keys[0]) == sorted(keys[1])


def test_a_payload_is_the_larger_of_operand_and_result():
    elements = {
        name: dataclasses.replace(CASE, collective=name).operand_elements for name in COLLECTIVES
    }
    whole = 1 << 20
    assert elements == dict.fromkeys(COLLECTIVES, whole) | {"all_gather": whole // 8}


def test_what_ranks_have_to_hold():
    # Element e of rank r is (5 e + 3 r) mod 17 - 8.
    assert programs.values(0, 0, 5).tolist() == [-8, -3, 2, 7, -5]
    assert programs.values(1, 1, 3).tolist() == [0, 5]
    setting = Setting(hosts=2, devices=1, rate_bits_per_s=10**6)

    def held(collective: str, num_bytes: int) -> list[float]:
        case = Case(setting=setting, collective=collective, num_bytes=num_bytes)
        return programs.expected(case, 1).tolist()

    assert held("all_reduce", 16) == [-13, -3, 7, 0]
    assert held("reduce_scatter", 16) == [7, 0]
    assert held("all_gather", 16) == [-8, -3, -5, 0]
    assert held("all_to_all", 16) == [2, 7, 5, -7]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_programs_do_what_plans_say_and_wrong_results_stop(collective):
    case = Case(setting=SETTING, collective=collective, num_bytes=128 << 10)
    topology = Topology.parse("2*cpu:4@200Mbit", SETTING.axis_sizes)
    found = considered(case.request(), topology)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("host", "device"))
    x = programs.operand(case, mesh)
    wanted = {rank: programs.expected(case, rank) for rank in range(8)}
    plans = {candidate.plan.name: candidate.plan for candidate in found.candidates}
    for name in ("native", *found.chosen.values()):
        assert (programs.tolerance(plans[name]) > 0) == ("int8" in name)
        got = programs.program(plans[name], mesh)(x)
        programs.check(case, plans[name], got, wanted)
    wanted[5] = wanted[5] + np.float32(0.001)
    with pytest.raises(SystemExit, match="by native, rank 5 is off by 0.001.*Nothing was timed"):
        programs.check(case, plans["native"], programs.program(plans["native"], mesh)(x), wanted)


def test_results_are_kept(tmp_path):
    path = tmp_path / "new" / "results.json"
    assert results.read(path) == []
    results.write(path, [measured()])
    assert results.read(path) == [measured()]
    path.write_text(path.read_text().replace('"native_noise"', '"noise"'))
    with pytest.raises(ValueError, match=r"results.json: not results of bench.regret.*noise"):
        results.read(path)


def test_the_report_says_what_it_is_made_of_and_what_is_missing():
    missing = [dataclasses.replace(CASE, num_bytes=64 << 20), CASE]
    missing.append(dataclasses.replace(CASE, setting=dataclasses.replace(SETTING, hosts=4)))
    kept = [measured(too_slow=("x", "y"), barred=("z",))]
    text = as_text(tables.report(kept, missing, ["a note"]), least_width=140)
    for line in (
        "on m",
        "planned from profile p",
        "5 plans of 1 cases were timed; 1 are the program of another",
        "not timed: 2 plans predicted over 4 times slower than the best",
        "not timed: 1 plans that the planner may not choose",
        "not measured: 2 cases, 2x4 at 200mbit: all_reduce of 4 MiB, 64 MiB",
        "not measured: any of the 1 cases, 4x4 at 200mbit",
        "a note",
    ):
        assert line in text.splitlines()
    assert "regret, worst" in text and "58.9%" in text
    assert "nothing was measured" in as_text(tables.report([], missing))


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    assert "predicted.png" in command_line._picture([measured()], tmp_path / "predicted.png")
    assert (tmp_path / "predicted.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "8"], "'8' is no mesh"),
        (["--mesh", "1x4"], "two hosts or more"),
        (["--size", "4095"], "multiples of 4 KiB"),
        (["--profile", "none.json"], "no file 'none.json'"),
        (
            ["--mesh", "3x1"],
            "--size 4 KiB: 3 devices, of --mesh 3x1, can't have",
        ),
        (["--profile", __file__], "a profile is of one mesh and rate, and there are 6"),
    ],
)
def test_what_cannot_be_asked_for_is_said(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main([*words, "--report"])
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_read_is_said_and_fresh_forgets_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(requirements, "lacking", lambda: None)
    monkeypatch.setattr(command_line, "_measure", lambda *_: 7)
    for name in ("results.json", "profile-2x4-200mbit.json", "other.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["--out", str(tmp_path)])
    assert "start anew with --fresh" in capsys.readouterr().err
    assert command_line.main(["--out", str(tmp_path), "--fresh"]) == 7
    said = capsys.readouterr().out.splitlines()
    # And no table of nothing: what there was to measure, a line for each cluster.
    assert said[0] == "nothing was measured" and len(said) == 7
    assert all("any of the 24 cases" in line for line in said[1:])
    monkeypatch.setattr(requirements, "lacking", lambda: "no root")
    assert command_line.main(["--out", str(tmp_path)]) == command_line.CANT
    assert "no root" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_quick_is_a_part_of_the_grid():
    quick, every = options.parser().parse_args(["--quick"]), options.parser().parse_args([])
    assert isinstance(quick, argparse.Namespace) and quick.budget <= 120 < every.budget
    assert set(quick.sizes) < set(every.sizes) and set(quick.rates) < set(every.rates)


@pytest.mark.parametrize("module", ["considered", "figures"])
def test_examples_run(module):
    found = importlib.import_module(f"bench.regret.{module}")
    assert doctest.testmod(found).attempted > 0
    assert doctest.testmod(found).failed == 0


def test_on_hosts_plans_are_timed_and_a_second_run_adds_to_the_first(tmp_path):
    if reason := requirements.lacking():
        pytest.skip(reason)

    def run(*words: str) -> dict:
        command = (sys.executable, "-m", "bench.regret", "--mesh", "2x1", "--rate", "1gbit")
        rest = ("--size", "4KiB", "--tune-budget", "4s", "--json", "--out", str(tmp_path))
        done = subprocess.run(
            [*command, *rest, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = run("--collective", "all_to_all", "--budget", "40s")
    (choice,) = found["choices"]
    assert choice["case"] == "all_to_all of 4 KiB, 2x1 at 1gbit"
    times = {plan["plan"]: plan["measured_s"] for plan in found["plans"]}
    assert min(times.values()) > 0 and {"native", choice["chosen"], choice["best"]} <= set(times)
    # The best is picked on one half of the rounds, and need not be the first over all of them.
    assert choice["best_s"] == times[choice["best"]]
    assert "2 x 1 cpu devices; links: 1gbit; TCP reno" in found["machines"][0]
    # There's no time for another.
    again = run("--collective", "all_to_all", "all_gather", "--budget", "1s")
    assert again["choices"] == found["choices"]
    assert again["cases_left_out"] == ["all_gather of 4 KiB, 2x1 at 1gbit"]
