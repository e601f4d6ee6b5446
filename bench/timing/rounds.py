"""Variants timed in turn, round by round, on all processes together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from bench.timing.meeting import Meeting
from bench.timing.times import Times, over_processes

Span = tuple[float, float]
"""Start and end, in seconds of `time.monotonic`."""


@runtime_checkable
class Elsewhere(Protocol):
    """A variant that other processes run, which take their times themselves."""

    def timed(self, calls: int) -> Span:
        """Runs it so many times; returns the earliest start and the latest end over them."""


def interleaved(
    variants: Mapping[str, Callable[[], Any] | Elsewhere],
    rounds: int,
    meeting: Meeting,
    *,
    calls: int = 1,
    warm_ups: int = 1,
    on_turn: Callable[[str], None] | None = None,
) -> dict[str, Times]:
    """Times variants in turn, so that whatever else the machine does falls on all alike.

    Every second round runs in the opposite order. Before each turn the processes wait for each
    other, so that nothing of the last one is under way.

    Args:
      variants: by name, what runs one; its result is waited for. Or what has others run it: on
        one of the processes, the rest return `NOBODY`. On every process the same names in the same
        order.
      rounds: timed turns of each.
      meeting: of all processes that take part.
      calls: calls in a turn, one after another; times are those of one call.
      warm_ups: rounds that are not timed, before the others: the first call compiles.
      on_turn: told the name before each turn, on every process.

    Returns:
      Times by name, the same on every process.
    """
    spans: dict[str, list[Span]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(warm_ups + rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if on_turn is not None:
                on_turn(name)
            meeting.wait()
            span = _timed(variants[name], 1 if number < warm_ups else calls)
            if number >= warm_ups:
                spans[name].append(span)
    meeting.wait()
    everyones = meeting.share(spans)
    return {name: over_processes([one[name] for one in everyones], calls) for name in variants}


NOBODY: Span = (math.inf, -math.inf)
"""The span of a process on which nothing runs."""


def _timed(variant: Callable[[], Any] | Elsewhere, calls: int) -> Span:
    if isinstance(variant, Elsewhere):
        return variant.timed(calls)
    start = time.monotonic()
    for _ in range(calls):
        jax.block_until_ready(variant())
    return start, time.monotonic()
