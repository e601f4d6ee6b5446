"""What the stages of plans put into the program: permutes and XLA's collectives, in slots."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xcoll.algorithms import build, closed_form
from xcoll.costmodel import stage_form
from xcoll.plan import Request, Stage
from xcoll.policy import Choice
from xcoll.schedule import ROOTED, Lane, NativeStep, PermuteStep, Repeat, Schedule, swaps

EXACT_MAX_RANKS = 64
"""Up to this many ranks, bytes and operations are counted on the schedule itself; beyond, on its
closed form."""

UNROLLED_RANKS = 16
"""Up to this many ranks, the lowering writes repeated steps out; beyond, they are loops."""

MAX_PERMUTES = 150
"""Permutes that a plan may write into the program; more take seconds each to compile on a TPU."""

Pairs = tuple[tuple[int, int], ...]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Emitted:
    """What a stage emits, in slots: permutes and XLA's collectives, with their counts.

    Attributes:
      permutes: slots (of a chunk) in the operand, pairs of ranks (empty where there are more than
        `EXACT_MAX_RANKS` ranks) and executions.
      natives: pairs of collective and slots in the operand.
      moved: for up to `EXACT_MAX_RANKS` ranks, slots that each rank (row) sends to each other by
        permutes.
    """

    permutes: tuple[tuple[int, Pairs, int], ...]
    natives: tuple[tuple[str, int], ...]
    moved: Ints | None


def permutes_in_program(stages: Sequence[Stage]) -> int:
    """Returns how many permutes a plan writes into the program; loops count once."""
    total = 0
    for stage in stages:
        if stage.choice.name == "native" or stage.collective == "permute":
            continue
        phases = stage_form(stage).phases
        repeats = stage.choice.name in ("ring", "bidirectional_ring", "torus", "hierarchical")
        looped = repeats and stage.span.num_ranks > UNROLLED_RANKS
        levels = max(1, sum(size > 1 for size in stage.dims))
        most = stage.num_chunks * (2 if stage.beside else 1)
        total += most * sum(
            phase.lanes * (levels if looped else phase.steps)
            for phase in phases
            if phase.kind == "permute"
        )
    return total


def emitted_by(stage: Stage, request: Request) -> Emitted:
    """Returns what a stage of a request's plan emits."""
    if stage.collective == "permute":
        moved = np.zeros((request.num_ranks,) * 2, np.int64)
        for source, destination in request.pairs:
            moved[source, destination] = source != destination
        return Emitted(((1, request.pairs, 1),), (), moved)
    root = request.root if stage.collective in ROOTED else 0
    once = _emitted_by(stage.choice, stage.collective, stage.span.num_ranks, stage.dims, root)
    if stage.num_chunks == 1 and stage.beside is None:
        return once
    chunks = stage.num_chunks
    return Emitted(
        tuple((s, pairs, n * chunks * _turns(stage, pairs)) for s, pairs, n in once.permutes),
        once.natives * chunks,
        None if once.moved is None else once.moved * chunks,
    )


def _turns(stage: Stage, pairs: Pairs) -> int:
    """Returns how many permutes the lowering makes of one."""
    return 2 if stage.beside is not None and swaps(pairs) else 1


@functools.lru_cache(maxsize=1024)
def _emitted_by(
    choice: Choice, collective: str, num_ranks: int, dims: tuple[int, ...], root: int
) -> Emitted:
    permutes: Counter[tuple[int, Pairs]] = Counter()
    natives: list[tuple[str, int]] = []
    if num_ranks > EXACT_MAX_RANKS:
        form = closed_form(choice, collective, num_ranks, dims=dims)
        for phase in form.phases:
            if phase.kind == "permute":
                permutes[phase.slots, ()] += phase.steps * phase.lanes
            elif phase.kind != "fold":
                natives.append((phase.kind, phase.slots))
        return Emitted(_flat(permutes), tuple(natives), None)
    schedule = build(choice, collective, num_ranks, dims=dims, root=root)
    moved = np.zeros((num_ranks, num_ranks), np.int64)
    for step, count in _steps(schedule):
        if isinstance(step, NativeStep):
            own = step.collective == "all_gather"
            natives.append((step.collective, schedule.share if own else schedule.num_slots))
            continue
        permutes[step.send.count, step.pairs] += count
        sources, destinations = zip(*step.pairs, strict=True)
        # No rank sends twice on a lane, so that no place is added to twice.
        moved[sources, destinations] += step.send.count * count
    return Emitted(_flat(permutes), tuple(natives), moved)


def _flat(permutes: Counter[tuple[int, Pairs]]) -> tuple[tuple[int, Pairs, int], ...]:
    return tuple((slots, pairs, count) for (slots, pairs), count in permutes.items())


def _steps(schedule: Schedule) -> Iterator[tuple[NativeStep | Lane, int]]:
    """Yields lanes and collectives, and how often they run.

    All pairs of a lane send in every iteration, whichever are active: the lowering keeps one
    permute for all iterations, and receivers drop what is not meant for them.
    """
    for step in schedule.steps:
        body, count = (step.body, step.count) if isinstance(step, Repeat) else ((step,), 1)
        for inner in body:
            if isinstance(inner, NativeStep):
                yield inner, count
            elif isinstance(inner, PermuteStep):
                yield from ((lane, count) for lane in inner.lanes)
