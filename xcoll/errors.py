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


class StartError(RuntimeError):
    """The processes of a run did not come together, so that jax was not started."""


class HostLostError(RuntimeError):
    """Other processes of the run are lost, so that this one can't go on.

    Attributes:
      process_ids: the lost ones, in increasing order.
      hosts: the names of their machines.
    """

    def __init__(
        self, message: str, process_ids: tuple[int, ...] = (), hosts: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.process_ids = process_ids
        self.hosts = hosts


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
