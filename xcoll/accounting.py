"""What a plan emits, sends and rounds: operations, bytes over each axis, error bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from xcoll.costmodel import (
    REDUCTIONS,
    Operand,
    carried_itemsize,
    native_as,
    operands,
    stage_form,
)
from xcoll.emitted import (
    EXACT_MAX_RANKS,
    MAX_PERMUTES,
    Ints,
    Pairs,
    emitted_by,
    permutes_in_program,
)
from xcoll.plan import Operation, Request, Span, Stage

HLO_KIND = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
    "broadcast": "collective-broadcast",
}
"""What the schedules' collectives are called in compiled programs."""


def operations(request: Request, stages: Sequence[Stage]) -> tuple[Operation, ...]:
    """Returns the operations that a plan puts into the program, alike ones counted together."""
    counts: dict[tuple[str, tuple[str, ...], int], int] = {}
    for kind, axes, num_bytes, count in _operations(request, stages):
        counts[kind, axes, num_bytes] = counts.get((kind, axes, num_bytes), 0) + count
    return tuple(Operation(*key, count) for key, count in counts.items())


def wire_bytes(request: Request, stages: Sequence[Stage]) -> tuple[tuple[str, int], ...]:
    """Returns the bytes that the busiest rank sends over each axis.

    Bytes that go to a rank which differs in several axes count on each of them. Inside XLA's own
    collectives each group is taken as one ring in rank order (in an all-to-all each rank sends a
    share to each other), which is how `xcoll.hlo` counts compiled programs.

    For more than `EXACT_MAX_RANKS` ranks or `MAX_PERMUTES` permutes, bytes of permutes are an upper
    bound.
    """
    if request.num_ranks == 1:
        return tuple((axis, 0) for axis in request.axes)
    if not _is_counted(request, stages):
        totals = dict.fromkeys(request.axes, 0)
        for span, kind, num_bytes, count, distance in _bounds(request, stages):
            for axis in span.axes:
                totals[axis] += _bound(request, span, axis, kind, num_bytes, distance) * count
        return tuple(totals.items())
    sent = np.zeros((len(request.axes), request.num_ranks), np.int64)
    if _is_native(stages):
        for kind, _, num_bytes, count in _operations(request, stages):
            sent += count * _native_traffic(request, stages[0].span, kind, num_bytes)
    else:
        for stage, operand in _cut(request, stages):
            if stage.span.num_ranks == 1:
                continue
            emitted, slot = emitted_by(stage, request.root), operand.slot_elements
            assert emitted.moved is not None
            sent += _traffic(request, stage.span, emitted.moved * slot * request.itemsize)
            for collective, slots in emitted.natives:
                num_bytes = slots * slot * _itemsize_in(request, collective)
                sent += _native_traffic(request, stage.span, HLO_KIND[collective], num_bytes)
    return tuple((axis, int(sent[i].max())) for i, axis in enumerate(request.axes))


def _is_counted(request: Request, stages: Sequence[Stage]) -> bool:
    return request.num_ranks <= EXACT_MAX_RANKS and permutes_in_program(stages) <= MAX_PERMUTES


def _is_native(stages: Sequence[Stage]) -> bool:
    return len(stages) == 1 and stages[0].choice.name == "native"


def _cut(request: Request, stages: Sequence[Stage]) -> Iterator[tuple[Stage, Operand]]:
    return zip(stages, operands(request.collective, stages, request.num_elements), strict=True)


def _operations(
    request: Request, stages: Sequence[Stage]
) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
    """Yields kind, axes, bytes of the operand and executions."""
    if request.num_ranks == 1:
        return
    if _is_native(stages):
        kind = HLO_KIND[native_as(request.collective, request.platform)]
        itemsize = carried_itemsize(request.dtype, request.itemsize, request.platform)
        if request.collective in ("broadcast", "gather", "scatter"):
            itemsize = request.itemsize  # moved as bit patterns
        for shape in request.shapes:
            if num_bytes := math.prod(shape) * itemsize:
                yield kind, request.axes, num_bytes, 1
        return
    for stage, operand in _cut(request, stages):
        if stage.span.num_ranks > 1:
            emitted, slot = emitted_by(stage, request.root), operand.slot_elements
            axes = stage.span.axes
            for slots, pairs, count in emitted.permutes:
                moved = _moved_axes(request, stage.span, pairs)
                yield HLO_KIND["permute"], moved, slots * slot * request.itemsize, count
            for collective, slots in emitted.natives:
                num_bytes = slots * slot * _itemsize_in(request, collective)
                yield HLO_KIND[collective], axes, num_bytes, 1


