"""The table of algorithms: what each can do, how it is built, and its closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from xcoll.algorithms import (
    doubling,
    logarithmic,
    oneshot,
    pipelines,
    rings,
    tori,
    trees,
    twin_trees,
    two_way,
)
from xcoll.errors import UnsupportedError, unknown
from xcoll.policy import Choice
from xcoll.schedule import COLLECTIVES, ClosedForm, Schedule

Builder = Callable[..., Schedule]
Former = Callable[..., ClosedForm]
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Option:
    """An integer option of an algorithm: what it is when not given, and its bounds."""

    default: int
    minimum: int
    maximum: int | None = None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm.

    Attributes:
      name: its name in the API.
      builders: for each collective it can do, the function that builds the schedule: called with
        the number of ranks, the options, ``root`` for a rooted collective, and ``dims``
        where `needs_dims`.
      form: ``(collective, num_ranks, **options[, dims])`` to its closed form.
      options: by name.
      needs_dims: it spans several levels or axes at once, whose sizes it must know.
    """

    name: str
    builders: Mapping[str, Builder] = field(repr=False)
    form: Former = field(repr=False)
    options: Mapping[str, Option] = field(default_factory=dict)
    needs_dims: bool = False

    @property
    def collectives(self) -> tuple[str, ...]:
        """What it can do, in the order of `xcoll.schedule.COLLECTIVES`."""
        return tuple(c for c in COLLECTIVES if c in self.builders)


def _native(collective: str) -> Builder:
    return lambda num_ranks: oneshot.native_schedule(collective, num_ranks)


_TABLE = (
    Algorithm(
        name="native",
        builders={
            c: _native(c) for c in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        },
        form=oneshot.native_form,
    ),
    Algorithm(
        name="ring",
        builders={
            "all_reduce": rings.ring_all_reduce,
            "reduce_scatter": rings.ring_reduce_scatter,
            "all_gather": rings.ring_all_gather,
            "broadcast": rings.ring_broadcast,
        },
        form=rings.ring_form,
    ),
    Algorithm(
        name="bidirectional_ring",
        builders={
            "all_reduce": two_way.bidirectional_ring_all_reduce,
            "reduce_scatter": two_way.bidirectional_ring_reduce_scatter,
            "all_gather": two_way.bidirectional_ring_all_gather,
        },
        form=two_way.two_way_form,
    ),
    Algorithm(
        name="recursive_doubling",
        builders={
            "all_reduce": doubling.recursive_doubling_all_reduce,
            "all_gather": doubling.recursive_doubling_all_gather,
        },
        form=doubling.doubling_form,
    ),
    Algorithm(
        name="halving_doubling",
        builders={
            "all_reduce": doubling.halving_doubling_all_reduce,
            "reduce_scatter": doubling.halving_doubling_reduce_scatter,
            "broadcast": logarithmic.halving_doubling_broadcast,
        },
        form=logarithmic.halving_doubling_form,
    ),
    Algorithm(
        name="tree",
        builders={
            "all_reduce": trees.tree_all_reduce,
            "broadcast": trees.tree_broadcast,
            "reduce": trees.tree_reduce,
            "gather": trees.tree_gather,
            "scatter": trees.tree_scatter,
        },
        form=trees.tree_form,
        options={"radix": Option(2, 2)},
    ),
    Algorithm(
        name="double_tree",
        builders={"all_reduce": twin_trees.double_tree_all_reduce},
        form=twin_trees.double_tree_form,
        options={"num_chunks": Option(8, 1)},
    ),
    Algorithm(
        name="bruck",
        builders={
            "all_gather": logarithmic.bruck_all_gather,
            "all_to_all": logarithmic.bruck_all_to_all,
        },
        form=logarithmic.bruck_form,
    ),
    Algorithm(
        name="pairwise",
        builders={"all_to_all": logarithmic.pairwise_all_to_all},
        form=logarithmic.pairwise_form,
    ),
    Algorithm(
        name="direct",
        builders={
            "all_reduce": oneshot.direct_all_reduce,
            "reduce_scatter": lambda n, shots=2: oneshot.direct_reduce_scatter(n),
            "all_gather": lambda n, shots=2: oneshot.direct_all_gather(n),
            "all_to_all": lambda n, shots=2: oneshot.direct_all_to_all(n),
        },
        form=oneshot.direct_form,
        options={"shots": Option(2, 1, 2)},
    ),
    Algorithm(
        name="torus",
        builders={
            "all_reduce": tori.torus_all_reduce,
            "reduce_scatter": tori.torus_reduce_scatter,
            "all_gather": tori.torus_all_gather,
        },
        form=tori.torus_form,
        needs_dims=True,
    ),
    Algorithm(
        name="hierarchical",
        builders={"all_reduce": pipelines.pipelined_all_reduce},
        form=pipelines.pipelined_form,
        options={"num_segments": Option(1, 1)},
        needs_dims=True,
    ),
)

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _TABLE}
"""Every algorithm, by name. An addition is one entry of this module's table."""


def supports(choice: Choice, collective: str) -> str | None:
    """Returns None if ``choice`` can do ``collective``, else the sentence why not.

    >>> supports(Choice("ring"), "all_reduce") is None
    True
    >>> supports(Choice("pairwise"), "reduce")
    'pairwise has no reduce; it does all_to_all'
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
            reason = supports(level, part)
            if reason is not None:
                return f"level {number} of {choice}: {reason}"
    return None


def check_choice(call: str, choice: Choice) -> None:
    """Checks that a choice names an algorithm and its options.

    Args:
      call: how the message names the call.
      choice: what to check; its levels are checked too.

    Raises:
      ValueError: the algorithm or an option is unknown, or an option is out of bounds.

    >>> check_choice("psum", Choice("rng"))
    Traceback (most recent call last):
    ValueError: psum: unknown algorithm 'rng'; valid: 'native', ... Did you mean 'ring'?
    """
    if choice.name not in ALGORITHMS:
        raise ValueError(unknown(call, "algorithm", choice.name, ALGORITHMS))
    algorithm = ALGORITHMS[choice.name]
    for name, value in choice.options:
        if name not in algorithm.options:
            raise ValueError(unknown(call, f"option of {choice.name}", name, algorithm.options))
        option = algorithm.options[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{call}: {choice.name}({name}={value!r}): must be an integer")
        if value < option.minimum or (option.maximum is not None and value > option.maximum):
            most = "" if option.maximum is None else f" and at most {option.maximum}"
            raise ValueError(
                f"{call}: {choice.name}({name}={value}): must be at least {option.minimum}{most}"
            )
    if choice.levels and choice.name != "hierarchical":
        raise ValueError(f"{call}: {choice}: only hierarchical has levels, {choice.name} has none")
    for level in choice.levels:
        if level.name == "hierarchical":
            raise ValueError(
                f"{call}: {choice}: a level cannot be hierarchical; give hierarchical more levels"
            )
        check_choice(call, level)


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
