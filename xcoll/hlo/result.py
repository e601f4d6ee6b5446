"""The audit of one compiled program, as people get it: findings that can be printed and written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from xcoll.hlo.findings import Findings
from xcoll.hlo.show import show, text
from xcoll.hlo.timeline import write_timeline


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

    def __rich__(self) -> Any:
        return show(self)

    def __str__(self) -> str:
        return text(self)
