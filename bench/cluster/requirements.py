"""Whether this machine can make hosts, and if not, what it lacks."""

from __future__ import annotations

import contextlib
import os
import sys

from bench.cluster.commands import ClusterError, Command, find, ip, tc
from bench.cluster.leftovers import owner_name
from bench.cluster.network import PREFIX


def lacking() -> str | None:
    """Returns what the machine lacks, or None if it can make hosts.

    Being root is not enough in a container, and some kernels lack a part: one of each is tried.
    """
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if find(program) is None:
            return f"{program} was not found; it is part of iproute2 (apt-get install iproute2)"
    name = f"{PREFIX}-{owner_name()}-probe"
    try:
        for command in _parts(name):
            command.run()
    except ClusterError as err:
        return f"root may not do this here, or the kernel can't: {err}"
    finally:
        with contextlib.suppress(ClusterError):
            ip(f"netns del {name}").run()
    return None


def _parts(name: str) -> tuple[Command, ...]:
    return (
        ip(f"netns add {name}"),
        ip(f"-n {name} link add bridge type bridge"),
        ip(f"-n {name} link add h0 type veth peer name eth0"),
        tc(f"-n {name} qdisc add dev h0 root tbf rate 1mbit burst 128kb latency 50ms"),
        ip(f"netns exec {name} true"),
    )
