"""Building the algorithms of the catalog, and what choices of them can do."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from xcoll.algorithms.catalog import ALGORITHMS, Algorithm
from xcoll.choosing import check_choice
from xcoll.errors import UnsupportedError, unknown
from xcoll.policy import Choice
from xcoll.schedule import COLLECTIVES, ROOTED, ClosedForm, Schedule

_COUNTERPART = {
    ("halving_doubling", "all_gather"): "recursive_doubling",
    ("recursive_doubling", "reduce_scatter"): "halving_doubling",
    ("pairwise", "all_gather"): "native",
}


def supports(choice: Choice, collective: str) -> str | None:
    """Returns None if ``choice`` can do ``collective``, else the sentence why not.

    >>> supports(Choice("ring"), "all_reduce") is None
    True
    >>> supports(Choice("pairwise"), "reduce")
    'pairwise has no reduce; it does all_reduce, reduce_scatter, all_gather, all_to_all'
    """
    check_choice("supports", choice)
    if choice.name == "hierarchical" and _segments(choice) == 1:
        # A composition of stages that the planner makes: each level must do its part.
        return _supports_levels(choice, collective)
    algorithm = ALGORITHMS[choice.name]
    if choice.name == "hierarchical" and any(level != Choice("ring") for level in choice.levels):
        return f"{choice}: pipelined levels are rings; name no other levels, or num_segments=1"
    if collective in algorithm.builders:
        return None
    return f"{choice} has no {collective}; it does {', '.join(algorithm.collectives)}"


def _segments(choice: Choice) -> int:
    return dict(choice.options).get("num_segments", 1)


def part_of(level: Choice, collective: str) -> Choice:
    """Returns the algorithm with which a level does its part.

    Halving and doubling are two halves of one algorithm: recursive halving scatters,
    recursive doubling gathers. What was summed pairwise, XLA gathers.
    """
    name = _COUNTERPART.get((level.name, collective))
    return Choice(name) if name else level


def _supports_levels(choice: Choice, collective: str) -> str | None:
    parts: tuple[tuple[str, ...], ...]
    if collective == "all_reduce":
        parts = (("reduce_scatter", "all_gather"), ("all_reduce",))
    elif collective in ("reduce_scatter", "all_gather", "all_to_all"):
        parts = ((collective,), (collective,))
    else:
        does = "all_reduce, reduce_scatter, all_gather, all_to_all"
        return f"hierarchical has no {collective}; it does {does}"
    for number, level in enumerate(choice.levels):
        outermost = number == len(choice.levels) - 1 and number > 0
        for part in parts[1] if outermost else parts[0]:
            reason = supports(part_of(level, part), part)
            if reason is not None:
                return f"level {number} of {choice}: {reason}"
    return None


@lru_cache(maxsize=512)
def build(
    choice: Choice,
    collective: str,
    num_ranks: int,
    *,
    dims: tuple[int, ...] = (),
    root: int = 0,
) -> Schedule:
    """Builds the schedule of an algorithm; the same arguments give the same object.

    Args:
      choice: the algorithm, with options.
      collective: one of `xcoll.schedule.COLLECTIVES`.
      num_ranks: number of ranks, at least 1.
      dims: sizes of levels or axes, outermost first, for algorithms that need them;
        ``prod(dims) == num_ranks``.
      root: for rooted collectives.

    Raises:
      ValueError: an argument is out of range, or the choice is unknown.
      UnsupportedError: the algorithm cannot do the collective.

    Example:
      >>> build(Choice("ring"), "all_reduce", 8).num_slots
      8
    """
    algorithm, arguments = _arguments("build", choice, collective, num_ranks, dims)
    if collective in ROOTED:
        if not 0 <= root < num_ranks:
            raise ValueError(f"build(root={root}): must be a rank, 0 to {num_ranks - 1}")
        arguments["root"] = root
    return algorithm.builders[collective](num_ranks, **arguments)


@lru_cache(maxsize=4096)
def closed_form(
    choice: Choice, collective: str, num_ranks: int, *, dims: tuple[int, ...] = ()
) -> ClosedForm:
    """Returns what the schedule would do, without building it.

    The permute phases have in total as many steps as the schedule has, and ``steps * slots *
    lanes`` summed over them is the sum over steps of the slots that the step's busiest rank
    sends. Work is O(log n) at most, O(number of axes) for several axes.

    Args:
      choice: the algorithm, with options.
      collective: one of `xcoll.schedule.COLLECTIVES`.
      num_ranks: number of ranks, at least 1.
      dims: as for `build`.

    Raises:
      ValueError: an argument is out of range, or the choice is unknown.
      UnsupportedError: the algorithm cannot do the collective.

    Example:
      >>> closed_form(Choice("ring"), "all_reduce", 131072).phases[0].steps
      131071
    """
    algorithm, arguments = _arguments("closed_form", choice, collective, num_ranks, dims)
    return algorithm.form(collective, num_ranks, **arguments)


def _arguments(
    call: str, choice: Choice, collective: str, num_ranks: int, dims: tuple[int, ...]
) -> tuple[Algorithm, dict[str, Any]]:
    check_choice(call, choice)
    if num_ranks < 1:
        raise ValueError(f"{call}(num_ranks={num_ranks}): must be at least 1")
    if collective not in COLLECTIVES:
        raise ValueError(unknown(call, "collective", collective, COLLECTIVES))
    algorithm = ALGORITHMS[choice.name]
    reason = supports(choice, collective)
    if reason is not None:
        raise UnsupportedError(f"{call}: {reason}")
    if choice.name == "hierarchical" and _segments(choice) == 1:
        raise UnsupportedError(
            f"{call}: {choice} is a composition of stages, which the planner makes, and no one"
            " schedule; build its levels, or give num_segments above 1"
        )
    arguments: dict[str, Any] = {
        name: dict(choice.options).get(name, option.default)
        for name, option in algorithm.options.items()
    }
    if algorithm.needs_dims:
        if not dims or min(dims) < 1 or math.prod(dims) != num_ranks:
            raise ValueError(
                f"{call}(dims={dims}): {choice.name} needs the sizes of its levels, outermost"
                f" first, whose product is the number of ranks, {num_ranks}"
            )
        arguments["dims"] = dims
    return algorithm, arguments
