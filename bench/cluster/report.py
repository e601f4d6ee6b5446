"""What the launcher says: on stderr, so that the first host's output stays as it is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.processes import Process

_LAST_LINES = 20
_LAST_BYTES = 16384


def say(text: str) -> None:
    """Prints a line of the launcher's own; whoever read them may have gone."""
    with contextlib.suppress(OSError):
        print(f"cluster: {text}", file=sys.stderr, flush=True)


def failures(processes: Sequence[Process]) -> None:
    """Says which hosts failed or had to be ended, and the last that they printed."""
    for process in processes:
        if process.exit_code:
            lines, end = "", ""
            if process.log:
                with contextlib.suppress(OSError):
                    lines = last_lines(process.log)
                end = f"; its last lines, of {process.log}:" if lines else "; it printed nothing"
            say(f"host {process.host} {_how(process)}{end}")
            with contextlib.suppress(OSError):
                sys.stderr.write(lines)
                sys.stderr.flush()


def last_lines(log: Path) -> str:
    """Returns the last lines of a file, however long it is."""
    with log.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - _LAST_BYTES))
        text = file.read().decode(errors="replace")
    return "".join(f"  {line}\n" for line in text.splitlines()[-_LAST_LINES:])


def _how(process: Process) -> str:
    code = process.exit_code or 0
    if process.ended:
        return "was ended, since it still ran"
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"ended with exit code {code} ({signal.Signals(code - 128).name})"
    return f"ended with exit code {code}"
