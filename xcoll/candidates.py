"""Enumerates the plans that a request could have: stages over spans of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

from xcoll.algorithms import ALGORITHMS, part_of
from xcoll.costmodel import Operand, carried, operands, payload_elements
from xcoll.emitted import MAX_PERMUTES, permutes_in_program
from xcoll.libtpu import cannot, undone
from xcoll.loads import span_digits
from xcoll.plan import Request, Span, Stage
from xcoll.policy import Choice
from xcoll.topology import Digit, Topology

NATIVE = Choice("native")
DIRECT = Choice("direct")

Price = Callable[[Sequence[Stage]], int]

_NATIVE_OPS = {"all_reduce": ("sum", "max", "min"), "reduce_scatter": ("sum",)}
_TRIED: dict[str, tuple[tuple[str, int], ...]] = {
    "tree": (("radix", 2), ("radix", 4), ("radix", 8)),
    "double_tree": (("num_chunks", 4), ("num_chunks", 16)),
    "direct": (("shots", 1), ("shots", 2)),
}
GAIN_PERCENT = 10
"""A decomposition must be predicted this much faster than XLA's own collective."""

START_GAIN_PERCENT = 50
"""The same where a third of a measured time or more is the start: prices are off by more there."""

_MEASURED_GAIN_PERCENT = 2

_SEGMENTS = (2, 4, 8)


def whole_span(request: Request) -> Span:
    """Returns the span of all ranks of a request."""
    return Span(request.axes, request.num_ranks, 1)


def on_tpu(request: Request, topology: Topology) -> bool:
    """Whether a plan is for a TPU."""
    return "tpu" in (request.platform, topology.platform)


def does(choice: Choice, collective: str, request: Request, topology: Topology) -> str | None:
    """Returns None if ``choice`` can carry out a stage of a plan, else the sentence why not."""
    op = request.op
    algorithm = ALGORITHMS[choice.name]
    if collective not in algorithm.collectives:
        return f"{choice.name} has no {collective}; it does {', '.join(algorithm.collectives)}"
    ops = _NATIVE_OPS.get(collective, (op,))
    if choice.name == "native" and op not in ops:
        return f"XLA's {collective} combines by {', '.join(ops)} only, not by {op}"
    if choice.name == "native" and on_tpu(request, topology):
        return cannot(collective, request.dtype)
    return None


def choices(collective: str, request: Request, topology: Topology) -> list[Choice]:
    """Returns the algorithms to try for one stage, native first."""
    found = [NATIVE] if does(NATIVE, collective, request, topology) is None else []
    for name, algorithm in ALGORITHMS.items():
        if name in ("native", "hierarchical") or algorithm.needs_dims:
            continue
        if collective not in algorithm.collectives:
            continue
        if name == "direct" and collective in ("all_gather", "all_to_all") and found:
            continue  # the same program as native
        variants = _TRIED.get(name) if name != "direct" or collective == "all_reduce" else None
        found += [Choice(name, (v,)) for v in variants] if variants else [Choice(name)]
    return found


EVERY_CUT_MAX_LEVELS = 4
"""Levels up to which every way to cut them into a hierarchy is tried."""

Run = tuple[Digit, ...]
"""Neighbouring levels that are planned as one."""


def levels_of(request: Request, topology: Topology) -> list[Run]:
    """Returns the levels of a request, innermost first: the torus axes of a mesh axis are one."""
    levels: list[Run] = []
    for digit in topology.digits(request.axes):
        last = levels[-1][-1] if levels else None
        if last is not None and (last.axis, last.level.link) == (digit.axis, digit.level.link):
            levels[-1] = (*levels[-1], digit)
        else:
            levels.append((digit,))
    return levels


