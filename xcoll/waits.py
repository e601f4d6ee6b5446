"""Who waits where: processes that wait at different programs wait for each other."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from xcoll import _compat
from xcoll.errors import PlanMismatchError

_PREFIX = "xcoll/waits"
_SURE_S = 3.0


class Waits:
    """That this process waits at a program, for others to read; and where they wait.

    Args:
      client: the key-value store.
      here: this process.
      key: names the program.
      summary: its plans for a reader.
      process_ids: for whom it waits.
    """

    def __init__(
        self, client: Any, here: int, key: str, summary: str, process_ids: Sequence[int]
    ) -> None:
        self._client = client
        self._here = here
        self._key = key
        self._summary = summary
        self._elsewhere: dict[int, tuple[str, float]] = {}
        text = json.dumps([key, summary, sorted(process_ids), time.time()])
        client.key_value_set(f"{_PREFIX}/{here}", text, allow_overwrite=True)

    def check(self, other: int) -> None:
        """Raises if another process waits for this one elsewhere, and has for some time.

        Raises:
          PlanMismatchError: the two have different programs.
        """
        text = _compat.key_value_look(self._client, f"{_PREFIX}/{other}") or ""
        key, summary, process_ids, _ = json.loads(text) if text else ("", "", (), 0.0)
        if key == self._key or self._here not in process_ids:
            self._elsewhere.pop(other, None)
            return
        seen, since = self._elsewhere.setdefault(other, (text, time.monotonic()))
        if seen != text:
            self._elsewhere[other] = text, time.monotonic()
        elif time.monotonic() - since >= _SURE_S:
            # What this process waits for stays written, so that the other sees the same.
            raise PlanMismatchError(
                f"agree({self._key!r}): process {self._here} has come to a program that process"
                f" {other} has not, which waits at another one, {key!r}; run, they would wait for"
                " each other for ever. All processes have to run the same functions, on the same"
                " shapes and types, in the same order.\n"
                f"process {self._here}: {self._summary}\nprocess {other}: {summary}"
            )

    def over(self) -> None:
        """Notes that the wait is over."""
        self._client.key_value_set(f"{_PREFIX}/{self._here}", "", allow_overwrite=True)
