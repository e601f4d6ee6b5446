"""What a launcher made, found by its name: removed at the end, or once the launcher is dead."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from bench.cluster import etc_files
from bench.cluster.commands import ClusterError, ip
from bench.cluster.network import PREFIX

_NAMESPACES = Path("/var/run/netns")
_NAME = re.compile(rf"{PREFIX}-(\d+-\d+)-(?:hub|probe|h\d+)", re.ASCII)
_PATIENCE_S = 10.0


def owner_name() -> str:
    """Returns the name of this process: its id and, since ids are used again, when it started."""
    return f"{os.getpid()}-{_started(os.getpid())}"


def alive(owner: str) -> bool:
    """Whether the process of this name still runs."""
    pid, started = owner.split("-")
    return _started(int(pid)) == started


def left() -> dict[str, set[str]]:
    """Returns the names of the namespaces that launchers made, by owner."""
    found: dict[str, set[str]] = {}
    for directory in (_NAMESPACES, etc_files.DIRECTORY):
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if match := _NAME.fullmatch(name):
                    found.setdefault(match[1], set()).add(name)
    return found


def remove(owner: str) -> None:
    """Ends what runs in an owner's namespaces and removes them, with their files.

    Raises:
      ClusterError: something is left; all else is removed first.
    """
    names = left().get(owner, set())
    _end_processes(names)
    for name in names:
        # Another launcher may sweep the same: what counts is what is left.
        with contextlib.suppress(ClusterError):
            ip(f"netns del {name}").run()
        etc_files.remove(name)
    if still := left().get(owner):
        raise ClusterError(f"could not remove {', '.join(sorted(still))}")


def sweep() -> list[str]:
    """Removes what dead launchers left; returns what there was, in words."""
    said = []
    for owner in left():
        if not alive(owner):
            pid = owner.partition("-")[0]
            try:
                remove(owner)
                said.append(f"removed what process {pid} had left")
            except ClusterError as err:
                said.append(f"of process {pid}, which is dead: {err}")
    return said


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty if there is none, or it is a zombie."""
    try:
        # The second field, the program's name in brackets, may hold blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _end_processes(namespaces: set[str]) -> None:
    """Kills what runs in namespaces, also what left its process group; waits until it has ended."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        pids = [pid for name in namespaces for pid in _processes(name)]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(namespace: str) -> list[int]:
    if not (_NAMESPACES / namespace).exists():
        return []
    try:
        return [int(pid) for pid in ip(f"netns pids {namespace}").run().split()]
    except ClusterError:  # it has gone meanwhile
        return []
