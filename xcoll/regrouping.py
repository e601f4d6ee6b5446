"""What hierarchies copy on a device: each stage has the digit that it acts on in front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xcoll.plan import Request, Span, Stage


def rank_stride(request: Request, span: Span) -> int:
    """Returns how far apart neighbours of a span are in the numbering of all ranks."""
    last = max(request.axes.index(axis) for axis in span.axes)
    return span.stride * math.prod(request.axis_sizes[last + 1 :])


def moved_elements(request: Request, stages: Sequence[Stage], num_elements: int) -> int:
    """Returns the elements that a rank copies to bring digits to the front, and back.

    The payload of a hierarchy is ``(digit, ..., digit, elements)``, most significant digit first.
    An all-reduce may cut its payload anyhow, and needs no order.

    Args:
      request: what is done.
      stages: how.
      num_elements: of the operand of each rank.

    Example:
      >>> from xcoll.policy import Choice
      >>> request = Request("all_gather", "none", ("host", "device"), (2, 4), "int8", 1, ((3,),))
      >>> hosts, devices = Span(("host",), 2), Span(("device",), 4)
      >>> stages = [Stage("all_gather", span, Choice("native")) for span in (hosts, devices)]
      >>> moved_elements(request, stages, 3)  # of 2 hosts with 4 devices each, gathered by device
      24
    """
    if len(stages) == 1 or request.collective == "all_reduce":
        return 0
    strides = [rank_stride(request, stage.span) for stage in stages]
    present = [] if request.collective == "all_gather" else sorted(strides, reverse=True)
    moved = 0
    for stride, stage in zip(strides, stages, strict=True):
        if stage.collective == "all_gather":
            num_elements *= stage.span.num_ranks
            present = sorted([*present, stride], reverse=True)
        if present[0] != stride:
            moved += num_elements * (2 if stage.collective == "all_to_all" else 1)
        if stage.collective == "reduce_scatter":
            num_elements //= stage.span.num_ranks
            present.remove(stride)
    return moved
