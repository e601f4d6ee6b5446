"""Binomial and k-nomial trees: steps logarithmic in the ranks, for small payloads and roots.

Ranks are counted from the root. At the level of stride ``d`` the parents are the multiples of
``radix * d``, and a parent's children are ``d, 2 d, ..., (radix - 1) d`` further; with radix 2
that is the binomial tree. A parent sends to all children of a level in one step, on a lane
each, but receives from one a step, since what it receives is combined in one slot (and,
gathered, comes in through one port).

References:
  Chan et al., "Collective communication: theory, practice, and experience", 2007, section 4:
  minimum spanning tree algorithms.
"""

from __future__ import annotations

from xcoll.algorithms.steps import every, moved
from xcoll.schedule import ClosedForm, Lane, PermuteStep, Phase, Schedule, ShuffleStep, Step


def _strides(n: int, radix: int) -> list[int]:
    strides, stride = [], 1
    while stride < n:
        strides.append(stride)
        stride *= radix
    return strides


def _edges(n: int, root: int, radix: int, stride: int, child: int) -> list[tuple[int, int, int]]:
    """Returns (parent, child, child counted from the root) for a level's ``child``-th children."""
    parents = range(0, max(0, n - child * stride), radix * stride)
    return [((q + root) % n, (q + child * stride + root) % n, q + child * stride) for q in parents]


def _up(n: int, root: int, radix: int, *, gather: bool) -> list[Step]:
    steps: list[Step] = []
    for stride in _strides(n, radix):
        for child in range(1, radix):
            moves = [
                (b, a, tuple(range(q, min(q + stride, n))) if gather else (0,))
                for a, b, q in _edges(n, root, radix, stride, child)
            ]
            steps += moved(n, moves, n, reduce=not gather)
    return steps


def _down(n: int, root: int, radix: int, *, scatter: bool) -> list[Step]:
    steps: list[Step] = []
    for stride in reversed(_strides(n, radix)):
        lanes: list[Lane] = []
        for child in range(1, radix):
            moves = [
                (a, b, tuple(range(q, min(q + stride, n))) if scatter else (0,))
                for a, b, q in _edges(n, root, radix, stride, child)
            ]
            for step in moved(n, moves, n, reduce=False):
                lanes += step.lanes
        steps.append(PermuteStep(tuple(lanes)))
    return steps


def tree_all_reduce(num_ranks: int, *, radix: int = 2) -> Schedule:
    """Builds the tree all-reduce: reduce to rank 0, then broadcast from it."""
    steps = _up(num_ranks, 0, radix, gather=False) + _down(num_ranks, 0, radix, scatter=False)
    return Schedule(
        algorithm="tree",
        collective="all_reduce",
        num_ranks=num_ranks,
        num_slots=1,
        steps=tuple(steps),
    )


def tree_reduce(num_ranks: int, *, root: int = 0, radix: int = 2) -> Schedule:
    """Builds the tree reduce: each parent combines what its children have."""
    return Schedule(
        algorithm="tree",
        collective="reduce",
        num_ranks=num_ranks,
        num_slots=1,
        steps=tuple(_up(num_ranks, root, radix, gather=False)),
        root=root,
    )


def tree_broadcast(num_ranks: int, *, root: int = 0, radix: int = 2) -> Schedule:
    """Builds the tree broadcast: ``ceil(log n / log radix)`` steps."""
    return Schedule(
        algorithm="tree",
        collective="broadcast",
        num_ranks=num_ranks,
        num_slots=1,
        steps=tuple(_down(num_ranks, root, radix, scatter=False)),
        root=root,
    )


def tree_gather(num_ranks: int, *, root: int = 0, radix: int = 2) -> Schedule:
    """Builds the tree gather: each parent collects the shares of its subtree."""
    steps = _counted_from(num_ranks, root, _up(num_ranks, root, radix, gather=True))
    return Schedule(
        algorithm="tree",
        collective="gather",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=steps,
        enter="own",
        root=root,
    )


def tree_scatter(num_ranks: int, *, root: int = 0, radix: int = 2) -> Schedule:
    """Builds the tree scatter: each parent hands on the shares of its children's subtrees."""
    steps = _counted_from(num_ranks, root, _down(num_ranks, root, radix, scatter=True))
    return Schedule(
        algorithm="tree",
        collective="scatter",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=steps,
        root=root,
    )


def _counted_from(n: int, root: int, steps: list[Step]) -> tuple[Step, ...]:
    """Returns the steps with slots counted from the root, as the subtrees are, and back."""
    if root == 0:
        return tuple(steps)
    there, back = ShuffleStep(every(n, lambda r: root)), ShuffleStep(every(n, lambda r: n - root))
    return (there, *steps, back)


def tree_form(collective: str, num_ranks: int, *, radix: int = 2) -> ClosedForm:
    """Returns the closed form of the trees. The root, or one of its children, is busiest."""
    n = num_ranks
    up: list[Phase] = []
    down: list[Phase] = []
    for d in _strides(n, radix):
        children = min(radix - 1, -(-n // d) - 1)
        whole = min(radix - 1, n // d - 1)
        rest = n - children * d if children > whole else 0
        if collective == "gather":
            up += _sparse(whole, d, d) + _sparse(children - whole, rest, d)
        elif collective == "scatter":
            # Children with unequal subtrees: the sum of what the root sends, on one lane.
            sent, lanes = (whole * d + rest, 1) if rest else (d, whole)
            down = _sparse(1, sent, d, lanes=lanes) + down
        else:
            up += _sparse(children, 1, d, reduce=True)
            down = _sparse(1, 1, d, lanes=children) + down
    if collective in ("reduce", "gather"):
        down = []
    elif collective in ("broadcast", "scatter"):
        up = []
    return ClosedForm(n if collective in ("gather", "scatter") else 1, (*up, *down))


def _sparse(
    steps: int, slots: int, distance: int, *, lanes: int = 1, reduce: bool = False
) -> list[Phase]:
    if steps == 0:
        return []
    return [Phase(steps, slots, pattern="sparse", distance=distance, lanes=lanes, reduce=reduce)]
