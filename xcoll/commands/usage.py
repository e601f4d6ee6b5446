"""What the commands read in the same way, and how they say what is wrong."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from rich.console import Console

_WIDTH_OF_PIPES = 200


class UsageError(Exception):
    """What was typed, or what it named, is wrong.

    Attributes:
      details: what is shown above the line that says it, such as a traceback.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


def read_axes(option: str, text: str) -> dict[str, int]:
    """Returns the axes of ``host=2,device=4``.

    Raises:
      UsageError: it is malformed.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        # Not isdigit(), which takes superscripts and every script's digits.
        if not name.isidentifier() or not re.fullmatch("0*[1-9][0-9]{0,17}", size):
            raise UsageError(f"{option} {text}: {part!r} is no name=size, as in host=2,device=4")
        if name in axes:
            raise UsageError(f"{option} {text}: axis {name!r} is there twice")
        axes[name] = int(size)
    return axes


def show(renderable: Any) -> None:
    """Prints what rich renders to stdout; rows stay whole for whoever reads a pipe."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_PIPES)
    with console.capture() as shown:
        console.print(renderable, highlight=False, markup=False)
    say("\n".join(line.rstrip() for line in shown.get().splitlines()))


def say(text: str) -> None:
    """Prints to stdout, for as long as someone reads it: ``| head`` changes no exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python writes what is left at its end, and would fail once more.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
