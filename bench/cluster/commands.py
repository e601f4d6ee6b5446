"""Commands of iproute2: data first, so that what a network needs is known before it is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 30.0


class ClusterError(Exception):
    """The hosts can't be made on this machine; the message says why, and what to do."""


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and what it reads."""

    argv: tuple[str, ...]
    stdin: str = ""

    def run(self) -> str:
        """Runs it; returns what it printed.

        Raises:
          ClusterError: it failed.
        """
        try:
            done = subprocess.run(
                self.argv,
                input=self.stdin,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env={**os.environ, "LC_ALL": "C", "PATH": _path()},
                # Ctrl-C on the terminal is for the launcher, which then cleans up with these.
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            raise ClusterError(f"{' '.join(self.argv)}: {err}") from err
        if done.returncode:
            raise ClusterError(f"{' '.join(self.argv)}: {done.stderr.strip()}")
        return done.stdout


def ip(text: str) -> Command:
    """A command of ``ip``; words don't hold blanks."""
    return Command(("ip", *text.split()))


def tc(text: str) -> Command:
    """A command of ``tc``; words don't hold blanks."""
    return Command(("tc", *text.split()))


def find(program: str) -> str | None:
    """Returns where a program is; also in the directories of the administrator's programs."""
    return shutil.which(program, path=_path())


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
