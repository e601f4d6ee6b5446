"""How stages share a slow link with the work around it: turns on it, and chunks behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from xcoll.costmodel import Operand, operands, payload_elements
from xcoll.emitted import EXACT_MAX_RANKS, emitted_by
from xcoll.loads import span_digits
from xcoll.plan import Request, Span, Stage
from xcoll.schedule import swaps
from xcoll.topology import Digit, Topology

PriceStage = Callable[[Stage, Operand], int]

_CHUNKS = (2, 4, 8)
_CHUNK_GAIN_PERCENT = 2
"""Each doubling of the chunks must be predicted to make the stage this much faster."""
_SLOW = ("network", "dcn")
"""Kinds of link that are worth hiding work behind."""


def shared(
    request: Request, topology: Topology, stages: Sequence[Stage], price: PriceStage
) -> tuple[Stage, ...]:
    """Returns stages that make the most of the links between hosts.

    Where two hosts swap over one connection, half of a host's devices send first while the other
    half receive (`Stage.beside`). Where a codec works for a slow link, the payload takes the stage
    in the number of chunks with the lowest price.

    Args:
      request: what is done.
      topology: a known one.
      stages: the plan's stages.
      price: of a stage on its operand, in picoseconds.
    """
    made = [replace(s, beside=_beside(request, topology, s), num_chunks=1) for s in stages]
    cut = operands(request.collective, made, payload_elements(request, made))
    return tuple(
        _in_chunks(stage, operand, price) if _is_cuttable(topology, stage) else stage
        for stage, operand in zip(made, cut, strict=True)
    )


def _beside(request: Request, topology: Topology, stage: Stage) -> Span | None:
    """Returns the devices of a host that take turns in a stage between hosts, or None."""
    if not _is_of_permutes(stage) or stage.span.num_ranks > EXACT_MAX_RANKS:
        return None
    links = [digit.level.link for digit in span_digits(topology, stage.span)]
    if any(k.network == "memory" or k.swap_percent <= k.unlike_percent for k in links):
        return None
    if not any(swaps(pairs) for _, pairs, _ in emitted_by(stage, request).permutes):
        return None
    inside = [
        digit
        for digit in topology.digits((*(axis for axis, _ in request.in_step), *request.axes))
        if digit.level.link.network == "memory" and digit.level.size > 1
    ]
    best = min(inside, key=_larger_half, default=None)
    return None if best is None else Span((best.axis,), best.level.size, best.axis_stride)


def _larger_half(digit: Digit) -> Fraction:
    size = digit.level.size
    return Fraction(size - size // 2, size)


def _is_of_permutes(stage: Stage) -> bool:
    moves = stage.collective != "permute" and stage.choice.name not in ("native", "direct")
    return moves and not stage.dims and stage.span.num_ranks > 1


def _is_cuttable(topology: Topology, stage: Stage) -> bool:
    if stage.codec is None or stage.codec.integers is not None or not _is_of_permutes(stage):
        return False
    return any(d.level.link.kind in _SLOW for d in span_digits(topology, stage.span))


def _in_chunks(stage: Stage, operand: Operand, price: PriceStage) -> Stage:
    best, time = stage, price(stage, operand)
    block = max(1, stage.codec.block) if stage.codec else 1
    for chunks in _CHUNKS:
        if operand.slot_elements % (chunks * block):
            break
        tried = replace(stage, num_chunks=chunks)
        its = price(tried, operand)
        if its * 100 > time * (100 - _CHUNK_GAIN_PERCENT):
            break
        best, time = tried, its
    return best
