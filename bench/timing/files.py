"""Figures written for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xcoll.files import write_text


def write_json(path: Path, figures: Any) -> None:
    """Writes figures as JSON: the whole file or nothing. Makes its directory.

    Raises:
      OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(figures, indent=1) + "\n")
