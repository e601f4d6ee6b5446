"""A host is lost, late or wrong: a clear error in all processes, soon; none stays."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cluster import requirements

ROOT = Path(__file__).parent.parent
SILENCE_S = 2.0
SOON_S = 20.0
"""A loaded machine may take a while; without bounds it would be minutes or for ever."""

LACKING = requirements.lacking()
needs_root = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


class Outcome:
    """What the processes printed and how they ended.

    Attributes:
      results: by host that printed one: the error's type and text, process ids and notes.
      times_s: by host, when it had the error: after the fault if there was one, else its start.
    """

    def __init__(self, logs: list[str], launcher: str) -> None:
        self.launcher = launcher
        said = [
            [json.loads(line) for line in log.splitlines() if line.startswith('{"')] for log in logs
        ]
        faults = [line["fault"] for lines in said for line in lines if "fault" in line]
        ends = {i: line for i, lines in enumerate(said) for line in lines if "result" in line}
        self.results = {i: line["result"] for i, line in ends.items()}
        self.times_s = {
            i: line["at"] - faults[0] if faults else line["after_s"] for i, line in ends.items()
        }

    def exit_code(self, host: int) -> int:
        """Of a host, as the launcher says it."""
        found = re.search(rf"host {host} ended with exit code (\d+)", self.launcher)
        return int(found[1]) if found else 0


def outcome(tmp_path, num_hosts, *options, network=(), **asked) -> Outcome:
    """Runs the worker on the cluster; without root, in plain processes."""
    asked["initialize"] = {
        "initialization_timeout": 30,
        "heartbeat_timeout_seconds": SILENCE_S,
    } | asked.get("initialize", {})
    arguments = [
        *("--hosts", str(num_hosts), "--devices", "2", "--timeout", "60s", "--grace", "25s"),
        *(["--loopback"] if LACKING else network),
        *("--logs", str(tmp_path), *options, "--"),
        *("python", str(ROOT / "tests" / "fault_worker.py"), json.dumps(asked)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.cluster", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    logs = [(tmp_path / f"host{i}.log").read_text() for i in range(1, num_hosts)]
    found = Outcome([done.stdout, *logs], done.stderr + done.stdout + "".join(logs))
    assert "was ended" not in done.stderr, f"a process stayed: {found.launcher}"
    assert "--timeout are over" not in done.stderr, found.launcher
    return found


# A host is lost in the middle of training.


ENDED = "its connection closed, so its process has ended"


@pytest.mark.parametrize(
    ("fault", "lost", "code", "says"),
    [
        ("SIGKILL", 1, 137, ENDED),
        ("SIGKILL", 0, 137, ENDED),
        ("SIGTERM", 1, 143, ENDED),
        ("raises", 0, 3, "it stopped with ValueError: the data ran out"),
    ],
)
def test_a_host_that_ends_is_named_at_once(tmp_path, fault, lost, code, says):
    found = outcome(tmp_path, 3, fault={str(lost): fault})
    for host in {0, 1, 2} - {lost}:
        kind, message, process_ids, _ = found.results[host]
        assert (kind, process_ids) == ("HostLostError", [lost]), message
        assert f"process {lost} of 3 is lost. process {lost} (host '" in message
        assert says in message
        assert found.times_s[host] < SOON_S
        assert found.exit_code(host) == 3, "it could end as it wanted"
    assert found.exit_code(lost) == code


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_with_one_device_in_each_process_a_loss_is_the_same_error(tmp_path, fault):
    """A small program then runs in the thread that calls it, and jax raises another type."""
    asked = {"fault": {"1": fault}, "wake": {"0": 1}, "elements": 4}
    found = outcome(tmp_path, 2, "--devices", "1", **asked)
    kind, message, process_ids, _ = found.results[0]
    assert (kind, process_ids) == ("HostLostError", [1]), message
    assert found.times_s[0] < SOON_S


@pytest.mark.parametrize(("lost", "when"), [(1, "jax starts"), (0, "no step was made")])
def test_a_host_that_ends_while_the_run_starts_is_named(tmp_path, lost, when):
    found = outcome(tmp_path, 2, fault={str(lost): "SIGKILL"}, when={str(lost): when})
    kind, message, process_ids, _ = found.results[1 - lost]
    assert (kind, process_ids) == ("HostLostError", [lost]), message
    assert found.times_s[1 - lost] < SOON_S
    assert found.exit_code(1 - lost) == 3


def test_a_process_that_lives_but_does_not_come(tmp_path):
    """It sleeps; nobody is lost, but a collective has a bound. Then it can't be woken."""
    bounds = {"collective_timeout_seconds": 3, "stuck_timeout_seconds": 2}
    found = outcome(tmp_path, 2, pause_s={"1": 1000}, initialize=bounds)
    kind, message, _, notes = found.results[0]
    assert kind == "JaxRuntimeError" and "Gloo" in message
    assert "all 2 processes of the run still answered 4 s after this" in notes[-1]
    assert found.times_s[0] < 2 * SOON_S
    assert found.exit_code(1) == 70 and 1 not in found.results
    assert "process 0 of 2 is lost" in found.launcher
    assert "it stopped with JaxRuntimeError" in found.launcher
    assert "in one call for 2 s since then" in found.launcher


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_block_a_run_ends_in_order_too(tmp_path, fails):
    fault = {"fault": {"1": "raises"}} if fails else {}
    found = outcome(tmp_path, 2, bare=True, steps=100_000 if fails else 10, uncaught=fails, **fault)
    if fails:
        assert [found.exit_code(host) for host in (0, 1)] == [1, 1]
        assert found.results[0][0] == "JaxRuntimeError"  # the block would have named the loss
        assert found.results[1][0] == "ValueError"
    else:
        assert [result[0] for result in found.results.values()] == ["ended"] * 2, found.launcher


