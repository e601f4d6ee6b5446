"""Reports as rich prints them: plain tables, and the same as text."""

from __future__ import annotations

import io
import shutil
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def plain_table(title: str | None = None, **options: Any) -> Table:
    """Returns a table without lines but the one under its head.

    Args:
      title: stands above it, at the left.
      **options: of `rich.table.Table`.
    """
    frame: dict[str, Any] = {
        "box": box.SIMPLE_HEAD,
        "show_edge": False,
        "pad_edge": False,
        "title_justify": "left",
    }
    return Table(title=title, **(frame | options))


def as_text(renderable: Any, *, least_width: int = 80) -> str:
    """Returns what a terminal of at least so many columns shows, as plain text."""
    out = io.StringIO()
    width = max(least_width, shutil.get_terminal_size((least_width, 40)).columns)
    Console(file=out, width=width).print(renderable, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
