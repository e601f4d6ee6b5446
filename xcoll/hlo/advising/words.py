"""How advice names lines and arguments, and adds up times."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from xcoll.hlo.rows import Row

_MOST = 3
"""Names that are written out."""


def listed(names: Iterable[str]) -> str:
    """Returns names in words, each once, the first few of them.

    >>> listed(["a", "b", "a", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def named(axes: Sequence[str] | None) -> str:
    """Returns mesh axes in words.

    >>> named(("data", "model")), named(None)
    ('data, model', 'axes that could not be read')
    """
    return "axes that could not be read" if axes is None else ", ".join(axes)


def places(rows: Sequence[Row]) -> str:
    """Returns the lines of rows in brackets, after a space; empty where none is known."""
    found = listed(os.path.basename(row.source) for row in rows if row.source is not None)
    return f" ({found})" if found else ""
