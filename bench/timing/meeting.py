"""Where the processes of a run wait for each other and tell each other what they measured."""

from __future__ import annotations

import json
from typing import Any

import jax

from xcoll import _compat


class Meeting:
    """The processes of a run; every one of them has to make the same calls in the same order.

    Args:
      name: no other meeting of the run has it.
      timeout_s: seconds to wait for the others, at each call.

    Raises:
      RuntimeError: there are several processes, but `jax.distributed` is not initialised.
    """

    def __init__(self, name: str, timeout_s: float = 300.0) -> None:
        self.name = name
        self.process = jax.process_index()
        self.num_processes = jax.process_count()
        self._timeout_ms = round(1000 * timeout_s)
        self._calls = 0
        self._client = _compat.key_value_client() if self.num_processes > 1 else None
        if self._client is None and self.num_processes > 1:
            raise RuntimeError(
                f"Meeting({name!r}): {self.num_processes} processes, but no jax.distributed; call"
                " jax.distributed.initialize() first"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints."""
        return self.process == 0

    def wait(self) -> None:
        """Returns once all processes have come here."""
        self._calls += 1
        if self._client is not None:
            self._client.wait_at_barrier(f"{self.name}/{self._calls}", self._timeout_ms)

    def share(self, value: Any) -> list[Any]:
        """Returns what every process said here, by process.

        Args:
          value: what JSON holds.
        """
        text = json.dumps(value)
        if self._client is None:
            return [json.loads(text)]
        self._calls += 1
        place = f"{self.name}/{self._calls}"
        self._client.key_value_set(f"{place}/{self.process}", text)
        return [
            json.loads(self._client.blocking_key_value_get(f"{place}/{i}", self._timeout_ms))
            for i in range(self.num_processes)
        ]

    def first_says(self, value: Any) -> Any:
        """Returns what the first process said here, on all of them."""
        return self.share(value if self.is_first else None)[0]
