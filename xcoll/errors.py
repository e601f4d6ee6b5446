"""Errors and warnings of xcoll, and the sentences they are made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownAxisError(NameError, ValueError):
    """A collective names a mesh axis that is not there (a `NameError`, as jax raises)."""


class UnsupportedError(NotImplementedError, ValueError):
    """What was asked for is well formed, but nothing here can do it."""


class ScheduleError(AssertionError):
    """A schedule breaks the contract of its collective."""


class PlanMismatchError(RuntimeError):
    """Processes of one program planned differently, so that running would deadlock."""


class XcollWarning(UserWarning):
    """Something works, but not as its author is likely to want."""


def unknown(call: str, kind: str, value: object, valid: Iterable[object]) -> str:
    """Returns the sentence for an unknown name: the valid ones, and the nearest.

    >>> unknown("psum", "axis", "dta", ["data", "model"])
    "psum: unknown axis 'dta'; valid: 'data', 'model'. Did you mean 'data'?"
    """
    names = [str(v) for v in valid]
    text = f"{call}: unknown {kind} {value!r}; valid: {', '.join(map(repr, names)) or 'none'}."
    near = difflib.get_close_matches(str(value), names, n=1)
    return text + (f" Did you mean {near[0]!r}?" if near else "")
