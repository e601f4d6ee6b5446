"""Stages of an algorithm that the policy names."""

from __future__ import annotations

from xcoll.algorithms import ALGORITHMS
from xcoll.candidates import (
    NATIVE,
    Run,
    axis_spans,
    compose,
    does,
    fastest_first,
    span_of,
    whole_span,
)
from xcoll.plan import Request, Span, Stage
from xcoll.policy import Choice
from xcoll.topology import Topology


def forced_stages(request: Request, topology: Topology, choice: Choice) -> tuple[Stage, ...] | str:
    """Returns the stages of a choice for a request.

    Args:
      request: what is to be done.
      topology: known or not; the levels of a hierarchy are its kinds of links. Where it is unknown,
        or has one kind only, they are the mesh axes, the last one innermost.
      choice: a checked choice. Levels that it leaves out are native, or a ring where XLA's
        reduce-scatter cannot combine by the request's op.

    Returns:
      The stages; or the reason why there are none, as text.
    """
    is_pipelined = dict(choice.options).get("num_segments", 1) > 1
    if choice.name == "hierarchical" and not is_pipelined:
        return _hierarchy(request, topology, choice)
    if request.collective not in ALGORITHMS[choice.name].collectives:
        return does(choice, request.collective, request.op) or ""
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
        reason = does(top, request.collective, request.op)
        return reason or (Stage(request.collective, whole_span(request), top),)
    if len(choice.levels) > len(spans):
        return f"{choice} has {len(choice.levels)} levels, and there are {len(spans)}"
    can = does(NATIVE, "reduce_scatter", request.op) is None
    scatters = request.collective in ("all_reduce", "reduce_scatter")
    missing = range(len(choice.levels), len(spans))
    filled = [
        NATIVE
        if can or not scatters or (request.collective == "all_reduce" and i == len(spans) - 1)
        else Choice("ring")
        for i in missing
    ]
    stages = compose(request.collective, spans, [*choice.levels, *filled])
    if stages is None:
        names = "all_reduce, reduce_scatter, all_gather, all_to_all"
        return f"hierarchical has no {request.collective}; it does {names}"
    for stage in stages:
        reason = does(stage.choice, stage.collective, request.op)
        if reason is not None:
            return reason
    return stages