def _itemsize_in(request: Request, collective: str) -> int:
    """Bytes of an element in a collective inside a plan."""
    if collective not in REDUCTIONS:
        return request.itemsize
    return carried_itemsize(request.dtype, request.itemsize, request.platform)


def _moved_axes(request: Request, span: Span, pairs: Pairs) -> tuple[str, ...]:
    """Returns the axes in which the ends of a pair differ, or all where the pairs are not known."""
    if not pairs:
        return span.axes
    _, differ = _members(request.axes, request.axis_sizes, span)
    sources, destinations = zip(*pairs, strict=True)
    moved = differ[:, sources, destinations].any(axis=1)
    return tuple(axis for axis, is_moved in zip(request.axes, moved, strict=True) if is_moved)


def _traffic(request: Request, span: Span, matrix: Ints) -> Ints:
    """Returns bytes sent over each axis (row) by each rank, where spans send by ``matrix``."""
    members, differ = _members(request.axes, request.axis_sizes, span)
    by_place = np.einsum("ij,aij->ai", matrix, differ)
    sent = np.zeros((len(request.axes), request.num_ranks), np.int64)
    sent[:, members] = by_place[:, None, :]
    return sent


def _native_traffic(request: Request, span: Span, kind: str, num_bytes: int) -> Ints:
    n = span.num_ranks
    matrix = np.zeros((n, n), np.int64)
    if kind == "all-to-all":
        matrix += num_bytes // n
    else:
        ring = np.arange(n - 1 if kind == "collective-broadcast" else n)
        matrix[ring, (ring + 1) % n] = _ring_bytes(kind, num_bytes, n)
    return _traffic(request, span, matrix)


def _ring_bytes(kind: str, num_bytes: int, num_ranks: int) -> int:
    n = num_ranks
    return {
        "all-reduce": 2 * (n - 1) * num_bytes // n,
        "reduce-scatter": (n - 1) * num_bytes // n,
        "all-gather": (n - 1) * num_bytes,
        "collective-broadcast": num_bytes,
        "collective-permute": num_bytes,
    }[kind]


@functools.lru_cache(maxsize=256)
def _members(
    axes: tuple[str, ...], axis_sizes: tuple[int, ...], span: Span
) -> tuple[Ints, np.ndarray]:
    """Returns the spans' ranks over all axes, and on which axes places of a span differ.

    The first has one row a span, in the order of its ranks; the second is ``[axis, place, place]``,
    the same for all spans.
    """
    sizes = dict(zip(axes, axis_sizes, strict=True))
    total = math.prod(axis_sizes)
    inside = [axes.index(a) for a in span.axes]
    outside = [i for i in range(len(axes)) if i not in inside]
    grid = np.arange(total).reshape(axis_sizes).transpose(*outside, *inside)
    rows = grid.reshape(-1, math.prod(sizes[a] for a in span.axes))
    cut = rows.reshape(len(rows), -1, span.num_ranks, span.stride)
    members = cut.transpose(0, 1, 3, 2).reshape(-1, span.num_ranks)
    places = np.array(np.unravel_index(members[0], axis_sizes))
    return members, places[:, :, None] != places[:, None, :]


def _bounds(request: Request, stages: Sequence[Stage]) -> Iterator[tuple[Span, str, int, int, int]]:
    """Yields span, kind, bytes, executions and distance of everything a large plan emits."""
    if _is_native(stages):
        for kind, _, num_bytes, count in _operations(request, stages):
            yield stages[0].span, kind, num_bytes, count, 1
        return
    for stage, operand in _cut(request, stages):
        for phase in stage_form(stage).phases:
            if phase.kind != "fold":
                kind = HLO_KIND[phase.kind]
                count = phase.steps * phase.lanes
                itemsize = _itemsize_in(request, phase.kind)
                num_bytes = phase.slots * operand.slot_elements * itemsize
                yield stage.span, kind, num_bytes, count, phase.distance


def _bound(
    request: Request, span: Span, axis: str, kind: str, num_bytes: int, distance: int
) -> int:
    size = request.axis_sizes[request.axes.index(axis)]
    n = span.num_ranks
    if size == 1 or n == 1:
        return 0
    if kind == "all-to-all":
        return num_bytes // n * (n - n // min(size, n))
    if kind == "collective-permute":
        inner = span.axes[span.axes.index(axis) + 1 :]
        after = math.prod(request.axis_sizes[request.axes.index(a)] for a in inner)
        # A whole number of turns of this axis does not move along it.
        if distance % max(1, after * size // span.stride) == 0:
            return 0
    return _ring_bytes(kind, num_bytes, n)
