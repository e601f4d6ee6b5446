"""The processes that measure together: one decides, all do it at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import jax

from xcoll import _compat
from xcoll.hosts.run import unless_lost

_lock = threading.Lock()
_runs: Counter[tuple[int, ...]] = Counter()


class Group:
    """The processes of a mesh; every one of them has to make the same calls in the same order.

    Args:
      process_ids: of those that take part (`xcoll.agreement.participants`); empty for one alone.
      timeout_s: seconds to wait for the others, at each call.

    Raises:
      RuntimeError: there are several processes, but `jax.distributed` is not initialised.
    """

    def __init__(self, process_ids: tuple[int, ...], timeout_s: float):
        self.process_ids = process_ids
        self.here = jax.process_index()
        self._timeout_ms = round(1000 * timeout_s)
        self._client = _compat.key_value_client() if process_ids else None
        if self._client is None and process_ids:
            raise RuntimeError(
                f"tune: processes {list(process_ids)} have devices of the mesh, but jax.distributed"
                " is not initialised; call jax.distributed.initialize() first"
            )
        with _lock:
            _runs[process_ids] += 1
            self._name = f"xcoll/calibration/{process_ids}/{_runs[process_ids]}"
        self._calls = 0
        self._said: list[str] = []

    @property
    def is_first(self) -> bool:
        """Whether this process decides."""
        return not self.process_ids or self.here == self.process_ids[0]

    def wait(self) -> None:
        """Returns once all processes have come here.

        Raises:
          HostLostError: one is lost (`xcoll.initialize`).
          TimeoutError: one has not, in time.
        """
        if self._client is None:
            return
        self._calls += 1
        place = f"{self._name}/{self._calls}"
        self._in_time(
            lambda client: client.wait_at_barrier(place, self._timeout_ms, list(self.process_ids))
        )
        # All have read what was said before.
        for said in self._said:
            self._client.key_value_delete(said)
        self._said.clear()

    def first_says(self, text: str) -> str:
        """Returns the text of the first process, on all of them.

        Raises:
          TimeoutError: it has not come here in time.
        """
        if self._client is None:
            return text
        self._calls += 1
        place = f"{self._name}/{self._calls}"
        if self.is_first:
            self._client.key_value_set(place, text)
            self._said.append(place)
            return text
        return str(
            self._in_time(lambda client: client.blocking_key_value_get(place, self._timeout_ms))
        )

    def all_say(self, text: str) -> list[str]:
        """Returns the texts of all processes, in their order, on all of them.

        Raises:
          TimeoutError: one has not come here in time.
        """
        if self._client is None:
            return [text]
        self._calls += 1
        place = f"{self._name}/{self._calls}"
        self._client.key_value_set(f"{place}/{self.here}", text)

        def read(client: Any) -> list[str]:
            return [
                str(client.blocking_key_value_get(f"{place}/{process}", self._timeout_ms))
                for process in self.process_ids
            ]

        found: list[str] = self._in_time(read)
        return found

    def _in_time(self, call: Any) -> Any:
        found: list[Any] = []
        try:
            unless_lost(lambda: found.append(call(self._client)))
            return found[0]
        except jax.errors.JaxRuntimeError as err:
            if "DEADLINE_EXCEEDED" not in str(err):
                raise
            raise TimeoutError(
                f"tune: process {self.here} waited {self._timeout_ms / 1000:g} s for the others of"
                f" {list(self.process_ids)}, which have stopped, or do not call tune: {err}"
            ) from err
