"""Hosts on one machine: what they are made of, what runs on them, and that nothing stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.cluster import __main__ as command_line
from bench.cluster import etc_files, hosts, leftovers, requirements
from bench.cluster.commands import ClusterError, Command, ip
from bench.cluster.environment import environment
from bench.cluster.network import Network
from bench.cluster.quantities import parse_duration, parse_rate, parse_rates, readable_rate

ROOT = Path(__file__).parent.parent
LAUNCHER = [sys.executable, "-m", "bench.cluster"]


def launch(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*LAUNCHER, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.fixture(autouse=True)
def _logs_apart(tmp_path, monkeypatch):
    """The logs that a failed run keeps go with the test's directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module")
def root():
    if reason := requirements.lacking():
        pytest.skip(reason)


# What needs no root.


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("200mbit", 200_000_000), ("1.5Gbit", 1_500_000_000), (" 64kbit", 64_000), ("1kbit", 1000)],
)
def test_rates(text, bits_per_s):
    assert parse_rate(text) == bits_per_s
    assert parse_rate(readable_rate(bits_per_s)) == bits_per_s


@pytest.mark.parametrize(
    "text",
    ["", "200", "200mbps", "200 mbit", "-1mbit", "0mbit", "nanmbit", "1e3mbit", "0.1kbit",
     "2000gbit", "2\u0660mbit", "1mbit;reboot"],
)  # fmt: skip
def test_what_is_no_rate_is_said(text):
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


def test_one_rate_for_all_or_one_for_each():
    assert parse_rates("50mbit", 3) == (50_000_000,) * 3
    assert parse_rates("200mbit,1gbit", 2) == (200_000_000, 1_000_000_000)
    with pytest.raises(ValueError, match="2 rates.*1 or 3"):
        parse_rates("1mbit,2mbit", 3)


