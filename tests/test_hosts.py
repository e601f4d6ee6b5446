"""How processes meet and watch each other, in threads of one process; see test_faults.py."""

import errno
import queue
import re
import socket
import threading
import time

import numpy as np
import pytest

from xcoll.errors import StartError
from xcoll.hosts import gloo, joining, meeting, places
from xcoll.hosts.bounds import Bounds
from xcoll.hosts.joining import join
from xcoll.hosts.lines import Line
from xcoll.hosts.members import Member
from xcoll.hosts.relay import Relay
from xcoll.hosts.start import initialize
from xcoll.hosts.watch import Watch

BOUNDS = {
    "initialization_timeout": 60,
    "heartbeat_timeout_seconds": 15,
    "collective_timeout_seconds": 300,
    "shutdown_timeout_seconds": 300,
    "stuck_timeout_seconds": 60,
}


def member(process_id, num_processes=2, versions="jax 1", pid=7) -> Member:
    return Member(
        process_id=process_id,
        num_processes=num_processes,
        host=f"box{process_id}",
        pid=pid,
        versions=versions,
    )


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def together(*calls):
    """Makes all calls at the same time; returns what they return or raise, in order."""
    found = [queue.SimpleQueue() for _ in calls]

    def make(call, result):
        try:
            result.put(call())
        except Exception as error:
            result.put(error)

    threads = [
        threading.Thread(target=make, args=pair, daemon=True)
        for pair in zip(calls, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    return [result.get(timeout=30) for result in found]


def meet(listener, here, *others, timeout_s=10.0):
    """What the meeting and each that joins it say."""
    return together(
        lambda: meeting.Meeting(here, listener).hold(timeout_s),
        *(
            lambda other=other: join(other, address(listener), timeout_s=timeout_s, silence_s=5)
            for other in others
        ),
    )


def close(come, *joined):
    for _, line in [*come.values(), *joined]:
        line.close()


def test_all_meet_and_know_each_other(listener):
    come, *joined = meet(listener, member(0, 3), member(1, 3), member(2, 3))
    assert sorted(come) == [1, 2]
    close(come, *joined)
    for all_members, _ in joined:
        assert sorted(all_members) == [0, 1, 2]
        assert all_members[1].address == "127.0.0.1" and all_members[2].host == "box2"
    with pytest.raises(OSError):
        listener.getsockname()  # the port is free for jax


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ((member(1, 3),), "don't agree on num_processes: process 0 .* says 2; process 1 .* says 3"),
        ((member(1, versions="jax 2"),), "different versions: process 0 .* has jax 1; .* jax 2"),
        ((member(0, pid=8),), "2 processes have process_id=0: pid 7 on host 'box0' and pid 8"),
        ((member(1, 3), member(1, 3, pid=8)), "2 processes have process_id=1: pid 7 on"),
    ],
)
def test_a_disagreement_is_said_to_all(listener, others, says):
    start = time.monotonic()
    errors = meet(listener, member(0, max(2, len(others) + 1)), *others)
    for error in errors:
        assert isinstance(error, StartError) and re.search(says, str(error)), error
    assert time.monotonic() - start < 8, "not only when the time is over"


def test_who_does_not_come_is_named_to_all(listener):
    errors = meet(listener, member(0, 4), member(2, 4), timeout_s=0.5)
    for error in errors:
        assert isinstance(error, StartError)
        assert "processes 1, 3 of 4 did not come within 0.5 s" in str(error)
        assert "process 2 (host 'box2', 127.0.0.1, pid 7)" in str(error)


def test_of_very_many_the_first_are_named(listener):
    start = time.monotonic()
    found = meet(listener, member(0, 10**12), member(3, 10**12), timeout_s=0.5)
    for error in found:
        assert isinstance(error, StartError)
        assert "processes 1, 2, 4, 5, 6, 7, 8, 9 and 999999999990 others of 10000" in str(error)
    assert time.monotonic() - start < 10


def test_a_problem_that_shows_late_is_said(listener):
    """More so than that others are missing: here after half of the time."""
    found = together(
        lambda: meeting.Meeting(member(0, 3), listener).hold(0.8),
        lambda: time.sleep(0.4) or join(member(1, 2), address(listener), timeout_s=5, silence_s=5),
    )
    assert all("don't agree on num_processes" in str(error) for error in found), found


