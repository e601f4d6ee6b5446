"""What a plan emits, sends and rounds: operations, bytes over each axis, error bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xcoll.algorithms import build
from xcoll.costmodel import NATIVE_AS, Operand, operands, stage_form
from xcoll.plan import Operation, Request, Span, Stage
from xcoll.schedule import Lane, NativeStep, PermuteStep, Repeat, Schedule

EXACT_MAX_RANKS = 64
"""Up to this many ranks, bytes and operations are counted on the schedule itself; beyond, on its
closed form."""

_HLO = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
}


@dataclass(frozen=True)
class _Emitted:
    """An operation of a stage, with who sends to whom where it is a permute."""

    operation: Operation
    span: Span
    pairs: tuple[tuple[int, int], ...] | None = None
    distance: int = 1


def operations(request: Request, stages: Sequence[Stage]) -> tuple[Operation, ...]:
    """Returns the operations that a plan puts into the program, alike ones counted together."""
    counts: dict[tuple[str, tuple[str, ...], int], int] = {}
    for emitted in _emitted(request, stages):
        op = emitted.operation
        key = (op.kind, op.axes, op.operand_bytes)
        counts[key] = counts.get(key, 0) + op.count
    return tuple(Operation(*key, count) for key, count in counts.items())


def wire_bytes(request: Request, stages: Sequence[Stage]) -> tuple[tuple[str, int], ...]:
    """Returns the bytes that the busiest rank sends over each axis.

    Bytes that go to a rank which differs in several axes count on each of them. Inside XLA's own
    collectives each group is taken as one ring in rank order (all-to-all: a share to each rank), which is
    how `xcoll.hlo` counts compiled programs.
    """
    every = list(_emitted(request, stages))
    if request.num_ranks > EXACT_MAX_RANKS:
        return tuple((axis, _bound(request, axis, every)) for axis in request.axes)
    sizes = request.axis_sizes
    places = np.array(np.unravel_index(np.arange(request.num_ranks), sizes))
    sent = np.zeros((len(sizes), request.num_ranks), np.int64)
    for emitted in every:
        for source, destination, num_bytes in _sends(request, emitted):
            differ = places[:, source] != places[:, destination]
            for axis in range(len(sizes)):
                np.add.at(sent[axis], source[differ[axis]], num_bytes)
    return tuple((a, int(sent[i].max())) for i, a in enumerate(request.axes))


def _emitted(request: Request, stages: Sequence[Stage]) -> Iterator[_Emitted]:
    if request.num_ranks == 1:
        return
    if len(stages) == 1 and stages[0].choice.name == "native":
        yield from _native(request, stages[0])
        return
    cut = operands(request.collective, stages, request.num_elements)
    for stage, operand in zip(stages, cut, strict=True):
        yield from _stage(request, stage, operand)


def _native(request: Request, stage: Stage) -> Iterator[_Emitted]:
    collective = NATIVE_AS.get(request.collective, request.collective)
    kind = _HLO[collective]
    if request.collective == "broadcast" and request.platform == "gpu":
        kind = "collective-broadcast"
    for shape in request.shapes:
        num_bytes = math.prod(shape) * request.itemsize
        if num_bytes:
            yield _Emitted(Operation(kind, request.axes, num_bytes, 1), stage.span)


def _stage(request: Request, stage: Stage, operand: Operand) -> Iterator[_Emitted]:
    span, ranks = stage.span, stage.span.num_ranks
    if ranks == 1:
        return
    slot_bytes = operand.slot_elements * request.itemsize

    def emit(kind: str, slots: int, count: int, **more: object) -> _Emitted:
        operation = Operation(kind, span.axes, slots * slot_bytes, count)
        return _Emitted(operation, span, **more)  # type: ignore[arg-type]

    if ranks > EXACT_MAX_RANKS:
        for phase in stage_form(stage).phases:
            if phase.kind == "permute":
                count = phase.steps * phase.lanes
                yield emit(_HLO["permute"], phase.slots, count, distance=phase.distance)
            elif phase.kind != "fold":
                yield emit(_HLO[phase.kind], phase.slots, 1)
        return
    schedule = build(stage.choice, stage.collective, ranks, dims=stage.dims)
    for step, count in _steps(schedule):
        if isinstance(step, NativeStep):
            whole = step.collective != "all_gather"
            slots = schedule.num_slots if whole else schedule.share
            yield emit(_HLO[step.collective], slots, count)
        else:
            yield emit(_HLO["permute"], step.send.count, count, pairs=step.pairs)


def _steps(schedule: Schedule) -> Iterator[tuple[NativeStep | Lane, int]]:
    for step in schedule.steps:
        body, count = (step.body, step.count) if isinstance(step, Repeat) else ((step,), 1)
        for inner in body:
            if isinstance(inner, PermuteStep):
                for lane in inner.lanes:
                    yield lane, count
            elif isinstance(inner, NativeStep):
                yield inner, count


def _sends(request: Request, emitted: _Emitted) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields sources, destinations (ranks over all axes) and bytes of what is sent."""
    members = _members(request, emitted.span)
    op, n = emitted.operation, emitted.span.num_ranks
    if emitted.pairs is not None:
        pairs = np.array(emitted.pairs)
        yield (
            members[:, pairs[:, 0]].ravel(),
            members[:, pairs[:, 1]].ravel(),
            op.operand_bytes * op.count,
        )
    elif op.kind == "all-to-all":
        for shift in range(1, n):
            share = op.operand_bytes // n * op.count
            yield members.ravel(), np.roll(members, -shift, axis=1).ravel(), share
    else:
        following = np.roll(members, -1, axis=1)
        if op.kind == "collective-broadcast":
            members, following = members[:, :-1], following[:, :-1]
        yield members.ravel(), following.ravel(), _ring_bytes(op, n)