def test_durations():
    texts = ("300s", "300", "1.5min", "1h")
    assert [parse_duration(text) for text in texts] == [300, 300, 90, 3600]
    for text in ("", "0s", "-1s", "5m", "inf"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(text)


def test_commands_of_a_network():
    network = Network(
        owner="7-9", num_hosts=2, rates_bits_per_s=(200_000_000, 50_000_000), congestion="reno"
    )
    congestion = "/proc/sys/net/ipv4/tcp_congestion_control"
    assert [" ".join(command.argv) for command in network.commands()] == [
        "ip netns add xcoll-7-9-hub",
        "ip -n xcoll-7-9-hub link add bridge type bridge",
        "ip -n xcoll-7-9-hub link set bridge up",
        *(
            line
            for host, rate in ((0, 200_000_000), (1, 50_000_000))
            for line in (
                f"ip netns add xcoll-7-9-h{host}",
                f"ip -n xcoll-7-9-hub link add h{host} type veth"
                f" peer name eth0 netns xcoll-7-9-h{host}",
                f"ip -n xcoll-7-9-hub link set h{host} master bridge",
                f"ip -n xcoll-7-9-h{host} addr add 10.77.0.{host + 1}/24 dev eth0",
                f"tc -n xcoll-7-9-h{host} qdisc add dev eth0 root tbf"
                f" rate {rate}bit burst 128kb latency 50ms",
                f"tc -n xcoll-7-9-hub qdisc add dev h{host} root tbf"
                f" rate {rate}bit burst 128kb latency 50ms",
                f"ip netns exec xcoll-7-9-h{host} tee {congestion}",
                f"ip -n xcoll-7-9-h{host} link set lo up",
                f"ip -n xcoll-7-9-h{host} link set eth0 up",
                f"ip -n xcoll-7-9-hub link set h{host} up",
            )
        ),
    ]
    assert [command.stdin for command in network.commands() if command.stdin] == ["reno"] * 2
    assert not any(
        command.argv[0] == "tc" or command.stdin
        for command in Network(owner="7-9", num_hosts=3).commands()
    )


def test_files_of_a_host():
    network = Network(owner="7-9", num_hosts=2)
    assert etc_files.host_names(network, 1, "box") == (
        "10.77.0.2 box\n127.0.0.1 localhost\n::1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"
    )
    switch = "passwd: files\nhosts: mymachines myhostname files dns\nnetworks: files\n"
    assert etc_files.name_switch(switch) == "passwd: files\nhosts: files\nnetworks: files\n"


def test_environment_of_a_host():
    base = {
        "PATH": "/bin",
        "HTTPS_PROXY": "http://p",
        "no_proxy": "x",
        "SLURM_NNODES": "9",
        "OMPI_COMM_WORLD_SIZE": "9",
        "JAX_COORDINATOR_BIND_ADDRESS": "9",
        "JAX_PLATFORMS": "cuda",
    }
    found = environment(base, host=1, num_hosts=2, num_devices=4, coordinator="10.77.0.1:8476")
    assert found.pop("SLURM_JOB_ID").isdigit()
    assert found == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": "10.77.0.1:8476",
        "SLURM_STEP_NODELIST": "host0,host1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_process_is_known_by_its_id_and_its_start():
    assert leftovers.alive(leftovers.owner_name())
    assert not leftovers.alive(f"{os.getpid()}-1")
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stat = Path(f"/proc/{child.pid}/stat").read_text().split()
    assert stat[2] == "Z" and not leftovers.alive(f"{child.pid}-{stat[21]}")
    child.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2"], "-- python SCRIPT"),
        (["--hosts", "0", "--", "true"], "whole number from 1"),
        (["--devices", "x", "--", "true"], "whole number from 1"),
        (["--rate", "1mbit,2mbit,3mbit", "--", "true"], "3 rates"),
        (["--rate", "fast", "--", "true"], "no rate"),
        (["--rate", "", "--", "true"], "'' is no rate"),
        (["--timeout", "soon", "--", "true"], "no duration"),
        (["--loopback", "--rate", "1mbit", "--", "true"], "no --rate"),
        (["--", "no-such-program"], "no program"),
        (["true"], "unrecognized"),
    ],
)
def test_wrong_arguments_are_an_error_that_says_what_is_right(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(arguments)
    assert message in capsys.readouterr().err


def test_without_root_or_iproute2_a_message_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command_line.main(["--", "true"]) == 125
    message = capsys.readouterr().err
    assert "need root" in message and "--loopback" in message
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "find", lambda program: None)
    assert command_line.main(["--", "true"]) == 125
    assert "apt-get install iproute2" in capsys.readouterr().err


SUM = """
import socket
import jax, numpy as np
jax.distributed.initialize()
devices = jax.devices()
assert (len(devices), jax.local_device_count(), jax.process_count()) == (4, 2, 2)
mesh = jax.sharding.Mesh(np.array(devices), "d")
specs = dict(mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P())
x = jax.make_array_from_callback(
    (4,), jax.NamedSharding(mesh, jax.P("d")), lambda i: np.arange(1, 5, dtype=np.float32)[i]
)
total = jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "d"), **specs))(x)
print("SUM", float(total.addressable_shards[0].data[0]), flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.parametrize(
    "arguments", [["--loopback"], ["--rate", "200mbit,50mbit"]], ids=["loopback", "namespaces"]
)
def test_a_script_joins_the_others_without_being_told_how(arguments, tmp_path, request):
    if "--rate" in arguments:
        request.getfixturevalue("root")
    (tmp_path / "sum.py").write_text(SUM)
    done = launch(
        *("--hosts", "2", "--devices", "2", "--timeout", "100s", "--logs", str(tmp_path)),
        *(*arguments, "--", "python", str(tmp_path / "sum.py")),
    )
    assert done.returncode == 0, done.stderr
    # 1 + 2 + 3 + 4, on both hosts; the second's output is in a file alone.
    assert done.stdout.count("SUM 10.0") == 1
    assert "SUM 10.0" in (tmp_path / "host1.log").read_text()


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("exit 0", 0, []),
        ("exit $((SLURM_PROCID * 2))", 4, ["host 1 ended with exit code 2; it printed nothing\n"]),
        ("[ $SLURM_PROCID = 1 ] && kill -KILL $$; exit 0", 137, ["exit code 137 (SIGKILL)"]),
        ("[ $SLURM_PROCID = 0 ] && exit 3; sleep 99", 3, ["host 2 was ended"]),
    ],
)
def test_the_worst_exit_code_of_all(script, code, says):
    done = launch("--loopback", "--hosts", "3", "--grace", "0.5s", "--", "sh", "-c", script)
    assert done.returncode == code
    for text in says:
        assert text in done.stderr


def test_logs_that_cannot_be_kept_are_an_error_that_says_so():
    done = launch("--loopback", "--logs", "/dev/null/logs", "--", "true")
    assert (done.returncode, done.stdout) == (command_line.CANT, "")
    assert done.stderr == (
        "cluster: --logs /dev/null/logs: Not a directory; give a directory, or one that can be"
        " made\n"
    )


def test_the_first_hosts_output_is_not_touched():
    script = 'printf "out%s" $SLURM_PROCID; printf "err%s" $SLURM_PROCID >&2'
    done = launch("--loopback", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "out0")
    own = "".join(f"{x}\n" for x in done.stderr.splitlines() if x.startswith("cluster: "))
    assert done.stderr.replace(own, "") == "err0"


# What needs root.


def named(pid: int) -> list[str]:
    """The namespaces and files in /etc that a launcher made and has not removed."""
    places = (Path("/var/run/netns"), Path("/etc/netns"))
    return [str(found) for place in places for found in place.glob(f"xcoll-{pid}-*")]


def running(marker: str) -> list[str]:
    """The processes that have a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            if marker in words:
                found.append(" ".join(words))
    return found


