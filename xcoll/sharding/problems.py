"""Several things wrong at once, each said once."""

from __future__ import annotations

from collections.abc import Sequence


class Problems:
    """Collects what is wrong, and where; what is wrong in many places is one error."""

    def __init__(self, call: str):
        self._call = call
        self._places: dict[str, list[str]] = {}

    def add(self, what: str, place: str = "") -> None:
        """Adds one; ``place`` is a parameter's path, or empty."""
        self._places.setdefault(what, []).append(place)

    def raise_any(self) -> None:
        """Raises what was collected, if anything was.

        Raises:
          ValueError: one thing is wrong.
          ExceptionGroup: several are; a `ValueError` for each.
        """
        errors = [
            ValueError(f"{self._call}: {_listed(places)}{what}")
            for what, places in self._places.items()
        ]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{self._call}: {len(errors)} things are wrong", errors)


def _listed(places: Sequence[str], most: int = 3) -> str:
    """Returns the first places and how many there are beyond them.

    >>> _listed(["['a']", "['b']", "['c']", "['d']", "['e']"])
    "['a'], ['b'], ['c'] and 2 more: "
    """
    text = ", ".join(places[:most])
    if len(places) > most:
        text += f" and {len(places) - most} more"
    return text and f"{text}: "