def _ring_bytes(op: Operation, num_ranks: int) -> int:
    n = num_ranks
    each = {
        "all-reduce": 2 * (n - 1) * op.operand_bytes // n,
        "reduce-scatter": (n - 1) * op.operand_bytes // n,
        "all-gather": (n - 1) * op.operand_bytes,
        "collective-broadcast": op.operand_bytes,
        "collective-permute": op.operand_bytes,
    }
    return each[op.kind] * op.count


def _members(request: Request, span: Span) -> np.ndarray:
    """Returns the spans' ranks over all axes: one row a span, in the order of its ranks."""
    sizes = dict(zip(request.axes, request.axis_sizes, strict=True))
    grid = np.arange(request.num_ranks).reshape(request.axis_sizes)
    inside = [request.axes.index(a) for a in span.axes]
    outside = [i for i in range(len(request.axes)) if i not in inside]
    flat = grid.transpose(*outside, *inside).reshape(-1, math.prod(sizes[a] for a in span.axes))
    rows = flat.reshape(len(flat), -1, span.num_ranks, span.stride)
    return rows.transpose(0, 1, 3, 2).reshape(-1, span.num_ranks)


def _bound(request: Request, axis: str, every: Sequence[_Emitted]) -> int:
    """Bytes over one axis without looking at ranks: exact for rings, else an upper bound."""
    total = 0
    for emitted in every:
        op, span = emitted.operation, emitted.span
        size = dict(zip(request.axes, request.axis_sizes, strict=True))[axis]
        if axis not in span.axes or size == 1:
            continue
        n = span.num_ranks
        if op.kind == "all-to-all":
            size = min(size, n)
            total += op.operand_bytes // n * (n - n // size) * op.count
        elif op.kind == "collective-permute":
            after = math.prod(
                request.axis_sizes[request.axes.index(a)]
                for a in span.axes[span.axes.index(axis) + 1 :]
            )
            # A whole number of turns of this axis does not move along it.
            if emitted.distance % max(1, after * size // span.stride):
                total += op.operand_bytes * op.count
        else:
            total += _ring_bytes(op, n)
    return total


_MANTISSA = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "complex64": 24}
_MANTISSA |= {"complex128": 53}


def error_bound(request: Request, stages: Sequence[Stage]) -> int:
    """Returns the bound on the error of a sum, in units of the dtype's unit roundoff.

    With ``u`` the unit roundoff and ``h`` the longest chain of additions that a term passes,
    ``|computed - exact| <= bound * u * sum |x|``, where the bound is the smaller of ``n - 1``, which holds
    for every order of summation, and ``h / (1 - h u)``, rounded up. XLA's own collectives give
    ``n - 1``: their order is not known.

    Returns:
      0 where nothing is rounded: data movement, integers, max and min.

    References:
      Jeannerod and Rump, "Improved error bounds for inner products in floating-point arithmetic",
      SIAM J. Matrix Anal. Appl. 34(2), 2013 (``n - 1``). Higham, "Accuracy and Stability of
      Numerical Algorithms", 2nd ed., section 4.2 (``h``).
    """
    if request.op not in ("sum", "prod") or not is_inexact(request.dtype):
        return 0
    worst = request.num_ranks - 1
    height = sum(_height(stage) for stage in stages)
    # What has fewer bits than listed is taken to have three, as float8_e5m2.
    unit = 1 << _MANTISSA.get(request.dtype, 3)
    if request.op == "sum" and height < unit:
        return min(worst, -(-height * unit // (unit - height)))
    if request.op == "prod":
        # A product of n factors is rounded n - 1 times, whatever the order.
        return -(-worst * unit // (unit - worst)) if worst < unit else worst * unit
    return worst


def is_inexact(dtype: str) -> bool:
    """Whether arithmetic in ``dtype`` rounds."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _height(stage: Stage) -> int:
    """Longest chain of additions that a term of a stage's result passes."""
    n = stage.span.num_ranks
    if stage.collective not in ("all_reduce", "reduce_scatter", "reduce"):
        return 0
    options = dict(stage.choice.options)
    log = (n - 1).bit_length()
    if stage.choice.name in ("recursive_doubling", "halving_doubling"):
        # Ranks beyond a power of two are added to a partner first: one level of the tree.
        return log
    if stage.choice.name == "tree":
        radix = options.get("radix", 2)
        levels = 0
        while radix**levels < n:
            levels += 1
        return min(n - 1, levels * (radix - 1))
    if stage.choice.name == "double_tree":
        return min(n - 1, 2 * log)
    return n - 1
