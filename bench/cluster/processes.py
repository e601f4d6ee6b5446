"""The processes of the hosts: started, waited for, and ended with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bench.cluster.commands import find

_POLL_S = 0.05
_PATIENCE_S = 3.0


@dataclass(kw_only=True)
class Process:
    """A host's process, the leader of a session of its own.

    Attributes:
      host: the index of the host.
      popen: the process; not waited for before its group is killed, so that nobody else can have
        been given the group's number.
      log: where its output is; None: it writes where the launcher writes.
      exit_code: None while it runs; 128 and the signal's number if that ended it.
      ended: True if the launcher ended it.
    """

    host: int
    popen: subprocess.Popen[bytes]
    log: Path | None
    exit_code: int | None = None
    ended: bool = False

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        if self.exit_code is None:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            status = os.waitid(os.P_PID, self.popen.pid, flags)
            if status is not None:
                exited = status.si_code == os.CLD_EXITED
                self.exit_code = status.si_status + (0 if exited else 128)
        return self.exit_code

    def send(self, number: int) -> None:
        """Sends a signal to the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def start(
    command: Sequence[str], *, host: int, log: Path | None, environment: Mapping[str, str]
) -> Process:
    """Starts a host's process; where it can be, so that it dies with the launcher."""
    if setpriv := find("setpriv"):
        command = (setpriv, "--pdeathsig", "KILL", *command)
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open("wb")) if log else None
        popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
    return Process(host=host, popen=popen, log=log)


def wait(
    processes: Sequence[Process],
    *,
    timeout_s: float | None,
    grace_s: float,
    interrupted: Callable[[], bool],
) -> str:
    """Waits until all have ended, or until they have to be ended.

    Returns:
      "ended"; "interrupted"; "timeout": ``timeout_s`` is over; "failed": one failed, and
      ``grace_s`` later others still ran.
    """
    deadline = time.monotonic() + timeout_s if timeout_s else None
    last_words = None
    while True:
        codes = [process.poll() for process in processes]
        now = time.monotonic()
        if None not in codes:
            return "ended"
        if interrupted():
            return "interrupted"
        if deadline and now >= deadline:
            return "timeout"
        if last_words is None and any(codes):
            last_words = now + grace_s
        if last_words and now >= last_words:
            return "failed"
        time.sleep(_POLL_S)


def end(processes: Sequence[Process], number: int) -> None:
    """Ends all: asks with a signal, kills after a while; also what those that ended left behind."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.ended = True
        process.send(number)
    deadline = time.monotonic() + _PATIENCE_S
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        while process.poll() is None:
            time.sleep(_POLL_S)
        process.popen.wait()


class Signals:
    """Notes the signals that ask the launcher to stop, in place of being stopped by them."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> Signals:
        # What was ignored from the start (nohup) stays so.
        self._before = {
            number: signal.signal(number, self._note)
            for number in self.NUMBERS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
