"""Double binary trees: two complementary trees, half of the payload each, pipelined.

A rank that is inside one tree is a leaf of the other, so that over both every rank sends about
as much as it receives. Coloured with two colours so that no rank sends, or receives,
twice in a colour, the edges take turns: a chunk a tree moves up every two steps.

References:
  Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
  scan", Parallel Computing 35(12), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from xcoll.algorithms.steps import in_place
from xcoll.schedule import ClosedForm, PermuteStep, Phase, Schedule, Step


@dataclass(frozen=True)
class _Edge:
    """An edge of tree 0 or 1 at ``depth`` (1 at the root)."""

    tree: int
    child: int
    parent: int
    depth: int


def _in_order(n: int) -> list[tuple[int, int, int]]:
    """Returns (child, parent, depth) of the in-order tree on labels 1 to n.

    Labels with ``h`` trailing zero bits are at height ``h``: odd labels are the leaves. Where
    the right child of the rule is beyond ``n``, its nearest descendant on the left takes its
    place.
    """
    edges = []
    waiting = [(1 << (n.bit_length() - 1), 0)]
    while waiting:
        label, depth = waiting.pop()
        half = (label & -label) // 2
        children = [label - half] if half else []
        while half and label + half > n:
            half //= 2
        children += [label + half] if half else []
        edges += [(child, label, depth + 1) for child in children]
        waiting += [(child, depth + 1) for child in children]
    return edges


def _edges(n: int) -> list[_Edge]:
    edges = []
    for child, parent, depth in _in_order(n):
        edges.append(_Edge(0, child - 1, parent - 1, depth))
        # Mirrored, or for an odd number shifted by one rank: even labels become odd.
        a, b = (n - child, n - parent) if n % 2 == 0 else (child % n, parent % n)
        edges.append(_Edge(1, a, b, depth))
    return edges


def _colours(n: int, edges: list[_Edge]) -> list[int]:
    """Colours edges 0 and 1 so that no rank sends or receives twice in a colour.

    A rank sends at most twice (once a tree) and receives at most twice (in the tree where it is
    inside), so the edges that exclude each other form paths and even cycles.
    """
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[int]] = {}
    for number, edge in enumerate(edges):
        sends.setdefault(edge.child, []).append(number)
        receives.setdefault(edge.parent, []).append(number)
    colours = [-1] * len(edges)
    for first in range(len(edges)):
        waiting = [(first, 0)]
        while waiting:
            number, colour = waiting.pop()
            if colours[number] >= 0:
                continue
            colours[number] = colour
            beside = sends[edges[number].child] + receives[edges[number].parent]
            waiting += [(other, 1 - colour) for other in beside if other != number]
    return colours


def double_tree_all_reduce(num_ranks: int, *, num_chunks: int = 8) -> Schedule:
    """Builds the double binary tree all-reduce: reduce up both trees, then broadcast down.

    ``4 (num_chunks + floor(log2 n) - 1)`` steps (2 fewer for a power of two) of ``1 / (2
    num_chunks)`` of the payload: twice the payload sent for many chunks, as a ring, with a
    latency logarithmic in the ranks.

    Args:
      num_ranks: number of ranks.
      num_chunks: chunks that each tree's half of the payload is cut into.
    """
    n, slots = num_ranks, 2 * num_chunks
    edges = _edges(n) if n > 1 else []
    colours = _colours(n, edges)
    levels = n.bit_length() - 1
    up: list[Step] = []
    down: list[Step] = []
    for turn in range(2 * (num_chunks + levels - 1) if n > 1 else 0):
        active = []
        for edge, colour in zip(edges, colours, strict=True):
            # Deeper edges are earlier: chunk 0 leaves the deepest leaves in turns 0 and 1.
            chunk = turn // 2 - (levels - edge.depth)
            if colour == turn % 2 and 0 <= chunk < num_chunks:
                active.append((edge, edge.tree * num_chunks + chunk))
        if active:
            starts = [slot for _, slot in active]
            pairs = [(edge.child, edge.parent) for edge, _ in active]
            up.append(PermuteStep((in_place(n, pairs, starts, (0,), slots, reduce=True),)))
            back = [(b, a) for a, b in pairs]
            down.append(PermuteStep((in_place(n, back, starts, (0,), slots, reduce=False),)))
    return Schedule(
        algorithm="double_tree",
        collective="all_reduce",
        num_ranks=n,
        num_slots=slots,
        steps=(*up, *reversed(down)),
    )


def double_tree_form(collective: str, num_ranks: int, *, num_chunks: int = 8) -> ClosedForm:
    """Returns the closed form of the double tree."""
    del collective
    n = num_ranks
    if n == 1:
        return ClosedForm(2 * num_chunks, ())
    steps = 2 * (num_chunks + n.bit_length() - 2)
    if n == 2:
        steps = num_chunks  # both edges have one colour
    elif n & (n - 1) == 0:
        steps -= 1  # the roots have one child each, and those two edges have one colour
    up = Phase(steps, 1, reduce=True)
    return ClosedForm(2 * num_chunks, (up, Phase(steps, 1)))
