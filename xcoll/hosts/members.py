"""Who takes part in a run, as messages and sentences name them."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from xcoll.units import counted

PROTOCOL = 1
"""Of the messages between processes; another number is another version of this package."""

_MOST_NAMED = 8
_PACKAGES = ("jax", "jaxlib", "jax-xcoll")
_KINDS = {
    "process_id": int,
    "num_processes": int,
    "host": str,
    "address": str,
    "pid": int,
    "versions": str,
}


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a run.

    Attributes:
      process_id: its number in the run.
      num_processes: how many it was told there are.
      host: the name of its machine.
      address: its network address as process 0 sees it; empty for process 0.
      pid: its number on its machine.
      versions: of the packages that have to be the same in all processes.
    """

    process_id: int
    num_processes: int
    host: str
    address: str = ""
    pid: int
    versions: str

    def __str__(self) -> str:
        at = f", {self.address}" if self.address else ""
        return f"process {self.process_id} (host {self.host!r}{at}, pid {self.pid})"

    def message(self) -> dict[str, Any]:
        """Returns what it sends to introduce itself."""
        return {"xcoll": PROTOCOL, **asdict(self)}


def this_process(process_id: int, num_processes: int) -> Member:
    """Returns the member that this process is."""
    return Member(
        process_id=process_id,
        num_processes=num_processes,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    )


def read_member(message: dict[str, Any], address: str = "") -> Member | None:
    """Returns who a message introduces, or None if it introduces nobody.

    Args:
      message: as `Member.message` makes it.
      address: where it came from, in place of what it says.
    """
    fields: dict[str, Any] = {name: message.get(name) for name in _KINDS}
    if message.get("xcoll") != PROTOCOL:
        return None
    if any(type(value) is not _KINDS[name] for name, value in fields.items()):
        return None
    return Member(**(fields | ({"address": address} if address else {})))


def disagreement(members: Iterable[Member]) -> str | None:
    """Returns what members say that can't be true of one run, or None if all fits."""
    members = sorted(members, key=lambda m: (m.process_id, m.host, m.pid))
    by_id: dict[int, list[Member]] = {}
    for member in members:
        by_id.setdefault(member.process_id, []).append(member)
    if len({member.num_processes for member in members}) > 1:
        said = "; ".join(f"{member} says {member.num_processes}" for member in members)
        return f"the processes don't agree on num_processes: {said}"
    for process_id, same in by_id.items():
        if len(same) > 1:
            at = " and ".join(f"pid {m.pid} on host {m.host!r}" for m in same)
            return f"{len(same)} processes have process_id={process_id}: {at}"
    if beyond := [m for m in members if not 0 <= m.process_id < m.num_processes]:
        return f"{beyond[0]} is not among the {beyond[0].num_processes} processes of the run"
    if len({member.versions for member in members}) > 1:
        said = "; ".join(f"{member} has {member.versions}" for member in members)
        return f"the processes have different versions: {said}"
    return None


def named(process_ids: Iterable[int], count: int) -> str:
    """Writes the numbers of so many processes: of very many the first ones, and no more is read.

    >>> named([2], 1), named([0, 2], 2), named(range(1, 10**9), 10**9 - 1)
    ('process 2', 'processes 0, 2', 'processes 1, 2, 3, 4, 5, 6, 7, 8 and 999999991 others')
    """
    first = list(islice(process_ids, _MOST_NAMED))
    others = count - len(first)
    more = f" and {counted(others, 'other')}" if others else ""
    return f"process{'es' if count > 1 else ''} {', '.join(map(str, first))}{more}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
