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
      name: of these calls, apart from those of another object in the same run.

    Raises:
      RuntimeError: `jax.distributed` is not initialised.
    """

    def __init__(self, timeout_s: float = 300.0, name: str = "train_lm") -> None:
        self.here, self.count = jax.process_index(), jax.process_count()
        self._client = _compat.key_value_client()
        if self._client is None:
            raise RuntimeError("Processes: call jax.distributed.initialize() first")
        self._name, self._timeout_ms = name, int(1000 * timeout_s)
        self._calls = itertools.count()

    def barrier(self) -> None:
        """Returns once all have come here."""
        assert self._client is not None
        self._client.wait_at_barrier(f"{self._name}/{next(self._calls)}", self._timeout_ms)

    def gather(self, value: Any) -> list[Any]:
        """Returns every process's value, in order; a value is what JSON can hold."""
        assert self._client is not None
        place = f"{self._name}/{next(self._calls)}"
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


def check_alike(found: list[dict[str, str]]) -> None:
    """Checks that all processes were started with the same options.

    Args:
      found: each process's options, by name.

    Raises:
      ValueError: they differ; on every process, with who says what.

    >>> check_alike([{"steps": "2"}, {"steps": "2"}])
    >>> check_alike([{"steps": "2"}, {"steps": "3"}])
    Traceback (most recent call last):
    ValueError: --steps is 2 on process 0 and 3 on process 1; start all with the same options
    """
    unlike = []
    for name in found[0]:
        values: dict[str, list[int]] = {}
        for process, own in enumerate(found):
            values.setdefault(own.get(name, "not known"), []).append(process)
        if len(values) > 1:
            said = " and ".join(
                f"{value} on process {', '.join(map(str, who))}" for value, who in values.items()
            )
            unlike.append(f"--{name.replace('_', '-')} is {said}")
    if unlike:
        raise ValueError(f"{'; '.join(unlike)}; start all with the same options")


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
