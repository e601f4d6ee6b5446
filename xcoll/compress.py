"""Puts codecs into plans: from exact stages to encoded ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from xcoll import codecs
from xcoll.algorithms import ALGORITHMS, part_of
from xcoll.candidates import DIRECT
from xcoll.codecs import Codec, FixedPoint
from xcoll.costmodel import REDUCTIONS, operands, payload_elements
from xcoll.plan import Request, Stage
from xcoll.policy import Policy

KERNELS = "Pallas"
"""What a plan says where Pallas kernels carry its codecs out."""

MOVES = ("all_gather", "all_to_all", "permute")
"""Collectives that only move data: a payload is encoded once, whatever the algorithm."""

_SCATTERS = ("direct", "ring", "bidirectional_ring", "halving_doubling", "pairwise", "torus")
"""Algorithms that can re-encode partial sums on their way."""


def why_exact(request: Request, policy: Policy) -> str | None:
    """Returns why no codec may carry a request, whatever its axes and algorithm, or None."""
    if not (policy.codec or policy.max_error):
        return "the policy has no codec"
    if request.collective not in (*REDUCTIONS, *MOVES):
        return f"codecs carry no {request.collective}"
    if request.collective not in MOVES and request.op != "sum":
        return f"codecs carry sums, and no {request.op}"
    least = policy.lossy_min_bytes()
    for shape in request.shapes:
        if request.bytes_of(shape) < least:
            return f"under {least} bytes, where payloads stay exact"
    for codec in dict.fromkeys(codec for _, _, codec in policy.permits if codec):
        reason = codec.refuses(request.dtype)
        if reason is not None:
            return reason
    return None


def compress(request: Request, stages: Sequence[Stage], policy: Policy) -> tuple[Stage, ...] | str:
    """Returns stages with the policy's codecs on the axes that they cross.

    Args:
      request: what is done, which codecs may carry (`why_exact`).
      stages: an exact plan.
      policy: what is permitted, narrowed to the collective.

    Returns:
      The stages, the same where the policy has no codec for any of their axes; or the reason why
      an algorithm cannot be compressed, as text.
    """
    sizes = dict(zip(request.axes, request.axis_sizes, strict=True))
    shared = policy.codec_over(tuple(axis for axis, size in sizes.items() if size > 1))
    if shared is not None and shared.integers is not None:
        if request.collective in MOVES:
            return f"{shared} is for sums, and {request.collective} has nothing to add up"
        if isinstance(shared, FixedPoint) and (why := shared.why_not(request.num_ranks)):
            return f"{shared} {why}"
        return tuple(replace(stage, codec=shared) for stage in stages)
    out: list[Stage] = []
    for stage in stages:
        crossed = tuple(axis for axis in stage.span.axes if sizes[axis] > 1)
        codec = policy.codec_over(moved_axes(request) if request.pairs else crossed)
        if codec is None or stage.span.num_ranks == 1:
            out.append(stage)
            continue
        if codec.integers is not None:
            return (
                f"{codec} shares one scale among all ranks: permit it for all axes of"
                f" {request.axes}"
            )
        made = _encoded(stage, codec)
        if isinstance(made, str):
            return made
        out += made
    return tuple(out)


def _encoded(stage: Stage, codec: Codec) -> list[Stage] | str:
    name, collective = stage.choice.name, stage.collective
    if collective in MOVES:
        choice = DIRECT if name == "native" else stage.choice
        return [replace(stage, choice=choice, codec=codec)]
    if name == "recursive_doubling" and collective == "all_reduce" and codec.needs_key:
        return "recursive_doubling rounds one sum on several ranks, which must not differ by chance"
    is_one_shot = dict(stage.choice.options).get("shots", 2) == 1
    if collective == "all_reduce" and (name == "recursive_doubling" or is_one_shot):
        return [replace(stage, codec=codec)]
    choice = DIRECT if name in ("native", "direct") else stage.choice
    if choice.name not in _SCATTERS:
        return f"{name} has no encoded form; {', '.join((*_SCATTERS, 'recursive_doubling'))} do"
    scatter = replace(
        stage, collective="reduce_scatter", choice=part_of(choice, "reduce_scatter"), codec=codec
    )
    if collective == "reduce_scatter":
        return [scatter]
    # A pairwise sum ends with XLA's own all-gather, which does not keep both ways of a link busy.
    does = "all_gather" in ALGORITHMS[choice.name].collectives
    gathered_by = choice if does else part_of(choice, "all_gather")
    return [scatter, replace(stage, collective="all_gather", choice=gathered_by, codec=codec)]


def moved_axes(request: Request) -> tuple[str, ...]:
    """Returns the axes along which a permute's pairs move."""
    moved = [False] * len(request.axes)
    for source, destination in request.pairs:
        for place in reversed(range(len(moved))):
            size = request.axis_sizes[place]
            moved[place] |= source % size != destination % size
            source, destination = source // size, destination // size
    return tuple(axis for axis, is_moved in zip(request.axes, moved, strict=True) if is_moved)


def assignments(request: Request, policy: Policy) -> Iterator[Policy]:
    """Yields the policies to try: the given one or, for an error budget alone, one a codec.

    For all axes, and for each single one, the codecs that take the dtype, fewest bytes first. Those
    that are over the budget with a single rounding are left out, but for the finest.
    """
    if policy.codec is not None:
        yield policy
        return
    sizes = zip(request.axes, request.axis_sizes, strict=True)
    axes = [axis for axis, size in sizes if size > 1]
    taken = [c for c in codecs.CODECS.values() if c.refuses(request.dtype) is None]
    taken.sort(key=lambda c: (c.wire_bytes((_MANY,), request.dtype), c.max_error))
    finest = min((c.max_error for c in taken), default=0.0)
    budget = max(policy.max_error or 0.0, finest)
    for axis in ("", *(axes if len(axes) > 1 else ())):
        for codec in taken:
            if codec.max_error <= budget:
                yield replace(policy, codec=(("", axis, codec),))


_MANY = 1 << 20
"""Elements by which codecs are compared: whole blocks of any."""


def kernels_for(request: Request, stages: Sequence[Stage], policy: Policy) -> str:
    """Returns what carries a plan's codecs out: ``"Pallas"``, or why it is the reference."""
    encoded = [s for s in stages if s.codec is not None and s.codec.integers is None]
    if not encoded:
        return ""
    if not policy.kernels:
        return "reference: the policy's kernels=False"
    cut = operands(request.collective, stages, payload_elements(request, stages))
    for stage, operand in zip(stages, cut, strict=True):
        if stage.codec is not None:
            reason = stage.codec.why_reference(
                operand.slot_elements, stage.span.num_ranks, request.platform
            )
            if reason is not None:
                return f"reference: {reason}"
    return KERNELS
