"""What a plan emits, sends and rounds: operations, bytes over each axis, error bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from xcoll.costmodel import (
    Operand,
    carried,
    operands,
    payload_elements,
    stage_form,
    wire_slot,
)
from xcoll.emitted import (
    EXACT_MAX_RANKS,
    MAX_PERMUTES,
    Ints,
    Pairs,
    emitted_by,
    permutes_in_program,
)
from xcoll.libtpu import Part, operands_of
from xcoll.pieces import HLO_KIND, inside, plain
from xcoll.plan import Operation, Request, Span, Stage
from xcoll.topology import Digit, Topology


def operations(
    request: Request, stages: Sequence[Stage], topology: Topology | None = None
) -> tuple[Operation, ...]:
    """Returns the operations that a plan puts into the program, alike ones counted together.

    Args:
      request: what is done.
      stages: the plan's stages.
      topology: shows what libtpu cuts into several operations (`xcoll.libtpu.parts`); those between
        slices, a send and a recv in the program, are named by the collective that they carry out.

    Permutes are listed as the plan writes them: XLA:GPU may combine some, and a TPU sends the pairs
    that go between slices apart from those inside.
    """
    counts: dict[tuple[str, tuple[str, ...], int], int] = {}
    for part, axes, count in _operations(request, stages, topology):
        pieces = operands_of(part, request.dtype) if request.platform == "tpu" else 1
        key = (part.kind, axes, part.num_bytes // pieces)
        counts[key] = counts.get(key, 0) + count * pieces
    return tuple(Operation(*key, count) for key, count in counts.items())


def wire_bytes(
    request: Request, stages: Sequence[Stage], topology: Topology | None = None
) -> tuple[tuple[str, int], ...]:
    """Returns the bytes that the busiest rank sends over each axis.

    Bytes that go to a rank which differs in several axes count on each of them. Inside XLA's own
    collectives each group is taken as one ring in rank order (in an all-to-all each rank sends a
    share to each other), which is how `xcoll.hlo` counts compiled programs. On a TPU, where the
    topology is known, so is each of the operations that libtpu makes of one.

    For more than `EXACT_MAX_RANKS` ranks or `MAX_PERMUTES` permutes, bytes of permutes are an upper
    bound.

    Args:
      request: what is done.
      stages: the plan's stages.
      topology: as for `operations`.
    """
    if request.num_ranks == 1:
        return tuple((axis, 0) for axis in request.axes)
    request = carried(request, stages)
    sent = traffic(request, stages, topology)
    if sent is None:
        totals = dict.fromkeys(request.axes, 0)
        for span, part, count, distance in _bounds(request, stages, topology):
            for axis in span.axes:
                totals[axis] += _bound(request, span, axis, part, distance) * count
        return tuple(totals.items())
    most = sent.max(axis=1) // request.num_ranks
    return tuple((axis, int(num_bytes)) for axis, num_bytes in zip(request.axes, most, strict=True))


def traffic(
    request: Request, stages: Sequence[Stage], topology: Topology | None = None
) -> Ints | None:
    """Returns what each rank sends over each axis, so that plans can be added up rank by rank.

    Args:
      request: what is done.
      stages: the plan's stages.
      topology: as for `operations`.

    Returns:
      ``[axis, rank]``, in bytes times the number of ranks (in a ring of n ranks each sends an n-th
      of the payload: so multiplied, it is exact). None where the plan is too large to count
      (`wire_bytes`).
    """
    if not _is_counted(request, stages):
        return None
    request = carried(request, stages)
    sent = np.zeros((len(request.axes), request.num_ranks), np.int64)
    if _is_native(stages):
        for part in plain(request, stages[0].span, topology):
            sent += _native_traffic(request, stages[0].span, part)
    else:
        for stage, operand in _cut(request, stages):
            if stage.span.num_ranks == 1:
                continue
            emitted = emitted_by(stage, request)
            slot, dtype, itemsize = _slot(request, stage, operand)
            assert emitted.moved is not None
            moved = emitted.moved * slot * itemsize * request.num_ranks
            sent += _traffic(request, stage.span, moved)
            for collective, slots in emitted.natives:
                on_wire = replace(request, dtype=dtype, itemsize=itemsize)
                for part in inside(on_wire, stage.span, collective, slots, slot, topology):
                    sent += _native_traffic(request, stage.span, part)
    for part in _shared_scale(request, stages):
        sent += _native_traffic(request, whole_span_of(request), part)
    return sent


def _is_counted(request: Request, stages: Sequence[Stage]) -> bool:
    return request.num_ranks <= EXACT_MAX_RANKS and permutes_in_program(stages) <= MAX_PERMUTES


def _is_native(stages: Sequence[Stage]) -> bool:
    return len(stages) == 1 and stages[0].choice.name == "native" and stages[0].codec is None


def _cut(request: Request, stages: Sequence[Stage]) -> Iterator[tuple[Stage, Operand]]:
    elements = payload_elements(request, stages)
    return zip(stages, operands(request.collective, stages, elements), strict=True)


def _slot(request: Request, stage: Stage, operand: Operand) -> tuple[int, str, int]:
    """Returns items, dtype and bytes of an item with which a slot of one chunk travels."""
    slot = operand.slot_elements // stage.num_chunks
    return wire_slot(stage, slot, request.dtype, request.itemsize)


def _shared_scale(request: Request, stages: Sequence[Stage]) -> Iterator[Part]:
    """Yields the all-reduce that finds one scale for all ranks: a float32 a site."""
    if stages[0].codec is not None and stages[0].codec.integers is not None:
        yield Part(HLO_KIND["all_reduce"], 4 * len(request.shapes))


def whole_span_of(request: Request) -> Span:
    """Returns the span of all ranks of a request."""
    return Span(request.axes, request.num_ranks, 1)


def _operations(
    request: Request, stages: Sequence[Stage], topology: Topology | None
) -> Iterator[tuple[Part, tuple[str, ...], int]]:
    """Yields operations, their axes and executions."""
    if request.num_ranks == 1:
        return
    if _is_native(stages):
        span = stages[0].span
        for part in plain(request, span, topology):
            yield part, _axes(span, part), 1
        return
    for part in _shared_scale(request, stages):
        yield part, request.axes, 1
    request = carried(request, stages)
    for stage, operand in _cut(request, stages):
        if stage.span.num_ranks > 1:
            emitted = emitted_by(stage, request)
            slot, dtype, itemsize = _slot(request, stage, operand)
            for slots, pairs, count in emitted.permutes:
                moved = _moved_axes(request, stage.span, pairs)
                yield Part(HLO_KIND["permute"], slots * slot * itemsize), moved, count
            for collective, slots in emitted.natives:
                on_wire = replace(request, dtype=dtype, itemsize=itemsize)
                for part in inside(on_wire, stage.span, collective, slots, slot, topology):
                    yield part, _axes(stage.span, part), 1


def _axes(span: Span, part: Part) -> tuple[str, ...]:
    """Returns the axes of a span that a part acts over."""
    if not part.digits:
        return span.axes
    return tuple(axis for axis in span.axes if any(d.axis == axis for d in part.digits))


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


def _native_traffic(request: Request, span: Span, part: Part) -> Ints:
    """Returns bytes, times the number of all ranks, that each rank sends over each axis."""
    n = span.num_ranks
    matrix = np.zeros((n, n), np.int64)
    for group in _groups(n, part.digits):
        size = len(group)
        if part.kind == "all-to-all":
            matrix[np.ix_(group, group)] += part.num_bytes * (request.num_ranks // size)
        else:
            ring = size - 1 if part.kind == "collective-broadcast" else size
            each = _ring_bytes(part.kind, part.num_bytes * request.num_ranks, size)
            matrix[group[:ring], np.roll(group, -1)[:ring]] += each
    return _traffic(request, span, matrix)


def _groups(num_ranks: int, digits: tuple[Digit, ...]) -> Ints:
    """Returns the places of a span that differ in some digits only, one row a group."""
    places = np.arange(num_ranks)
    if not digits:
        return places[None]
    others = places.copy()
    for digit in digits:
        others -= places // digit.stride % digit.level.size * digit.stride
    return np.argsort(others, kind="stable").reshape(-1, _size(digits))


def _size(digits: Sequence[Digit]) -> int:
    return math.prod(digit.level.size for digit in digits)


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


def _bounds(
    request: Request, stages: Sequence[Stage], topology: Topology | None
) -> Iterator[tuple[Span, Part, int, int]]:
    """Yields span, operation, executions and distance of everything a large plan emits."""
    if _is_native(stages):
        for part in plain(request, stages[0].span, topology):
            yield stages[0].span, part, 1, 1
        return
    for part in _shared_scale(request, stages):
        yield whole_span_of(request), part, 1, 1
    for stage, operand in _cut(request, stages):
        slot, dtype, itemsize = _slot(request, stage, operand)
        if stage.collective == "permute":
            yield stage.span, Part(HLO_KIND["permute"], slot * itemsize), 1, 1
            continue
        on_wire = replace(request, dtype=dtype, itemsize=itemsize)
        for phase in stage_form(stage).phases:
            runs = phase.steps * phase.lanes * stage.num_chunks
            if phase.kind == "permute":
                part = Part(HLO_KIND[phase.kind], phase.slots * slot * itemsize)
                yield stage.span, part, runs, phase.distance
            elif phase.kind != "fold":
                for part in inside(on_wire, stage.span, phase.kind, phase.slots, slot, topology):
                    yield stage.span, part, runs, phase.distance


def _bound(request: Request, span: Span, axis: str, part: Part, distance: int) -> int:
    size = request.axis_sizes[request.axes.index(axis)]
    n = _size(part.digits) if part.digits else span.num_ranks
    if size == 1 or n == 1 or axis not in _axes(span, part):
        return 0
    if part.kind == "all-to-all":
        return part.num_bytes // n * (n - n // min(size, n))
    if part.kind == "collective-permute":
        inner = span.axes[span.axes.index(axis) + 1 :]
        after = math.prod(request.axis_sizes[request.axes.index(a)] for a in inner)
        # A whole number of turns of this axis does not move along it.
        if distance % max(1, after * size // span.stride) == 0:
            return 0
    return _ring_bytes(part.kind, part.num_bytes, n)
