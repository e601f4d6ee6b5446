"""The files that a host has in /etc instead of the machine's: `ip netns exec` mounts them there."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from pathlib import Path

from bench.cluster.network import Network

DIRECTORY = Path("/etc/netns")
_SWITCH = Path("/etc/nsswitch.conf")


def host_names(network: Network, host: int, machine: str) -> str:
    """Returns a host's /etc/hosts.

    Gloo advertises what the machine's name resolves to, which is 127.0.0.1 on most machines. The
    line with the name is the first: a machine can be called localhost.
    """
    lines = [f"{network.address(host)} {machine}", "127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{network.address(i)} host{i}" for i in range(network.num_hosts)]
    return "\n".join(lines) + "\n"


def name_switch(text: str) -> str:
    """Returns /etc/nsswitch.conf with names from /etc/hosts alone.

    Others may know the machine's name better (myhostname), or wait for a server out of reach.
    """
    return re.sub(r"(?m)^\s*hosts:.*$", "hosts: files", text)


def write(network: Network) -> None:
    """Writes the files of all hosts; `remove` takes them away."""
    machine = socket.gethostname()
    for host in range(network.num_hosts):
        directory = _make(network.namespace(host))
        (directory / "hosts").write_text(host_names(network, host, machine))
        if _SWITCH.exists():
            (directory / "nsswitch.conf").write_text(name_switch(_SWITCH.read_text()))


def remove(namespace: str) -> None:
    """Removes the files of a host, and the directory of all such files if none is left."""
    shutil.rmtree(DIRECTORY / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):  # others' files are in it, or it is gone
        DIRECTORY.rmdir()


def _make(namespace: str) -> Path:
    # Between making the parent and its child, another launcher may remove the empty parent.
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            DIRECTORY.mkdir(exist_ok=True)
            (DIRECTORY / namespace).mkdir()
            break
    return DIRECTORY / namespace
