"""Runs one script in several real processes that find each other over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_START = """
import json, sys
import jax

here, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", count, here, initialization_timeout=60)
results = {}
"""
_END = """
print("RESULTS" + json.dumps(results), flush=True)
jax.distributed.shutdown()
"""


def run(script: str, num_processes: int = 2, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Runs ``script`` in processes of two devices that have joined; all have ended on return.

    It finds its number in ``here``, and leaves in ``results``, by name, what JSON can hold.

    Returns:
      What each process left.
    """
    port = _free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _START + script + _END, str(i), str(port), str(num_processes)],
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
