"""Tables of figures for people."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def show(*shown: Table | str, width: int = 120, stderr: bool = False) -> None:
    """Prints tables and lines; what a terminal is too narrow for is folded, never cut off.

    Args:
      shown: tables, and lines that stand as they are.
      width: columns where standard output is a file or a pipe.
      stderr: print there.
    """
    console = Console(width=None if sys.stdout.isatty() else width, stderr=stderr)
    for what in shown:
        if isinstance(what, Table):
            for column in what.columns:
                column.overflow = "fold"
        console.print(what, markup=not isinstance(what, str))
