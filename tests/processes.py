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
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
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
