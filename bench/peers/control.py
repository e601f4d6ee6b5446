"""Starts another library's ranks on all hosts, and tells them when it is their turn.

They are told over a Unix socket, which is the machine's and crosses no link, and wait there without
using the processor while others run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENTER = Path(__file__).with_name("enter.py")
_PORT = 29500
_MPI_SETTINGS = (
    "--allow-run-as-root --bind-to none --mca plm rsh --mca pml ob1 --mca btl self,vader,tcp"
    " --mca mpi_yield_when_idle 1"
)


class PeerError(Exception):
    """The ranks can't run here; the message says why."""


@dataclass(kw_only=True)
class Peer:
    """Another library's ranks.

    Attributes:
      name: for the table.
      about: the library and its version.
      channels: of each rank: its socket, and the lines that come from it.
    """

    name: str
    about: str
    channels: list[tuple[socket.socket, Iterator[str]]]

    def prepare(self, collective: str, num_elements: int) -> str | None:
        """Has all ranks run a collective once and check it.

        Returns:
          Why the library has no such collective, None where it has.

        Raises:
          PeerError: a result is wrong.
        """
        answers = self._ask({"do": "prepare", "collective": collective, "elements": num_elements})
        if wrong := next((a["wrong"] for a in answers if "wrong" in a), None):
            raise PeerError(f"{self.name}: {wrong}")
        return next((a["missing"] for a in answers if "missing" in a), None)

    def timed(self, calls: int) -> tuple[float, float]:
        """Has all ranks run what was prepared; the earliest start and the latest end."""
        answers = self._ask({"do": "run", "calls": calls})
        return min(a["start_s"] for a in answers), max(a["end_s"] for a in answers)

    def _ask(self, what: Mapping[str, Any]) -> list[dict[str, Any]]:
        for connection, _ in self.channels:
            connection.sendall((json.dumps(what) + "\n").encode())
        try:
            return [json.loads(next(lines)) for _, lines in self.channels]
        except (StopIteration, OSError) as err:
            raise PeerError(f"{self.name}: a rank has ended, or does not answer") from err


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks run.

    Attributes:
      hosts: of the cluster.
      devices: of each: so many ranks.
      address: the first host's.
      loopback: there are no hosts, only this machine.
    """

    hosts: int
    devices: int
    address: str
    loopback: bool

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return self.hosts * self.devices

    @property
    def interface(self) -> str:
        """The network interface that leads to the other hosts."""
        return "lo" if self.loopback else "eth0"

    def on_host(self, host: int, words: Sequence[str]) -> list[str]:
        """Returns a command that runs another on a host."""
        if self.loopback:
            return list(words)
        return [sys.executable, str(ENTER), f"host{host}", shlex.join(words)]


def torch_commands(python: str, path: str, place: Place) -> list[list[str]]:
    """Returns what starts each rank of PyTorch."""
    script = [python, "-m", "bench.peers.torch_ranks", path]
    return [
        place.on_host(rank // place.devices, [*script, str(rank), str(place.num_ranks)])
        for rank in range(place.num_ranks)
    ]


def mpi_commands(python: str, path: str, place: Place) -> list[list[str]]:
    """Returns what starts all ranks of MPI: mpirun, on the first host.

    Raises:
      PeerError: there is no mpirun.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise PeerError("mpi: mpirun was not found (apt-get install openmpi-bin)")
    words = [mpirun, *_MPI_SETTINGS.split(), "-np", str(place.num_ranks)]
    if place.loopback:
        words += ["--host", f"localhost:{place.num_ranks}"]
    else:
        words += ["--host", ",".join(f"host{i}:{place.devices}" for i in range(place.hosts))]
        words += ["--mca", "plm_rsh_agent", f"{sys.executable} {ENTER}"]
    for component in ("btl", "oob"):
        words += ["--mca", f"{component}_tcp_if_include", place.interface]
    return [
        place.on_host(0, [*words, "-x", "PYTHONPATH", python, "-m", "bench.peers.mpi_ranks", path])
    ]


_STARTS = {"torch": torch_commands, "mpi": mpi_commands}


@contextlib.contextmanager
def started(name: str, python: str, place: Place, timeout_s: float = 90.0) -> Iterator[Peer]:
    """Starts the ranks, from the first host; they end with the context.

    Args:
      name: ``"torch"`` or ``"mpi"``.
      python: the interpreter that has it.
      place: where they run.
      timeout_s: for all of them to answer.

    Raises:
      PeerError: they don't start.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xcoll-peers-")))
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path = directory / "ranks.sock"
        server.bind(str(path))
        server.listen(place.num_ranks)
        log = stack.enter_context((directory / "log").open("w+b"))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for command in _STARTS[name](python, str(path), place):
            processes.append(
                subprocess.Popen(
                    command,
                    env=_environment(place),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        try:
            deadline = time.monotonic() + timeout_s
            peer = _met(name, server, place.num_ranks, processes, deadline)
        except PeerError as err:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise PeerError(" | ".join([str(err), *last])) from err
        for connection, _ in peer.channels:
            stack.callback(connection.close)
        yield peer


def _met(
    name: str,
    server: socket.socket,
    num_ranks: int,
    processes: Sequence[subprocess.Popen[bytes]],
    deadline: float,
) -> Peer:
    """Waits until all ranks have said who they are."""
    channels: dict[int, tuple[socket.socket, Iterator[str]]] = {}
    server.settimeout(0.2)
    about = ""
    while len(channels) < num_ranks:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            codes = [process.poll() for process in processes]
            if any(code is not None for code in codes):
                raise PeerError(f"{name}: a rank ended before it began") from None
            if time.monotonic() > deadline:
                raise PeerError(f"{name}: {len(channels)} of {num_ranks} ranks have come") from None
            continue
        connection.settimeout(None)
        lines = iter(connection.makefile("r"))
        hello = json.loads(next(lines))
        channels[hello["rank"]], about = (connection, lines), hello["about"]
    return Peer(name=name, about=about, channels=[channels[r] for r in range(num_ranks)])


def _environment(place: Place) -> dict[str, str]:
    """Returns the ranks' environment, without what jax or a manager of jobs would be told."""
    others = ("SLURM_", "OMPI_", "PMIX_", "JAX_", "XLA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {
        "PYTHONPATH": str(ENTER.parents[2]),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": place.interface,
        "OMP_NUM_THREADS": "1",
    }


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
