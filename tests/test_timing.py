"""Times over all processes, and the facts that stand above a table."""

import doctest
import importlib
import json
import time

import pytest

from bench.timing import (
    NOBODY,
    Meeting,
    Times,
    interleaved,
    machine,
    over_processes,
    write_json,
)
from bench.timing.machine import read_rate


def test_a_time_is_from_the_earliest_start_to_the_latest_end():
    first = [(10.0, 11.0), (20.0, 20.5)]
    second = [(10.25, 12.0), (19.0, 20.25)]
    assert over_processes([first, second]).rounds_s == (2.0, 1.5)
    assert over_processes([first, second], calls=4).rounds_s == (0.5, 0.375)


def test_median_quartiles_and_ratio_round_by_round():
    times = Times((4.0, 1.0, 3.0, 2.0, 5.0))
    assert (times.low_s, times.median_s, times.high_s) == (2.0, 3.0, 4.0)
    assert times.over(Times((2.0, 1.0, 1.0, 1.0, 1.0))) == 2.0
    assert str(times) == "3 s [2, 4]"
    assert str(Times((0.0125,))) == "12.5 ms [12.5, 12.5]"
    assert times.to_dict()["rounds_s"] == [4.0, 1.0, 3.0, 2.0, 5.0]


def test_variants_take_turns_in_either_order():
    turns, told = [], []
    times = interleaved(
        {name: lambda name=name: turns.append(name) for name in "abc"},
        2,
        Meeting("turns"),
        on_turn=told.append,
    )
    assert turns == told == [*"abc", *"cba", *"abc"]  # the first round is not timed
    assert {name: len(found.rounds_s) for name, found in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_time_is_that_of_one_call():
    calls = []

    def run():
        calls.append(1)
        time.sleep(0.01)

    times = interleaved({"sleep": run}, 1, Meeting("calls"), calls=5)
    assert len(calls) == 1 + 5
    assert 0.01 <= times["sleep"].median_s < 0.05


def test_what_runs_elsewhere_takes_its_own_times():
    class Other:
        def timed(self, calls):
            return (1.0, 1.0 + 3.0 * calls)

    times = interleaved({"other": Other()}, 2, Meeting("elsewhere"), calls=4)
    assert times["other"].rounds_s == (3.0, 3.0)
    assert over_processes([[NOBODY], [(1.0, 3.0)]]).rounds_s == (2.0,)


def test_one_process_meets_itself():
    meeting = Meeting("alone")
    meeting.wait()
    assert meeting.is_first
    assert meeting.share({"a": 1}) == [{"a": 1}]
    assert meeting.first_says(7) == 7


def test_facts_of_the_machine():
    facts = machine(Meeting("facts"))
    assert (facts.processes, facts.devices, facts.device_kind) == (1, 8, "cpu")
    assert json.loads(json.dumps(facts.to_dict()))["jax"] == facts.jax
    text = str(facts)
    assert facts.cpu in text and "8 cpu devices" in text and "TCP " in text


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ('[{"kind":"noqueue","options":{}}]', None),
        ('[{"kind":"noqueue"},{"kind":"tbf","options":{"rate":6250000,"burst":1}}]', 50_000_000),
        ("", None),
        ("no JSON", None),
    ],
)
def test_limits_are_read_from_tc(text, rate):
    assert read_rate(text) == rate


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "runs" / "wire.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in path.parent.iterdir()] == ["wire.json"]


@pytest.mark.parametrize("module", ["machine", "times"])
def test_docstrings(module):
    found = doctest.testmod(importlib.import_module(f"bench.timing.{module}"))
    assert found.attempted and not found.failed
