"""The operations that XLA makes of its own collectives, alone or inside a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from xcoll.costmodel import REDUCTIONS, carried_itemsize, native_as
from xcoll.libtpu import Part, parts
from xcoll.plan import Request, Span
from xcoll.topology import Digit, Topology

HLO_KIND = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
    "broadcast": "collective-broadcast",
}
"""What the schedules' collectives are called in compiled programs."""


def plain(request: Request, span: Span, topology: Topology | None) -> Iterator[Part]:
    """Yields what XLA makes of the collectives that a native plan leaves alone.

    Args:
      request: what is done.
      span: all its ranks.
      topology: where XLA cuts a collective by it (TPU slices).
    """
    collective = native_as(request.collective, request.platform)
    itemsize, dtype = _carried(request, collective), request.dtype
    if request.collective in ("broadcast", "gather", "scatter"):
        itemsize, dtype = request.itemsize, "bits"
    for shape in request.shapes:
        if math.prod(shape):
            yield from _parts(request, span, collective, shape, itemsize, dtype, topology)


def inside(
    request: Request,
    span: Span,
    collective: str,
    slots: int,
    slot_elements: int,
    topology: Topology | None,
) -> Iterator[Part]:
    """Yields what XLA makes of one of its collectives inside a plan.

    Args:
      request: what is done.
      span: the ranks of the stage.
      collective: the schedules' name.
      slots: of the operand.
      slot_elements: elements of each.
      topology: as for `plain`.
    """
    itemsize = _carried(request, collective) if collective in REDUCTIONS else request.itemsize
    elements = slots * slot_elements
    shape = (elements,) if slot_elements % 1024 else (elements // 128, 128)
    return _parts(request, span, collective, shape, itemsize, request.dtype, topology)


def _parts(
    request: Request,
    span: Span,
    collective: str,
    shape: tuple[int, ...],
    itemsize: int,
    dtype: str,
    topology: Topology | None,
) -> Iterator[Part]:
    if request.platform != "tpu":
        yield Part(HLO_KIND[collective], math.prod(shape) * itemsize)
        return
    digits = () if topology is None else _digits(topology, span)
    yield from parts(HLO_KIND[collective], digits, shape, itemsize, dtype)


def _digits(topology: Topology, span: Span) -> tuple[Digit, ...]:
    """Returns the levels of a span, each with its axis: `span_digits` joins those of several."""
    return tuple(
        replace(digit, stride=digit.stride // span.stride)
        for digit in topology.digits(span.axes)
        if span.stride <= digit.stride < span.stride * span.num_ranks
    )


def _carried(request: Request, collective: str) -> int:
    """Bytes of an element in one of XLA's own collectives."""
    if request.platform == "gpu" and collective in REDUCTIONS:
        # NCCL has no 16-bit integers.
        return 4 if request.dtype in ("int16", "uint16") else request.itemsize
    return carried_itemsize(request.dtype, request.itemsize, request.platform)
