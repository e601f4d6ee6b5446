"""The hosts of one launcher, from their making to their removal."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.cluster import etc_files, leftovers, requirements
from bench.cluster.commands import ClusterError, find
from bench.cluster.environment import PORT
from bench.cluster.network import Network, check_congestion
from bench.cluster.quantities import readable_rate
from bench.cluster.report import say


class StoppedError(Exception):
    """A signal came while the hosts were made."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where a command runs.

    Attributes:
      prefixes: for each host, what comes before the command.
      coordinator: address and port of the first host.
      network: in words.
    """

    prefixes: tuple[tuple[str, ...], ...]
    coordinator: str
    network: str


def loopback(num_hosts: int) -> Hosts:
    """Plain processes on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Hosts(
        prefixes=((),) * num_hosts,
        coordinator=f"127.0.0.1:{port}",
        network="processes on 127.0.0.1, no limit",
    )


@contextlib.contextmanager
def namespaces(
    num_hosts: int,
    rates_bits_per_s: tuple[int, ...],
    congestion: str,
    interrupted: Callable[[], bool],
) -> Iterator[Hosts]:
    """Makes hosts, after what dead launchers left is removed; removes them at the end.

    Raises:
      ClusterError: they can't be made.
      StoppedError: ``interrupted`` while they were made.
    """
    if reason := requirements.lacking():
        raise ClusterError(f"{reason}; --loopback runs plain processes, without a limit")
    if congestion:
        check_congestion(congestion)
    for line in leftovers.sweep():
        say(line)
    network = Network(
        owner=leftovers.owner_name(),
        num_hosts=num_hosts,
        rates_bits_per_s=rates_bits_per_s,
        congestion=congestion,
    )
    try:
        for command in network.commands():
            if interrupted():
                raise StoppedError
            command.run()
        etc_files.write(network)
        rates = ", ".join(map(readable_rate, rates_bits_per_s)) or "no limit"
        enter = (find("ip") or "ip", "netns", "exec")
        yield Hosts(
            prefixes=tuple((*enter, network.namespace(host)) for host in range(num_hosts)),
            coordinator=f"{network.address(0)}:{PORT}",
            network=f"{rates}, TCP {network.congestion_in_use()}",
        )
    finally:
        leftovers.remove(network.owner)