class Full:
    """A socket that listens, and takes three connections before a descriptor has to go."""

    def __init__(self, listener):
        self.listener, self.calls = listener, 0

    def __getattr__(self, name):
        return getattr(self.listener, name)

    def accept(self):
        self.calls += 1
        if self.calls == 4:
            raise OSError(errno.EMFILE, "too many open files")
        return self.listener.accept()


def test_more_strangers_than_descriptors(listener):
    """Those go that have not said who they are."""
    strangers = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(3)]
    come, joined = together(
        lambda: meeting.Meeting(member(0), Full(listener)).hold(10.0),
        lambda: join(member(1), address(listener), timeout_s=10.0, silence_s=5),
    )
    assert set(come) == {1}
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""
    close(come, joined)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x12\x04"])
def test_another_program_on_the_port(listener, answer, monkeypatch):
    """Silent, of the web, or gRPC, as where a run is already going on."""
    monkeypatch.setattr(joining, "_ANSWER_S", 0.5)
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            connection, _ = listener.accept()
            connection.sendall(answer)
            if not answer:
                stop.wait(30)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(StartError, match="found at .* a program that is not process 0 of this run"):
        join(member(1), address(listener), timeout_s=1.0, silence_s=5)
    stop.set()


def test_strangers_do_not_disturb_a_meeting(listener):
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with socket.create_connection(listener.getsockname()):  # and one that says nothing
            come, joined = meet(listener, member(0), member(1))
    close(come, joined)
    assert sorted(come) == [1]


def test_a_port_that_becomes_free_is_taken(listener):
    port = listener.getsockname()[1]
    threading.Timer(0.3, listener.close).start()
    meeting.take_port("127.0.0.1", port, timeout_s=10.0).close()


def test_addresses():
    with pytest.raises(ValueError, match="no port from 1 to 65535; write HOST:PORT"):
        places.split("10.0.0.1")
    assert places.split("box:80") == ("box", 80)


@pytest.fixture
def watching():
    """Makes process 0 and process 1 of a run, which watch each other once they are started."""
    made = []

    def make(silence_s=0.6):
        ends = socket.socketpair()
        losses = queue.SimpleQueue()
        watches = [
            Watch(member(i), {1 - i: Line(end)}, silence_s=silence_s, on_loss=lambda: losses.put(1))
            for i, end in enumerate(ends)
        ]
        made.append((watches, ends))
        return watches, losses, ends

    yield make
    for watches, ends in made:
        for watch, end in zip(watches, ends, strict=True):
            watch.close()
            end.close()


def reasons(watch):
    assert watch.judged.wait(10)
    return dict(watch.verdict.reasons)


def test_while_both_beat_nobody_is_lost_and_the_end_is_reached_together(watching):
    watches, losses, _ = watching()
    for watch in watches:
        watch.start()
    watches[1].done()
    time.sleep(1.5)  # more than the silence that is allowed
    assert losses.empty() and not watches[1].all_done.is_set()
    watches[0].done()
    assert all(watch.all_done.wait(10) for watch in watches)
    for watch in watches:
        watch.close()
    assert [watch.verdict for watch in watches] == [None, None]


@pytest.mark.parametrize("here", [0, 1])
def test_silence_is_a_loss_after_its_time(watching, here):
    watches, losses, _ = watching()
    start = time.monotonic()
    watches[here].start()  # the other never says anything
    found = reasons(watches[here])
    assert time.monotonic() - start >= 0.6
    assert list(found) == [1 - here] and "has said nothing for 0." in found[1 - here]
    assert watches[here].verdict.alone and losses.get(timeout=5)
    watches[here].close()


@pytest.mark.parametrize("here", [0, 1])
def test_a_closed_connection_is_a_loss_at_once(watching, here):
    watches, _, ends = watching(silence_s=1000.0)
    watches[here].start()
    ends[1 - here].close()
    assert "its connection closed" in reasons(watches[here])[1 - here]
    assert not watches[here].verdict.alone
    watches[here].close()


