"""Other libraries' ranks: told what to do, checked, and timed by themselves."""

import sys

import pytest

from bench.peers import control
from bench.peers.control import PeerError, Place, mpi_commands, started, torch_commands

HOSTS = Place(hosts=2, devices=2, address="10.77.0.1", loopback=False)
HERE = Place(hosts=1, devices=2, address="127.0.0.1", loopback=True)

# A library whose ranks know without talking what the others put in.
LIBRARY = """
import sys, time
import numpy as np
from bench.peers.serving import payload_of, serve

def prepare(collective, mine):
    if collective == "all_to_all":
        raise NotImplementedError("not in this library")
    out = sum(payload_of(rank, mine.size) for rank in range(2))
    if collective == "psum_scatter":
        out = out + 1
    return (lambda fresh: None if fresh else time.sleep(0.01)), lambda: np.asarray(out)

serve(sys.argv[1], int(sys.argv[2]), 2, "a library of this test", prepare)
"""


def test_ranks_are_asked_checked_and_timed(monkeypatch):
    def commands(python, path, place):
        return [[python, "-c", LIBRARY, path, str(rank)] for rank in range(place.num_ranks)]

    monkeypatch.setitem(control._STARTS, "library", commands)
    with started("library", sys.executable, HERE) as peer:
        assert peer.about == "a library of this test"
        assert peer.prepare("psum", 1000) is None
        start, end = peer.timed(3)
        assert 0.03 <= end - start < 1
        with pytest.raises(PeerError, match="rank 0: psum_scatter of 1000"):
            peer.prepare("psum_scatter", 1000)
        assert "not in this library" in peer.prepare("all_to_all", 1000)


def test_what_does_not_start_says_why(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named torch >&2\nexit 1\n")
    python.chmod(0o755)
    with (
        pytest.raises(PeerError, match="ended before it began.*No module named torch"),
        started("torch", str(python), HERE),
    ):
        pass


def test_ranks_are_on_the_hosts_with_the_devices():
    commands = torch_commands("/opt/python", "/tmp/ranks.sock", HOSTS)
    assert [command[2] for command in commands] == ["host0", "host0", "host1", "host1"]
    assert commands[3][3].startswith("/opt/python -m bench.peers.torch_ranks")
    assert commands[3][3].endswith("/tmp/ranks.sock 3 4")
    assert torch_commands("/opt/python", "/tmp/ranks.sock", HERE)[1][0] == "/opt/python"


def test_mpirun_enters_hosts_in_place_of_ssh(monkeypatch):
    monkeypatch.setattr(control.shutil, "which", lambda name: f"/usr/bin/{name}")
    ((*_, host, command),) = mpi_commands("/opt/python", "/tmp/ranks.sock", HOSTS)
    assert host == "host0"
    assert "/usr/bin/mpirun" in command and "-np 4 --host host0:2,host1:2" in command
    assert "bench/peers/enter.py' --mca" in command
    monkeypatch.setattr(control.shutil, "which", lambda name: None)
    with pytest.raises(PeerError, match="openmpi-bin"):
        mpi_commands("/opt/python", "/tmp/ranks.sock", HOSTS)
