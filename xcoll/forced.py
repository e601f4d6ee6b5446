"""Stages of an algorithm that the policy names."""

from __future__ import annotations

from xcoll.algorithms import ALGORITHMS
from xcoll.candidates import (
    DIRECT,
    NATIVE,
    Run,
    axis_spans,
    compose,
    does,
    fastest_first,
    span_of,
    undone_stages,
    whole_span,
)
from xcoll.costmodel import REDUCTIONS
from xcoll.plan import Request, Span, Stage
from xcoll.policy import Choice
from xcoll.topology import Topology


def forced_stages(request: Request, topology: Topology, choice: Choice) -> tuple[Stage, ...] | str:
    """Returns the stages of a choice for a request.

    Args:
      request: what is to be done.
      topology: known or not; the levels of a hierarchy are its kinds of links. Where it is unknown,
        or has one kind only, they are the mesh axes, the last one innermost.
      choice: a checked choice. Levels that it leaves out are native; a ring where XLA's
        reduce-scatter cannot combine by the request's op; ``direct``, which sends the same bytes,
        where a TPU cannot compile it or turns it into an all-reduce.

    Returns:
      The stages; or the reason why there are none, as text.
    """
    is_pipelined = dict(choice.options).get("num_segments", 1) > 1
    if choice.name == "hierarchical" and not is_pipelined:
        return _hierarchy(request, topology, choice)
    if request.collective not in ALGORITHMS[choice.name].collectives:
        return does(choice, request.collective, request, topology) or ""
    dims: tuple[int, ...] = ()
    if ALGORITHMS[choice.name].needs_dims:
        if choice.name == "torus" and topology.is_known:
            sizes = [digit.level.size for digit in topology.digits(request.axes)]
        else:
            sizes = [span.num_ranks for span in level_spans(request, topology)]
        if len(sizes) < 2 and len(request.axes) < 2:
            return f"{choice.name} needs two levels or axes, and there is one"
        if not sizes or len(sizes) < 2:
            sizes = [request.num_ranks]  # The other axes have size one.
        if choice.name == "hierarchical":
            # The pipelined form knows two levels: the innermost, and everything around it.
            sizes = [sizes[0], request.num_ranks // sizes[0]]
        dims = tuple(reversed(sizes))
    return (Stage(request.collective, whole_span(request), choice, dims),)


def level_spans(request: Request, topology: Topology, at_least: int = 2) -> tuple[Span, ...]:
    """Returns the spans of a hierarchy's levels, the fastest links first.

    One for each kind of link; where that makes fewer than ``at_least``, one for each mesh axis.
    """
    by_axis = axis_spans(request)
    if not topology.is_known:
        return by_axis
    runs: list[Run] = []
    for digit in topology.digits(request.axes):
        if runs and runs[-1][-1].level.link == digit.level.link:
            runs[-1] = (*runs[-1], digit)
        else:
            runs.append((digit,))
    by_link = tuple(span_of(request, run) for run in fastest_first(runs))
    return by_axis if len(by_link) < min(at_least, len(by_axis)) else by_link


def _hierarchy(request: Request, topology: Topology, choice: Choice) -> tuple[Stage, ...] | str:
    spans = level_spans(request, topology, max(2, len(choice.levels)))
    if len(spans) < 2 and len(request.axes) < 2:
        return "hierarchical needs two levels, and there is one"
    if len(spans) < 2:
        # The other axes have size one: what is left is the outermost level's part.
        top = choice.levels[-1] if choice.levels else NATIVE
        reason = does(top, request.collective, request, topology)
        return reason or (Stage(request.collective, whole_span(request), top),)
    if len(choice.levels) > len(spans):
        return f"{choice} has {len(choice.levels)} levels, and there are {len(spans)}"
    stages = compose(request.collective, spans, _filled(request, topology, choice, spans))
    if stages is None:
        names = "all_reduce, reduce_scatter, all_gather, all_to_all"
        return f"hierarchical has no {request.collective}; it does {names}"
    for stage in stages:
        reason = does(stage.choice, stage.collective, request, topology)
        if reason is not None:
            return reason
    return stages


def _filled(
    request: Request, topology: Topology, choice: Choice, spans: tuple[Span, ...]
) -> list[Choice]:
    """Returns the levels of a choice, with those that it leaves out."""
    named = len(choice.levels)
    levels = [*choice.levels, *[NATIVE] * (len(spans) - named)]
    is_missing = request.collective == "all_reduce" and named < len(spans)
    if is_missing and does(NATIVE, "all_reduce", request, topology) is not None:
        levels[-1] = Choice("ring")
    scattering = len(spans) - 1 if request.collective == "all_reduce" else len(spans)
    if request.collective not in REDUCTIONS or named >= scattering:
        return levels
    if does(NATIVE, "reduce_scatter", request, topology) is not None:
        stand_in = DIRECT if request.op == "sum" else Choice("ring")
        return [stand_in if named <= i < scattering else c for i, c in enumerate(levels)]
    # A stage of `direct` cuts its operand as XLA's own would be cut: the later ones stay the same.
    stages = compose(request.collective, spans, levels)
    assert stages is not None
    undone_at = undone_stages(request, topology, stages)
    return [DIRECT if i in undone_at and i >= named else c for i, c in enumerate(levels)]