@pytest.mark.parametrize("here", [0, 1])
def test_why_a_process_stops_is_told(watching, here):
    watches, _, _ = watching()
    for watch in watches:
        watch.start()
    watches[here].leave("it stopped with ValueError: no", linger_s=0.3)
    watches[here].close()
    assert reasons(watches[1 - here]) == {here: "it stopped with ValueError: no"}
    watches[1 - here].close()


def test_a_relay_passes_on_both_ways_and_hides_the_end(listener):
    relay = Relay(listener.getsockname(), 5.0)
    with socket.create_connection(places.split(relay.address)) as client:
        client.sendall(b"question")
        server, _ = listener.accept()
        assert server.recv(100) == b"question"
        server.sendall(b"answer")
        assert client.recv(100) == b"answer"
        server.close()
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(100)
    relay.freeze()


@pytest.mark.parametrize("known", [True, False])
def test_only_the_connections_with_a_given_address_are_broken(listener, known):
    port = listener.getsockname()[1]
    # As in C: family, port, IPv4 address, and zeros.
    kernel = b"\x02\x00" + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
    with socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with (
            server,
            socket.create_server(("127.0.0.1", 0)) as other,
            socket.create_connection(other.getsockname()) as spared,
        ):
            found = gloo.break_connections(b"xx" + (kernel if known else bytes(16)))
            assert found == (2 if known else 0)  # both ends are of this process
            client.settimeout(0.3)
            if known:
                assert client.recv(1) == b""
            else:
                with pytest.raises(TimeoutError):
                    client.recv(1)
            with other.accept()[0] as accepted:
                spared.sendall(b"x")
                assert accepted.recv(1) == b"x"


def test_bounds_are_set_where_the_user_has_not(monkeypatch):
    import jax

    before = jax.config.jax_enable_preemption_service
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append((name, value)))
    set_to: list = []
    environment = {"XLA_FLAGS": "--xla_a=1"}
    Bounds(**BOUNDS).apply(environment)
    assert environment["XLA_FLAGS"] == "--xla_a=1 --xla_cpu_collective_timeout_seconds=300"
    assert set_to == [("jax_enable_preemption_service", False)]
    own = {
        "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=9",
        "JAX_ENABLE_PREEMPTION_SERVICE": "1",
    }
    kept = dict(own)
    Bounds(**BOUNDS).apply(own)
    assert own == kept and len(set_to) == 1
    assert jax.config.jax_enable_preemption_service == before


def test_part_of_a_second_is_no_zero():
    environment: dict[str, str] = {"JAX_ENABLE_PREEMPTION_SERVICE": "1"}
    Bounds(**BOUNDS | {"collective_timeout_seconds": 0.5}).apply(environment)
    assert environment["XLA_FLAGS"] == "--xla_cpu_collective_timeout_seconds=1"


@pytest.mark.parametrize("value", [0, -1, None, "5", True, float("nan"), float("inf")])
def test_a_bound_that_is_none(value):
    with pytest.raises(ValueError, match=r"initialize\(heartbeat_timeout_seconds=.*above 0; leave"):
        Bounds(**BOUNDS | {"heartbeat_timeout_seconds": value})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("box:1", 2, 2), r"\(num_processes=2, process_id=2\): ids run from 0"),
        (("box:1", "2", 0), r"\(num_processes='2', process_id=0\): must be whole numbers"),
        (("box:1", 2, 0.0), r"\(num_processes=2, process_id=0.0\): must be whole numbers"),
        (("box", 2, 0), r"\(coordinator_address='box'\): no port from 1 to 65535"),
        (("box:65536", 2, 0), r"\(coordinator_address='box:65536'\): no port from 1 to 65535"),
    ],
)
def test_arguments_that_are_wrong(arguments, says):
    with pytest.raises(ValueError, match="initialize" + says):
        initialize(*arguments)


def test_an_address_to_listen_on_that_is_none():
    with pytest.raises(ValueError, match=r"initialize\(coordinator_bind_address='box'\): no port"):
        initialize("box:1", 2, 0, coordinator_bind_address="box")


def test_numbers_of_numpy_are_numbers(listener):
    """They can't be sent as they are; that nobody is there is found out with them."""
    with pytest.raises(StartError, match="process 1 .* did not reach process 0"):
        here = np.int64(1)
        initialize("no.such.host.invalid:1", np.int64(2), here, initialization_timeout=0.1)