@pytest.mark.parametrize("lost", [1, 0])
def test_a_stopped_host_is_named_and_ends_when_it_goes_on(tmp_path, lost):
    found = outcome(tmp_path, 2, fault={str(lost): "SIGSTOP"}, wake={str(1 - lost): lost})
    kind, message, process_ids, _ = found.results[1 - lost]
    assert (kind, process_ids) == ("HostLostError", [lost])
    assert re.search(r"it has said nothing for 2\.\d s, so its process is stopped", message)
    assert SILENCE_S / 2 < found.times_s[1 - lost] < SOON_S
    # The other had left, which the stopped one finds out.
    assert found.results[lost][0] == "HostLostError"
    assert [found.exit_code(host) for host in (0, 1)] == [3, 3]


@needs_root
@pytest.mark.parametrize("lost", [1, 0])
def test_a_host_that_is_cut_off_is_named_and_ends_too(tmp_path, lost):
    found = outcome(tmp_path, 3, network=("--rate", "200mbit"), fault={str(lost): "cut"})
    assert [result[0] for result in found.results.values()] == ["HostLostError"] * 3
    for host in {0, 1, 2} - {lost}:
        assert found.results[host][2] == [lost], found.results
        assert "cut off from the network" in found.results[host][1]
    assert found.results[lost][2] == ([0] if lost else [1, 2])
    assert "Or this host itself is cut off: it hears nobody" in found.results[lost][1]
    assert max(found.times_s.values()) < SOON_S
    assert [found.exit_code(host) for host in range(3)] == [3, 3, 3]


# The start.


def test_a_host_that_starts_late_is_waited_for(tmp_path):
    found = outcome(tmp_path, 2, delay_s={"1": 2.5}, steps=10)
    assert [result[0] for result in found.results.values()] == ["ended"] * 2, found.launcher
    found = outcome(tmp_path, 2, delay_s={"0": 2.5}, steps=10)
    assert [result[0] for result in found.results.values()] == ["ended"] * 2, found.launcher


def all_say(found, kind, *texts, hosts=(0, 1)):
    for host in hosts:
        assert found.results[host][0] == kind, found.launcher
        for text in texts:
            assert text in found.results[host][1]
        assert found.times_s[host] < SOON_S
        assert found.exit_code(host) == 3


def test_a_host_that_does_not_come_is_named_by_all(tmp_path):
    found = outcome(tmp_path, 3, absent={"2": True}, initialize={"initialization_timeout": 3})
    all_say(found, "StartError", "process 2 of 3 did not come within 3 s. Here: process 0 (host '")


