"""What times depend on beside the program: the machine, its links, the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from bench.cluster.quantities import readable_rate
from bench.timing.meeting import Meeting

_CPUINFO = Path("/proc/cpuinfo")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that stand above a table.

    Attributes:
      cpu: the processor's model.
      cores: that this process may run on.
      kernel: name and release.
      python: version.
      jax: version.
      jaxlib: version.
      device_kind: of the devices.
      processes: of the run.
      devices: of all processes.
      congestion: TCP's congestion control on each process; empty where it is not known.
      rates_bits_per_s: what each process's network is limited to; None where it is not.
    """

    cpu: str
    cores: int
    kernel: str
    python: str
    jax: str
    jaxlib: str
    device_kind: str
    processes: int
    devices: int
    congestion: tuple[str, ...]
    rates_bits_per_s: tuple[int | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns what a JSON file keeps."""
        return asdict(self)

    def __str__(self) -> str:
        hosts = f"{self.processes} x " if self.processes > 1 else ""
        rates = dict.fromkeys(
            "no limit" if rate is None else readable_rate(rate) for rate in self.rates_bits_per_s
        )
        congestion = "/".join(dict.fromkeys(self.congestion)) or "unknown"
        return (
            f"{self.cpu}, {self.cores} cores, {self.kernel}; Python {self.python},"
            f" jax {self.jax}, jaxlib {self.jaxlib}; {hosts}{self.devices // self.processes}"
            f" {self.device_kind} devices; links: {', '.join(rates)}; TCP {congestion}"
        )


def machine(meeting: Meeting) -> Machine:
    """Returns the facts, on every process the same; all of them have to call this."""
    everyones = meeting.share([_congestion(), _rate_bits_per_s()])
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        device_kind=jax.devices()[0].device_kind,
        processes=meeting.num_processes,
        devices=jax.device_count(),
        congestion=tuple(congestion for congestion, _ in everyones if congestion),
        rates_bits_per_s=tuple(rate for _, rate in everyones),
    )


def _cpu() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _congestion() -> str:
    # Of the network namespace that this process is in.
    return _CONGESTION.read_text().strip() if _CONGESTION.exists() else ""


def _rate_bits_per_s() -> int | None:
    """Returns the limit of the slowest interface of this process's network, None without one."""
    if (tc := shutil.which("tc")) is None:
        return None
    done = subprocess.run([tc, "-j", "qdisc", "show"], capture_output=True, text=True, check=False)
    return read_rate(done.stdout) if done.returncode == 0 else None


def read_rate(text: str) -> int | None:
    """Returns the lowest limit, in bits per second, of what ``tc -j qdisc show`` prints.

    Example:
      >>> read_rate('[{"kind": "tbf", "options": {"rate": 25000000}}, {"kind": "noqueue"}]')
      200000000
    """
    try:
        queues = json.loads(text or "[]")
    except json.JSONDecodeError:
        return None
    # tc counts in bytes.
    rates = [8 * queue["options"]["rate"] for queue in queues if "rate" in queue.get("options", {})]
    return min(rates, default=None)
