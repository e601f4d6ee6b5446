"""The bounds that jax documents, set before its backends start; what the user has set stays."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

import jax

_COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"
_PREEMPTION = "JAX_ENABLE_PREEMPTION_SERVICE"
JAX_TIMEOUT_S = 3600
"""Of jax itself, which ends a process after it with no way to catch that: the watch is sooner."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long to wait for what, in seconds.

    Attributes:
      initialization_timeout: for all processes to be there.
      heartbeat_timeout_seconds: a process that says nothing for so long is lost.
      collective_timeout_seconds: for one collective on CPU.
      shutdown_timeout_seconds: for all to come to the end.
      stuck_timeout_seconds: a process that stays in one call so long after a loss is ended.
    """

    initialization_timeout: float
    heartbeat_timeout_seconds: float
    collective_timeout_seconds: int
    shutdown_timeout_seconds: float
    stuck_timeout_seconds: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            known = isinstance(value, int | float) and not isinstance(value, bool)
            if not (known and 0 < value < math.inf):
                raise ValueError(
                    f"initialize({name}={value!r}): must be a number of seconds above 0; leave it"
                    " out for the default"
                )

    def apply(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Sets XLA's flag and jax's options, where the user has not."""
        flags = environment.get("XLA_FLAGS", "")
        if _COLLECTIVE_FLAG not in flags:
            seconds = math.ceil(self.collective_timeout_seconds)
            environment["XLA_FLAGS"] = f"{flags} {_COLLECTIVE_FLAG}={seconds}".strip()
        if _PREEMPTION not in environment:
            # With the service on, SIGTERM no longer ends a process, and a program that does not
            # ask the service goes on until it is killed.
            jax.config.update("jax_enable_preemption_service", False)
