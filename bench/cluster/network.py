"""The network: a namespace for each host, one for the bridge between them, rates on the links.

No device is ever outside of these namespaces, so that networks of several launchers have the same
addresses without meeting, and all goes when the namespaces go.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.cluster.commands import ClusterError, Command, ip, tc

MOST_HOSTS = 200
PREFIX = "xcoll"
# The kernel hands over up to 64 KiB at once, which has to fit into the burst.
_LIMIT = "burst 128kb latency 50ms"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@dataclass(frozen=True, kw_only=True)
class Network:
    """What is made for one launcher.

    Attributes:
      owner: names the launcher's process in the names of the namespaces.
      num_hosts: hosts, each with one link to the bridge.
      rates_bits_per_s: what each host's link carries, either way; empty: no limit.
      congestion: TCP's congestion control on all hosts; empty: as the kernel gives it.
    """

    owner: str
    num_hosts: int
    rates_bits_per_s: tuple[int, ...] = ()
    congestion: str = ""

    @property
    def hub(self) -> str:
        """The namespace with the bridge."""
        return f"{PREFIX}-{self.owner}-hub"

    def namespace(self, host: int) -> str:
        """The namespace of a host."""
        return f"{PREFIX}-{self.owner}-h{host}"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def commands(self) -> list[Command]:
        """Returns what makes the network."""
        commands = [
            ip(f"netns add {self.hub}"),
            ip(f"-n {self.hub} link add bridge type bridge"),
            ip(f"-n {self.hub} link set bridge up"),
        ]
        for host in range(self.num_hosts):
            commands += self._host(host)
        return commands

    def _host(self, host: int) -> list[Command]:
        here = self.namespace(host)
        port = f"h{host}"
        commands = [
            ip(f"netns add {here}"),
            ip(f"-n {self.hub} link add {port} type veth peer name eth0 netns {here}"),
            ip(f"-n {self.hub} link set {port} master bridge"),
            ip(f"-n {here} addr add {self.address(host)}/24 dev eth0"),
        ]
        if self.rates_bits_per_s:
            rate = f"rate {self.rates_bits_per_s[host]}bit {_LIMIT}"
            # The host's own end limits what it sends, the bridge's end what it receives.
            commands += [
                tc(f"-n {here} qdisc add dev eth0 root tbf {rate}"),
                tc(f"-n {self.hub} qdisc add dev {port} root tbf {rate}"),
            ]
        if self.congestion:
            commands.append(
                Command(("ip", "netns", "exec", here, "tee", str(_CONGESTION)), self.congestion)
            )
        return [
            *commands,
            ip(f"-n {here} link set lo up"),
            ip(f"-n {here} link set eth0 up"),
            ip(f"-n {self.hub} link set {port} up"),
        ]

    def congestion_in_use(self) -> str:
        """Returns TCP's congestion control on the hosts, once they are made."""
        return ip(f"netns exec {self.namespace(0)} cat {_CONGESTION}").run().strip()


def check_congestion(name: str) -> None:
    """Raises a `ClusterError` if namespaces can't have TCP's congestion control of this name."""
    allowed = _ALLOWED.read_text().split() if _ALLOWED.exists() else []
    if name not in allowed:
        raise ClusterError(
            f"--congestion {name}: namespaces here can have {', '.join(allowed) or 'none'}"
            " (net.ipv4.tcp_allowed_congestion_control)"
        )
