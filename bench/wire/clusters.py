"""Runs jobs on clusters, one after another."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import cluster
from bench.wire.jobs import Job

ROOT = Path(__file__).parent.parent.parent


class FailedError(Exception):
    """A cluster's scripts did not end well.

    Attributes:
      code: the exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def measured(job: Job, congestion: str, timeout_s: float) -> dict[str, Any]:
    """Makes a cluster, measures a job on it, removes it.

    Args:
      job: what to measure.
      congestion: TCP's congestion control; empty: as the kernel gives it.
      timeout_s: after this it is ended.

    Returns:
      The figures that the first host wrote.

    Raises:
      FailedError: a host failed, or it was stopped; what hosts said is on stderr.
      ClusterError: the hosts can't be made.
    """
    with tempfile.TemporaryDirectory(prefix="xcoll-wire-") as directory:
        path, out = Path(directory, "job.json"), Path(directory, "out.json")
        path.write_text(job.to_json())
        settings = cluster.Settings(
            num_hosts=job.hosts,
            num_devices=job.devices,
            rates_bits_per_s=() if job.loopback else (job.rate_bits_per_s,) * job.hosts,
            congestion=congestion,
            loopback=job.loopback,
            timeout_s=timeout_s,
        )
        command = [sys.executable, "-m", "bench.wire.host", str(path), str(out)]
        with _importable():
            code = cluster.run(command, settings)
        if code or not out.exists():
            raise FailedError(code or 1)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Has the hosts' scripts find this package from any directory."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