def splits(levels: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """Yields ways to cut the levels into two or more runs, innermost first.

    All of them for up to `EVERY_CUT_MAX_LEVELS` levels, beyond that each single cut: their number
    doubles with each level.
    """
    gaps = max(0, len(levels) - 1)
    ways: Iterable[tuple[bool, ...]] = itertools.product((False, True), repeat=gaps)
    if len(levels) > EVERY_CUT_MAX_LEVELS:
        ways = (tuple(i == gap for i in range(gaps)) for gap in range(gaps))
    for cuts in ways:
        if not any(cuts):
            continue
        runs: list[Run] = [levels[0]]
        for is_cut, level in zip(cuts, levels[1:], strict=True):
            if is_cut:
                runs.append(level)
            else:
                runs[-1] = (*runs[-1], *level)
        yield tuple(runs)


def fastest_first(runs: Sequence[Run]) -> list[Run]:
    """Returns runs of levels from the fastest to the slowest; alike ones stay, innermost first.

    A hierarchy need not follow the numbering of the ranks, which may have the hosts inside.
    """

    def seconds_per_byte(run: Run) -> Fraction:
        return max(
            Fraction(0)
            if digit.level.link.network == "memory"
            else Fraction(digit.level.shared_by, digit.level.bandwidth_bytes_per_s)
            for digit in run
        )

    return sorted(runs, key=seconds_per_byte)


def span_of(request: Request, run: Sequence[Digit]) -> Span:
    """Returns the span of a run of neighbouring levels."""
    used = {digit.axis for digit in run}
    axes = tuple(axis for axis in request.axes if axis in used)
    return Span(axes, math.prod(digit.level.size for digit in run), run[0].axis_stride)


def axis_spans(request: Request) -> tuple[Span, ...]:
    """Returns one span a mesh axis, the last axis (innermost) first."""
    pairs = zip(request.axes, request.axis_sizes, strict=True)
    return tuple(Span((axis,), size, 1) for axis, size in reversed(list(pairs)) if size > 1)


def compose(
    collective: str, spans: Sequence[Span], levels: Sequence[Choice]
) -> tuple[Stage, ...] | None:
    """Returns the stages of a hierarchy.

    Args:
      collective: what the whole does.
      spans: the ranks of each level, innermost first.
      levels: the algorithm of each.

    Returns:
      None where the collective is no composition of such parts.
    """
    pairs = list(zip(spans, levels, strict=True))
    if collective == "all_reduce":
        inner, (last, top) = pairs[:-1], pairs[-1]
        scatter = [Stage("reduce_scatter", s, part_of(c, "reduce_scatter")) for s, c in inner]
        gather = [Stage("all_gather", s, part_of(c, "all_gather")) for s, c in reversed(inner)]
        return (*scatter, Stage("all_reduce", last, top), *gather)
    if collective in ("reduce_scatter", "all_to_all"):
        # The reduce-scatter starts inside: what is left for the slow links is smallest.
        return tuple(Stage(collective, s, part_of(c, collective)) for s, c in pairs)
    if collective == "all_gather":
        return tuple(Stage(collective, s, part_of(c, collective)) for s, c in reversed(pairs))
    return None


def hierarchies(
    request: Request, topology: Topology, price: Price
) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """Yields names and stages of hierarchies at every split of the levels.

    Stages do not overlap, so that the best algorithm of each level makes the best hierarchy, where
    XLA's own is the best unless another makes the plan faster by `margin_percent`. Of two
    levels, all that were tried on the way to it are yielded; of more, the first (native where
    that can be) and the best.
    """
    cut = list(splits(levels_of(request, topology)))
    for runs in cut:
        spans = [span_of(request, run) for run in fastest_first(runs)]
        where = " over " + ", ".join(str(s.num_ranks) for s in spans) if len(cut) > 1 else ""
        options = [
            level_choices(request, topology, position == len(spans) - 1)
            for position in range(len(spans))
        ]
        stages = compose(request.collective, spans, [NATIVE] * len(spans))
        if stages is None or not all(options):
            continue
        # XLA's own is offered where it would be undone, to be shown with the reason, but not taken.
        undone_at = undone_stages(request, topology, stages)
        usable = [
            [c for c in tried if c != NATIVE or position not in undone_at]
            for position, tried in enumerate(options)
        ]
        levels = [
            DIRECT if tried[0] != NATIVE and DIRECT in tried else tried[0] for tried in usable
        ]
        tried_out: dict[tuple[Choice, ...], tuple[Stage, ...]] = {}
        # One round finds the best: a level's cost does not depend on the others' algorithms but
        # for padding.
        for position, choices_here in enumerate(options):
            ranked: list[tuple[int, int, Choice]] = []
            for choice in choices_here:
                trial = (*levels[:position], choice, *levels[position + 1 :])
                stages = compose(request.collective, spans, trial)
                assert stages is not None
                if choice in usable[position]:
                    ranked.append((price(stages), len(ranked), choice))
                tried_out[trial] = stages
            levels[position] = _worth_it(ranked, margin_percent(topology))
        keep = tried_out if len(runs) == 2 else (next(iter(tried_out)), tuple(levels))
        for trial in dict.fromkeys(keep):
            yield f"hierarchical({', '.join(map(str, trial))}){where}", tried_out[trial]


def margin_percent(topology: Topology) -> int:
    """Returns how much faster a plan must be than another decomposition that leaves more to XLA.

    As much as than XLA's own collective, where the prices come from a hardware table. Measured ones
    tell smaller differences.
    """
    return _MEASURED_GAIN_PERCENT if topology.measured else GAIN_PERCENT


def _worth_it(ranked: Sequence[tuple[int, int, Choice]], margin: int) -> Choice:
    """Returns the fastest choice, or the first (native) unless the gain is enough to replace it."""
    fastest, first = min(ranked), ranked[0]
    enough = fastest[0] * 100 <= first[0] * (100 - margin)
    return fastest[2] if enough or first[2] != NATIVE else first[2]


def level_choices(request: Request, topology: Topology, is_outermost: bool) -> list[Choice]:
    """Returns the algorithms to try at one level of a hierarchy."""
    if request.collective != "all_reduce":
        return choices(request.collective, request, topology)
    if is_outermost:
        return choices("all_reduce", request, topology)
    return [
        choice
        for choice in choices("reduce_scatter", request, topology)
        if does(part_of(choice, "all_gather"), "all_gather", request, topology) is None
    ]


def whole(request: Request, topology: Topology) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """Yields names and stages of one algorithm over all ranks."""
    span = whole_span(request)
    for choice in choices(request.collective, request, topology):
        if choice != NATIVE:
            yield str(choice), (Stage(request.collective, span, choice),)
    digits = topology.digits(request.axes)
    dims = tuple(digit.level.size for digit in reversed(digits))
    torus = ALGORITHMS.get("torus")
    if torus is not None and request.collective in torus.collectives and len(dims) > 1:
        yield "torus", (Stage(request.collective, span, Choice("torus"), dims),)
    pipelined = ALGORITHMS.get("hierarchical")
    if pipelined is None or request.collective not in pipelined.collectives:
        return
    for runs in splits(levels_of(request, topology)):
        if len(runs) == 2:
            inner, outer = (math.prod(d.level.size for d in run) for run in runs)
            for segments in _SEGMENTS:
                choice = Choice("hierarchical", (("num_segments", segments),))
                name = (
                    f"{choice} over {inner}, {outer}"
                    if len(levels_of(request, topology)) > 2
                    else str(choice)
                )
                yield name, (Stage(request.collective, span, choice, (outer, inner)),)


def barred(request: Request, topology: Topology, stages: Sequence[Stage]) -> str | None:
    """Returns why a plan is not to be chosen freely, whatever it is predicted to take, or None."""
    permutes = permutes_in_program(stages)
    if permutes > MAX_PERMUTES:
        return f"its {permutes} permutes would take too long to compile (at most {MAX_PERMUTES})"
    return next(iter(undone_stages(request, topology, stages).values()), None)


def describe(collective: str, stages: Sequence[Stage]) -> str:
    """Returns how a plan reads: its stage, or a hierarchy of them, innermost first."""
    parts = list(stages)
    if collective == "all_reduce":
        # What was scattered is gathered again by the same levels.
        parts = [stage for stage in stages if stage.collective != "all_gather"]
    if collective == "all_gather":
        parts.reverse()
    if len(parts) == 1:
        return str(parts[0])
    return f"hierarchical({', '.join(map(str, parts))})"


def undone_stages(request: Request, topology: Topology, stages: Sequence[Stage]) -> dict[int, str]:
    """Returns the stages that XLA:TPU would turn from a reduce-scatter into an all-reduce.

    Returns:
      Why, by position in ``stages``; nothing where the plan is not for a TPU.
    """
    if not on_tpu(request, topology):
        return {}
    found: dict[int, str] = {}
    cut: list[Operand] = []
    for position, stage in enumerate(stages):
        if stage.collective == "reduce_scatter" and stage.choice == NATIVE:
            elements = payload_elements(request, stages)
            cut = cut or operands(request.collective, stages, elements)
            digits = span_digits(topology, stage.span)
            reason = undone(carried(request, stages).dtype, digits, cut[position].slot_elements)
            if reason is not None:
                found[position] = reason
    return found