def links() -> set[str]:
    return {line.split()[0] for line in ip("-br link").run().splitlines()}


@contextlib.contextmanager
def waiting(marker: str, *arguments: str):
    """A launcher whose hosts wait, deaf to all but SIGKILL; each has a child in another session."""
    script = f'trap "" INT TERM; setsid sleep {marker} & echo up; while :; do sleep {marker}; done'
    # Ctrl-C is heard even if whoever started the tests ignores it.
    command = ["env", "--default-signal=INT", *LAUNCHER, *arguments, "--", "bash", "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_leaves_nothing(number, root):
    marker = f"7{os.getpid()}{number:d}"  # seconds that no other process sleeps
    before = links()
    with waiting(marker, "--hosts", "2", "--rate", "10mbit") as process:
        assert until(lambda: len(running(marker)) == 4)
        assert len(named(process.pid)) == 5  # three namespaces, two with files
        process.send_signal(number)
        process.send_signal(number)  # an impatient second one
        assert process.wait(timeout=60) == 128 + number
        assert named(process.pid) == [] and running(marker) == []
    assert links() == before


def test_what_a_killed_launcher_left_is_swept_and_what_others_use_is_not(root):
    marker = f"8{os.getpid()}"
    with (
        waiting(f"{marker}1", "--hosts", "1") as killed,
        waiting(f"{marker}2", "--hosts", "1") as other,
    ):
        assert len(named(killed.pid)) == len(named(other.pid)) == 3
        killed.kill()
        killed.wait()
        assert launch("--hosts", "1", "--", "true").returncode == 0
        assert named(killed.pid) == [] and running(f"{marker}1") == []
        assert len(named(other.pid)) == 3 and running(f"{marker}2")
        other.terminate()
        assert other.wait(timeout=60) == 143
        assert named(other.pid) == []


def test_the_time_is_over(root):
    done = launch("--timeout", "1s", "--", "sh", "-c", "echo here $SLURM_PROCID; sleep 99")
    assert done.returncode == 124
    assert "1 s of --timeout are over" in done.stderr
    assert "  here 1\n" in done.stderr  # the last that the second host said


def test_a_host_that_fails_is_shown_with_its_last_lines(root, tmp_path):
    script = "[ $SLURM_PROCID = 1 ] && { seq 1000; echo the reason >&2; exit 7; }; sleep 99"
    arguments = ("--grace", "0.5s", "--logs", str(tmp_path))
    done = launch(*arguments, "--", "sh", "-c", script)
    assert done.returncode == 7
    assert "host 1 ended with exit code 7" in done.stderr
    shown = done.stderr.split("host1.log:\n")[1].splitlines()
    # The last 20 lines of 1001.
    assert shown == [*(f"  {number}" for number in range(982, 1001)), "  the reason"]
    assert (tmp_path / "host1.log").read_text().count("\n") == 1001


def test_what_fails_half_way_leaves_nothing(root, monkeypatch):
    planned = Network.commands
    broken = ip("-n no-such-namespace link")
    monkeypatch.setattr(Network, "commands", lambda self: [*planned(self), broken])
    made = []
    run = Command.run
    monkeypatch.setattr(Command, "run", lambda self: made.append(self.argv) or run(self))
    with (
        pytest.raises(ClusterError, match="no-such-namespace"),
        hosts.namespaces(1, (), "", lambda: False),
    ):
        pass
    assert any(argv[:3] == ("ip", "netns", "add") and argv[3].endswith("h0") for argv in made)
    assert named(os.getpid()) == []


def test_a_hosts_name_is_its_address_and_the_machines_files_stay(root):
    before = Path("/etc/hosts").read_bytes()
    code = "import socket; print(*map(socket.gethostbyname, [socket.gethostname(), 'host1']))"
    done = launch("--hosts", "2", "--", "python", "-c", code)
    assert (done.returncode, done.stdout) == (0, "10.77.0.1 10.77.0.2\n")
    assert Path("/etc/hosts").read_bytes() == before


def test_congestion_control(root):
    code = "cat /proc/sys/net/ipv4/tcp_congestion_control"
    done = launch("--congestion", "reno", "--", "sh", "-c", code)
    assert (done.returncode, done.stdout) == (0, "reno\n")
    assert "TCP reno" in done.stderr
    done = launch("--congestion", "fast", "--", "true")
    assert done.returncode == 125
    assert "--congestion fast: namespaces here can have reno" in done.stderr


TRANSFER = """
import os, socket, sys, time
here, source, target, count = int(os.environ["SLURM_PROCID"]), *map(int, sys.argv[1:])
if here == target:
    with socket.create_server(("", 5001)) as server, server.accept()[0] as link:
        received = 0
        while data := link.recv(1 << 16):
            received += len(data)
        end = time.monotonic()
        link.sendall(f"{received} {end}".encode())
if here == source:
    while True:
        try:
            link = socket.create_connection((f"host{target}", 5001))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    start = time.monotonic()
    link.sendall(bytes(count))
    link.shutdown(socket.SHUT_WR)
    received, end = link.recv(100).split()
    print(int(received), float(end) - start, flush=True)
"""


@pytest.mark.parametrize(
    ("source", "target", "slowest", "faster_than"),
    [(0, 1, 8, 0), (1, 0, 8, 0), (1, 2, 32, 8)],
)
def test_a_link_carries_no_more_than_its_rate(source, target, slowest, faster_than, root, tmp_path):
    """The path is as fast as its slowest link, in both directions of it; the others don't matter.

    A bucket lets the bytes of its burst pass, then its rate: through a link go at most
    burst + rate x time. Time runs from before the first byte to after the last, on one clock.
    """
    (tmp_path / "transfer.py").write_text(TRANSFER)
    num_bytes = 125_000 * slowest  # one second at this rate
    arguments = (str(number) for number in (source, target, num_bytes))
    done = launch(
        *("--hosts", "3", "--rate", "8mbit,32mbit,64mbit", "--logs", str(tmp_path)),
        *("--timeout", "60s", "--", "python", str(tmp_path / "transfer.py"), *arguments),
    )
    assert done.returncode == 0, done.stderr
    printed = (tmp_path / f"host{source}.log").read_text() if source else done.stdout
    received, duration_s = int(printed.split()[0]), float(printed.split()[1])
    assert received == num_bytes
    burst_bytes = 128 * 1024
    assert received <= 1.05 * (burst_bytes + slowest * 125_000 * duration_s)
    assert received > faster_than * 125_000 * duration_s
