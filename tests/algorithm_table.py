"""The one table of algorithms for tests: an addition is one line of `TABLE`.

Every test of schedules, of their lowering and of the pass over all algorithms takes its cases
from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xcoll.algorithms import (
    bidirectional_ring,
    bruck,
    build,
    direct,
    double_tree,
    halving_doubling,
    hierarchical,
    native,
    pairwise,
    recursive_doubling,
    ring,
    torus,
    tree,
)
from xcoll.policy import Choice
from xcoll.schedule import Schedule

AR, RS, AG, A2A = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
ROOTED = ("broadcast", "reduce", "gather", "scatter")

# choice, collectives, numbers of levels whose sizes it takes (none: it takes no sizes)
TABLE: tuple[tuple[Choice, tuple[str, ...], tuple[int, ...]], ...] = (
    (native(), (AR, RS, AG, A2A), ()),
    (ring(), (AR, RS, AG, "broadcast"), ()),
    (bidirectional_ring(), (AR, RS, AG), ()),
    (recursive_doubling(), (AR, AG), ()),
    (halving_doubling(), (AR, RS, "broadcast"), ()),
    (tree(), (AR, *ROOTED), ()),
    (tree(radix=3), (AR, *ROOTED), ()),
    (tree(radix=4), (AR, *ROOTED), ()),
    (double_tree(), (AR,), ()),
    (double_tree(num_chunks=1), (AR,), ()),
    (direct(), (AR, RS, AG, A2A), ()),
    (direct(shots=1), (AR,), ()),
    (bruck(), (AG, A2A), ()),
    (pairwise(), (AR, RS, AG, A2A), ()),
    (torus(), (AR, RS, AG), (1, 2, 3)),
    (hierarchical(num_segments=2), (AR,), (2,)),
    (hierarchical(num_segments=3), (AR,), (2,)),
)


@dataclass(frozen=True)
class Case:
    """One algorithm, with options, doing one collective.

    Attributes:
      choice: the algorithm.
      collective: what it does.
      levels: numbers of levels whose sizes it takes; empty where it takes none.
    """

    choice: Choice
    collective: str
    levels: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.choice} {self.collective}".replace(" ", "-")

    def dims(self, num_ranks: int) -> list[tuple[int, ...]]:
        """Returns sizes of levels to test for a number of ranks; ``[()]`` if it takes none.

        All that there are up to 16 ranks, then for each number of levels the first, the middle
        and the last, and above 32 ranks the middle only.
        """
        if not self.levels:
            return [()]
        every = [factors(num_ranks, levels) for levels in self.levels]
        if num_ranks > 32:
            every = [f[len(f) // 2 :][:1] for f in every]
        elif num_ranks > 16:
            every = [[f[i] for i in sorted({0, len(f) // 2, len(f) - 1})] for f in every if f]
        return [dims for some in every for dims in some]

    def schedules(self, num_ranks: int, roots: str = "some") -> list[Schedule]:
        """Returns its schedules for a number of ranks, over all `dims` and over roots.

        Args:
          num_ranks: number of ranks.
          roots: ``"some"`` (first, middle, last) or ``"all"``.
        """
        ranks = list(range(num_ranks))
        chosen = ranks if roots == "all" else sorted({0, num_ranks // 2, num_ranks - 1})
        return [
            build(self.choice, self.collective, num_ranks, dims=dims, root=root)
            for dims in self.dims(num_ranks)
            for root in (chosen if self.collective in ROOTED else [0])
        ]


def factors(number: int, count: int) -> list[tuple[int, ...]]:
    """Returns all ways to write ``number`` as a product of ``count`` factors.

    With three or more factors, those equal to 1 are left out (except for ``number == 1``).
    """
    if count == 1:
        return [(number,)]
    found = [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factors(number // first, count - 1)
    ]
    if count > 2 and number > 1:
        found = [dims for dims in found if min(dims) > 1]
    assert all(math.prod(dims) == number for dims in found)
    return found


CASES: tuple[Case, ...] = tuple(
    Case(choice, collective, levels)
    for choice, collectives, levels in TABLE
    for collective in collectives
)
