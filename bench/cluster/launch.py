"""Runs a command on each of several hosts, and leaves nothing behind, however that ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import processes
from bench.cluster.commands import ClusterError
from bench.cluster.environment import environment
from bench.cluster.hosts import Hosts, StoppedError, loopback, namespaces
from bench.cluster.report import failures, say

TIMED_OUT = 124
"""The exit code where the time is over, as that of timeout(1)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to make, and how long to wait.

    Attributes:
      num_hosts: hosts.
      num_devices: virtual CPU devices of each.
      rates_bits_per_s: what each host's link carries, either way; empty: no limit.
      congestion: TCP's congestion control; empty: as the kernel gives it.
      loopback: plain processes on 127.0.0.1 instead of hosts.
      timeout_s: after this all are ended; None: never.
      grace_s: after one fails, the others have this long to end by themselves.
      logs: where the output of all hosts but the first is written; None: in a new directory, which
        is kept if one fails.
    """

    num_hosts: int
    num_devices: int
    rates_bits_per_s: tuple[int, ...] = ()
    congestion: str = ""
    loopback: bool = False
    timeout_s: float | None = None
    grace_s: float = 30.0
    logs: Path | None = None


def run(command: Sequence[str], settings: Settings) -> int:
    """Runs a command on all hosts; the first one's output is the launcher's.

    Returns:
      The highest exit code of those that ended by themselves, 128 and its number for a signal;
      124 if the time was over; 128 and its number if a signal stopped the launcher.

    Raises:
      ClusterError: the hosts can't be made, or the directory of the logs.
    """
    with processes.Signals() as signals, contextlib.ExitStack() as files:
        logs = settings.logs
        if logs is None:
            logs = Path(tempfile.mkdtemp(prefix="xcoll-cluster-"))
            files.callback(shutil.rmtree, logs, ignore_errors=True)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise ClusterError(
                f"--logs {logs}: {err.strerror}; give a directory, or one that can be made"
            ) from err
        try:
            how, ended = _on_hosts(command, settings, logs, signals)
        except StoppedError:
            how, ended = "interrupted", []
        if how == "interrupted":
            number = signals.received or signal.SIGINT
            say(f"stopped by {signal.Signals(number).name}")
            return 128 + number
        worst = max((process.exit_code or 0 for process in ended if not process.ended), default=0)
        if how == "timeout":
            say(f"the {settings.timeout_s:g} s of --timeout are over")
            worst = TIMED_OUT
        if worst:
            files.pop_all()
        failures(ended)
        return worst


def _on_hosts(
    command: Sequence[str], settings: Settings, logs: Path, signals: processes.Signals
) -> tuple[str, list[processes.Process]]:
    """Makes the hosts and runs the command; all has ended and gone on return."""

    def interrupted() -> bool:
        return signals.received is not None

    with contextlib.ExitStack() as stack:
        if settings.loopback:
            hosts = loopback(settings.num_hosts)
        else:
            hosts = stack.enter_context(
                namespaces(
                    settings.num_hosts,
                    settings.rates_bits_per_s,
                    settings.congestion,
                    interrupted,
                )
            )
        made = (_counted(settings.num_hosts, "host"), _counted(settings.num_devices, "device"))
        say(f"{' x '.join(made)}, {hosts.network}")
        started: list[processes.Process] = []
        try:
            for host in range(settings.num_hosts):
                started.append(_start(command, host, settings, hosts, logs))
            how = processes.wait(
                started,
                timeout_s=settings.timeout_s,
                grace_s=settings.grace_s,
                interrupted=interrupted,
            )
        finally:
            asked = signal.SIGINT if signals.received == signal.SIGINT else signal.SIGTERM
            processes.end(started, asked)
    return how, started


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _start(
    command: Sequence[str], host: int, settings: Settings, hosts: Hosts, logs: Path
) -> processes.Process:
    return processes.start(
        (*hosts.prefixes[host], *command),
        host=host,
        log=logs / f"host{host}.log" if host else None,
        environment=environment(
            os.environ,
            host=host,
            num_hosts=settings.num_hosts,
            num_devices=settings.num_devices,
            coordinator=hosts.coordinator,
        ),
    )
