"""Runs schedules on numpy arrays, straight from the words of `xcoll.schedule`.

It shares no code with the proof or the lowering, which are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xcoll.schedule import (
    FoldStep,
    NativeStep,
    PermuteStep,
    Repeat,
    Schedule,
    ShuffleStep,
    Slots,
)

Array = np.ndarray[Any, Any]
Combine = Callable[[Array, Array], Array]


def enter(schedule: Schedule, payload: Array, garbage: Array) -> Array:
    """Returns the buffers (rank, slot, element) with which a schedule starts.

    Args:
      schedule: the schedule.
      payload: (rank, slot, element), what each rank would put in every slot.
      garbage: of the same shape, what slots hold that nothing entered into.
    """
    n, share = schedule.num_ranks, schedule.share
    entered = np.zeros(payload.shape[:2], bool)
    if schedule.enter == "own":
        for r in range(n):
            entered[r, r * share : (r + 1) * share] = True
    elif schedule.collective in ("broadcast", "scatter"):
        entered[schedule.root] = True
    else:
        entered[:] = True
    return np.where(entered[..., None], payload, garbage)


def run(schedule: Schedule, buffers: Array, combine: Combine = np.add) -> Array:
    """Returns the buffers after all steps; a share alone lies at its place, the rest is -1."""
    buffers = buffers.copy()
    for step in schedule.steps:
        if isinstance(step, Repeat):
            for iteration in range(step.count):
                for inner in step.body:
                    buffers = _permute(inner, iteration, buffers, combine)
        elif isinstance(step, PermuteStep):
            buffers = _permute(step, 0, buffers, combine)
        elif isinstance(step, ShuffleStep):
            index = np.arange(schedule.num_slots)
            for r in range(schedule.num_ranks):
                buffers[r] = buffers[r][(step.start[r] + step.sign * index) % len(index)]
        elif isinstance(step, FoldStep):
            buffers = _own(schedule, [_folded(schedule, row, combine) for row in buffers])
        else:
            buffers = _native(schedule, step, buffers, combine)
    return buffers


def _places(slots: Slots, rank: int, iteration: int) -> list[int]:
    unit = (slots.start[rank] + slots.advance * iteration) % slots.modulus
    base = slots.base[rank] if slots.base else 0
    return [base + slots.scale * unit + offset for offset in slots.pattern]


def _permute(step: PermuteStep, iteration: int, buffers: Array, combine: Combine) -> Array:
    after = buffers.copy()
    for lane in step.lanes:
        for source, destination in lane.pairs:
            if lane.active and iteration not in lane.active[source]:
                continue
            sent = buffers[source, _places(lane.send, source, iteration)]
            into = _places(lane.recv, destination, iteration)
            after[destination, into] = (
                combine(buffers[destination, into], sent) if lane.reduce else sent
            )
    return after


def _folded(schedule: Schedule, row: Array, combine: Combine) -> Array:
    shares = row.reshape(schedule.num_ranks, schedule.share, -1)
    total = shares[0]
    for share in shares[1:]:
        total = combine(total, share)
    return total


def _own(schedule: Schedule, shares: list[Array]) -> Array:
    share, width = schedule.share, shares[0].shape[-1]
    buffers = np.full((len(shares), schedule.num_slots, width), -1, shares[0].dtype)
    for r, mine in enumerate(shares):
        buffers[r, r * share : (r + 1) * share] = mine
    return buffers


def _native(schedule: Schedule, step: NativeStep, buffers: Array, combine: Combine) -> Array:
    n, share = schedule.num_ranks, schedule.share
    if step.collective in ("all_reduce", "reduce_scatter"):
        total = buffers[0]
        for row in buffers[1:]:
            total = combine(total, row)
        if step.collective == "all_reduce":
            return np.stack([total] * n)
        return _own(schedule, [total[r * share : (r + 1) * share] for r in range(n)])
    blocks = buffers.reshape(n, n, share, -1)
    if step.collective == "all_gather":
        return np.stack([blocks[np.arange(n), np.arange(n)].reshape(n * share, -1)] * n)
    return blocks.swapaxes(0, 1).reshape(buffers.shape)


def results(schedule: Schedule, buffers: Array) -> list[Array]:
    """Returns what each rank has as its result: all slots, or those of its own share."""
    own = schedule.collective in ("reduce_scatter", "scatter") or (
        schedule.collective == "all_reduce" and schedule.enter == "own"
    )
    share = schedule.share
    if own:
        return [row[r * share : (r + 1) * share] for r, row in enumerate(buffers)]
    return list(buffers)


def expected(schedule: Schedule, payload: Array) -> list[Array | None]:
    """Returns what each rank must have as its result, None where anything will do.

    ``payload`` is what each rank entered, as for `enter`; combining is addition.
    """
    n, share, root = schedule.num_ranks, schedule.share, schedule.root
    divides = schedule.num_slots % n == 0
    blocks = payload.reshape(n, n, share, -1) if divides else payload
    match schedule.collective:
        case "all_reduce" if schedule.enter == "own":
            return [blocks[np.arange(n), np.arange(n)].sum(0)] * n
        case "all_reduce":
            return [payload.sum(0)] * n
        case "reduce":
            return [payload.sum(0) if r == root else None for r in range(n)]
        case "reduce_scatter":
            return [blocks[:, r].sum(0) for r in range(n)]
        case "all_gather" | "gather":
            whole = np.concatenate([blocks[r, r] for r in range(n)])
            return [
                whole if schedule.collective == "all_gather" or r == root else None
                for r in range(n)
            ]
        case "all_to_all":
            return [np.concatenate([blocks[r, d] for r in range(n)]) for d in range(n)]
        case "broadcast":
            return [payload[root]] * n
        case "scatter":
            return [blocks[root, r] for r in range(n)]
    raise AssertionError(schedule.collective)
