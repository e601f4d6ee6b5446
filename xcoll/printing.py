"""Reports as rich prints them: plain tables, and the same as text."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


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


@dataclass(frozen=True)
class Name:
    """A plan's name, or text with such in it, for a cell of a table: see `broken`."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Says how narrow and how wide it can be."""
        widest = max(map(len, self.text.splitlines()), default=0)
        narrowest = max(map(len, re.split(r"(?<=[(/_])|\s", self.text)), default=0)
        return Measurement(narrowest, widest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yields its lines."""
        yield Text("\n".join(broken(self.text, options.max_width)))


def broken(text: str, width: int) -> list[str]:
    """Returns text as lines of a width: broken at a space, unless half the line were empty then.

    Else after "(" or "/", else at any space, else after "_". What has none of them is cut: nothing
    is lost.

    Example:
      >>> broken("hierarchical(direct/cast(bfloat16), halving_doubling)", 18)
      ['hierarchical(', 'direct/cast(', 'bfloat16),', 'halving_doubling)']
    """
    lines = []
    for rest in text.splitlines():
        while len(rest) > width:
            begun = rest[:width]
            # The space itself may stand beyond the width.
            space = rest.rfind(" ", 0, width + 1) + 1
            mark = max(begun.rfind("("), begun.rfind("/")) + 1
            end = (2 * space > width and space) or mark or space or begun.rfind("_") + 1 or width
            lines.append(rest[:end].rstrip())
            rest = rest[end:].lstrip()
        lines.append(rest)
    return lines


def as_text(renderable: Any, *, least_width: int = 80) -> str:
    """Returns what a terminal of at least so many columns shows, as plain text."""
    out = io.StringIO()
    width = max(least_width, shutil.get_terminal_size((least_width, 40)).columns)
    Console(file=out, width=width).print(renderable, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