def test_a_wrong_number_of_hosts(tmp_path):
    found = outcome(tmp_path, 2, own={"1": {"num_processes": 3}})
    said = [rf"process {i} \(host '[^']*'[^)]*, pid \d+\) says {2 + i}" for i in (0, 1)]
    all_say(found, "StartError", "the processes don't agree on num_processes")
    assert all(re.search("; ".join(said), found.results[host][1]) for host in (0, 1))


def test_a_port_in_use(tmp_path):
    found = outcome(
        tmp_path, 2, occupied={"0": True}, initialize={"initialization_timeout": 2}, steps=0
    )
    assert re.search(
        r"process 0 can't listen on port \d+: another program of this host uses it",
        found.results[0][1],
    )
    assert "the port is in use by another program" in found.results[1][1]
    all_say(found, "StartError", "port")


def test_a_coordinator_that_refuses(tmp_path):
    found = outcome(tmp_path, 2, absent={"0": True}, initialize={"initialization_timeout": 2})
    all_say(
        found,
        "StartError",
        "process 1 (host '",
        "did not reach process 0 at ",
        "within 2 s",
        "nothing listens on the port",
        hosts=(1,),
    )


@needs_root
def test_a_coordinator_that_does_not_answer(tmp_path):
    found = outcome(
        tmp_path,
        2,
        neighbour={"1": "10.77.0.99"},
        own={"1": {"coordinator_address": "10.77.0.99:8476"}},
        initialize={"initialization_timeout": 3},
    )
    all_say(found, "StartError", "at 10.77.0.99:8476", "nothing answered at all", hosts=(1,))
    all_say(found, "StartError", "process 1 of 2 did not come within 3 s", hosts=(0,))


# All are there, but don't want the same.

UNLIKE = {
    "policies": {"algorithm": {"0": "ring", "1": "tree"}},
    "topologies": {
        "topology": {"0": "2*cpu:2@200Mbit", "1": "2*cpu:2@50Mbit"},
        "algorithm": "ring",
    },
    "profiles": {
        "profile": {"0": "2*cpu:2@200Mbit", "1": "2*cpu:2@50Mbit"},
        "algorithm": "ring",
    },
}


def test_hosts_with_different_programs(tmp_path):
    found = outcome(tmp_path, 2, elements={"0": 1024, "1": 2048}, algorithm="ring")
    for host in (0, 1):
        kind, message, *_ = found.results[host]
        assert kind == "PlanMismatchError", found.launcher
        assert f"process {host} has come to a program that process {1 - host} has not" in message
        assert "4 KiB" in message and "8 KiB" in message  # the two operands
        assert found.times_s[host] < SOON_S
        assert found.exit_code(host) == 3


DIFFERENCES = {
    "policies": ("ring", "tree"),
    "topologies": ("2*cpu:2@200Mbit", "2*cpu:2@50Mbit"),
    "profiles": ("profile0.json", "profile1.json"),
}


def test_a_host_without_a_profile(tmp_path):
    text = {"0": "2*cpu:2@200Mbit", "1": "none"}
    found = outcome(tmp_path, 2, profile=text, directory=str(tmp_path))
    assert found.results[1][0] == "FileNotFoundError"
    all_say(found, "HostLostError", "stopped with FileNotFoundError: ", "profile1.json", hosts=(0,))


@pytest.mark.parametrize(
    ("unlike", "plain"),
    [("policies", False), ("policies", True), ("topologies", False), ("profiles", False)],
)
def test_hosts_with_different(tmp_path, unlike, plain):
    """Plain is with jax.distributed.initialize: then too it is an error, and nobody hangs."""
    found = outcome(
        tmp_path, 2, plain=plain, uncaught=True, directory=str(tmp_path), **UNLIKE[unlike]
    )
    for host in (0, 1):
        kind, message, *_ = found.results[host]
        assert kind == "PlanMismatchError", found.launcher
        assert f"(this is process {host})" in message
        assert "process 0: fingerprint" in message and "process 1: fingerprint" in message
        for said in DIFFERENCES[unlike]:
            assert said in message
        assert found.times_s[host] < SOON_S
        assert found.exit_code(host) == 1, "as of an error that nobody caught"
