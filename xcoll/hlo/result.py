"""The audit of one compiled program, as people get it: findings that can be printed and written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xcoll.hlo.findings import Findings
from xcoll.hlo.show import show
from xcoll.hlo.timeline import write_timeline
from xcoll.printing import as_text


@dataclass(frozen=True, kw_only=True)
class Audit(Findings):
    """Every collective of a compiled program, made by `xcoll.audit`.

    Print it for a table. Its rows, totals and advice are those of `xcoll.hlo.findings.Findings`;
    ``to_json`` and ``from_json`` keep it in a file.
    """

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes one execution of the program, as predicted, for Perfetto (ui.perfetto.dev).

        Args:
          path: a JSON file in Chrome's trace event format; replaced if it is there.
        """
        write_timeline(self, path)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield show(self, options.max_width)

    def __str__(self) -> str:
        return as_text(self, least_width=100)
