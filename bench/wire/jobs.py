"""What one cluster measures, as data for the scripts on its hosts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from xcoll import records

VARIANTS = ("lax", "exact", "bfloat16", "int8", "int4")
"""jax.lax itself, and xcoll: exact, or with a codec between hosts."""

AXES = ("host", "device")
"""The mesh's axes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one cluster measures.

    Attributes:
      hosts: how many.
      devices: of each.
      rate_bits_per_s: of each host's link, one way.
      loopback: there are no links; the rate is only planned for.
      collectives: jax.lax's names.
      payloads_bytes: float32 payloads of each device.
      variants: some of `VARIANTS`.
      rounds: timed turns of each variant.
      calls: calls in a turn, one after another.
      cell_s: rounds become fewer, 3 at the least, where they would take longer than this.
      profile: file of a calibrated topology; empty: planned for the rate.
      tune_s: the cluster is calibrated first, for so many seconds; 0: not.
      torch_python: an interpreter with PyTorch; empty: left out.
      mpi_python: an interpreter with mpi4py; empty: left out.
      breakdown: show where the time goes even where no target is missed.
    """

    hosts: int
    devices: int
    rate_bits_per_s: int
    loopback: bool
    collectives: tuple[str, ...]
    payloads_bytes: tuple[int, ...]
    variants: tuple[str, ...]
    rounds: int
    calls: int
    cell_s: float
    profile: str
    tune_s: float
    torch_python: str
    mpi_python: str
    breakdown: bool

    @property
    def num_ranks(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Hosts, devices of each, rate in bits per second."""
        return self.hosts, self.devices, self.rate_bits_per_s

    @property
    def topology(self) -> str:
        """The topology's text, without a profile."""
        return f"{self.hosts}*cpu:{self.devices}@{self.rate_bits_per_s / 1e6:.12g}Mbit"

    def to_json(self) -> str:
        """Returns JSON; `read_job` reads it back."""
        return json.dumps(asdict(self))


def read_job(path: Path) -> Job:
    """Reads a job from a file.

    Raises:
      ValueError: there is none in it.
    """
    job: Job = records.read(Job, json.loads(path.read_text()), "job")
    return job


def parse_cluster(text: str) -> tuple[int, int]:
    """Returns hosts and devices of each.

    Raises:
      ValueError: it is no such text, or one host.

    Example:
      >>> parse_cluster("2x4")
      (2, 4)
    """
    found = re.fullmatch(r"([0-9]{1,3})x([0-9]{1,3})", text.strip(), re.ASCII)
    hosts, devices = (int(found[1]), int(found[2])) if found else (0, 0)
    if hosts < 2 or devices < 1:
        raise ValueError(f"{text!r}: write 2x4 for 2 hosts with 4 devices each; at least 2 hosts")
    return hosts, devices
