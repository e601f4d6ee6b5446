"""Runs one script in several real processes that find each other over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(script: str, num_processes: int = 2, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Runs ``script`` with its number and a free port as arguments; all have ended on return.

    Each prints ``RESULTS`` and a JSON object on one line, and exits with 0.
    """
    port = _free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(i), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(num_processes)
    ]
    try:
        outputs = [p.communicate(timeout=timeout_s) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    found = []
    for p, (out, err) in zip(processes, outputs, strict=True):
        assert p.returncode == 0, err
        line = next(line for line in out.splitlines() if line.startswith("RESULTS"))
        found.append(json.loads(line.removeprefix("RESULTS")))
    return found


def run_distributed(script: str, *arguments: str, num_processes: int = 2) -> None:
    """Runs a script file with ``--distributed HOST:PORT,N,I`` in each process; all exit with 0."""
    address = f"127.0.0.1:{_free_port()}"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, script, *arguments),
                *("--distributed", f"{address},{num_processes},{index}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(num_processes)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * num_processes, printed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
