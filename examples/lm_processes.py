"""What processes that train together tell each other, through the store of `jax.distributed`."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path
from typing import Any

import jax

from xcoll import _compat

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Processes:
    """All processes of a run. Each has to make the same calls in the same order.

    Args:
      timeout_s: how long to wait for the others, in each call.

    Raises:
      RuntimeError: `jax.distributed` is not initialised.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.here, self.count = jax.process_index(), jax.process_count()
        self._client = _compat.key_value_client()
        if self._client is None:
            raise RuntimeError("Processes: call jax.distributed.initialize() first")
        self._timeout_ms = int(1000 * timeout_s)
        self._calls = itertools.count()

    def barrier(self) -> None:
        """Returns once all have come here."""
        assert self._client is not None
        self._client.wait_at_barrier(f"train_lm/{next(self._calls)}", self._timeout_ms)

    def gather(self, value: Any) -> list[Any]:
        """Returns every process's value, in order; a value is what JSON can hold."""
        assert self._client is not None
        place = f"train_lm/{next(self._calls)}"
        self._client.key_value_set(f"{place}/{self.here}", json.dumps(value))
        found = [
            self._client.blocking_key_value_get(f"{place}/{process}", self._timeout_ms)
            for process in range(self.count)
        ]
        return [json.loads(text) for text in found]

    def share_a_clock(self) -> bool:
        """Returns whether `time.monotonic` is the same clock for all: they run on one machine.

        Network namespaces of one machine do; machines that were booted apart do not.
        """
        boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        return len(set(self.gather(boot))) == 1


def step_times_s(spans: list[list[tuple[float, float]]], one_clock: bool) -> list[float]:
    """Returns how long each step took, over all processes.

    Args:
      spans: for each process the start and the end of each step, in seconds.
      one_clock: whether they can be compared between processes.

    Returns:
      For each step the time from the earliest start to the latest end; without one clock the
      longest of the processes' own times, which misses how far apart they started.

    >>> step_times_s([[(0.0, 2.0), (5.0, 7.0)], [(1.0, 4.0), (5.0, 8.0)]], one_clock=True)
    [4.0, 3.0]
    >>> step_times_s([[(0.0, 2.0), (5.0, 7.0)], [(1.0, 4.0), (5.0, 8.0)]], one_clock=False)
    [3.0, 3.0]
    """
    steps = zip(*spans, strict=True)
    if not one_clock:
        return [max(end - start for start, end in step) for step in steps]
    return [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
