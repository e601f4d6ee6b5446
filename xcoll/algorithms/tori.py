"""Rings over several axes at once: the payload is split over the axes, in rotated axis order.

With ``m`` axes of more than one rank, part ``a`` of the payload is reduce-scattered over axis
``a``, then ``a + 1``, and so on, and gathered back in the reverse order, while the other parts
start on other axes: all links of a torus are in use, and every part sends the fewest bytes.

References:
  Sack and Gropp, "Collective algorithms for multiported torus networks", ACM TOPC 1(2), 2015.
  Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
  interconnects", ICS 2010.
"""

from __future__ import annotations

import itertools
import math

from xcoll.algorithms.steps import backwards, repeated
from xcoll.schedule import ClosedForm, Lane, Phase, Schedule, Slots, Step


class _Grid:
    """Ranks on the axes, row-major, and the order in which each part takes the axes."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims
        self.num_ranks = math.prod(dims)
        self.strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
        axes = [axis for axis, size in enumerate(dims) if size > 1]
        self.orders = [axes[part:] + axes[:part] for part in range(len(axes))] or [[]]
        self.num_parts = len(self.orders)

    def place(self, rank: int, axis: int) -> int:
        return rank // self.strides[axis] % self.dims[axis]

    def lane(self, part: int, position: int, turn: int) -> Lane:
        """Returns the ring of a part's reduce-scatter on its axis at ``position``, from ``turn``.

        What moves: the slots of the ranks that agree with the sender on the axes before, for all
        places on the axes after.
        """
        order = self.orders[part]
        axis, after = order[position], order[position + 1 :]
        size, stride = self.dims[axis], self.strides[axis]
        ranks, parts = range(self.num_ranks), self.num_parts
        offsets = sorted(
            sum(self.strides[a] * place for a, place in zip(after, places, strict=True))
            for places in itertools.product(*(range(self.dims[a]) for a in after))
        )
        here = [self.place(rank, axis) for rank in ranks]
        base = [
            sum(self.strides[a] * self.place(rank, a) for a in order[:position]) for rank in ranks
        ]
        # As in a ring: first what belongs just before the sender, then what is before that.
        send, recv = (
            Slots(
                tuple((place - first - turn) % size for place in here),
                size,
                -1,
                stride * parts,
                tuple(offset * parts + part for offset in offsets),
                tuple(parts * b for b in base) if position else (),
            )
            for first in (1, 2)
        )
        pairs = tuple(
            (rank, rank + ((place + 1) % size - place) * stride)
            for rank, place in zip(ranks, here, strict=True)
        )
        return Lane(pairs, send, recv, reduce=True)

    def reduce_scatter(self) -> tuple[Step, ...]:
        """Returns a repeat for each run of steps in which no part goes on to its next axis."""
        turns = [
            [(k, turn) for k, axis in enumerate(order) for turn in range(self.dims[axis] - 1)]
            for order in self.orders
        ]
        bounds = {step for part in turns for step, (_, turn) in enumerate(part) if turn == 0}
        steps: list[Step] = []
        for begin, end in itertools.pairwise(sorted(bounds | {len(turns[0])})):
            lanes = [self.lane(part, *turns[part][begin]) for part in range(self.num_parts)]
            steps += repeated(end - begin, *lanes)
        return tuple(steps)


def torus_all_reduce(num_ranks: int, *, dims: tuple[int, ...]) -> Schedule:
    """Builds the torus all-reduce: ``2 * sum(d - 1)`` steps, the fewest bytes possible.

    The all-gather takes the ways of the reduce-scatter back.

    Args:
      num_ranks: number of ranks, the product of ``dims``.
      dims: sizes of the axes, outermost first.
    """
    grid = _Grid(dims)
    scatter = grid.reduce_scatter()
    return _schedule(grid, "all_reduce", scatter + backwards(scatter))


def torus_reduce_scatter(num_ranks: int, *, dims: tuple[int, ...]) -> Schedule:
    """Builds the torus reduce-scatter; shares are in rank order, whatever the axes."""
    grid = _Grid(dims)
    return _schedule(grid, "reduce_scatter", grid.reduce_scatter())


def torus_all_gather(num_ranks: int, *, dims: tuple[int, ...]) -> Schedule:
    """Builds the torus all-gather; shares are in rank order, whatever the axes."""
    grid = _Grid(dims)
    return _schedule(grid, "all_gather", backwards(grid.reduce_scatter()))


def _schedule(grid: _Grid, collective: str, steps: tuple[Step, ...]) -> Schedule:
    return Schedule(
        algorithm="torus",
        collective=collective,
        num_ranks=grid.num_ranks,
        num_slots=grid.num_ranks * grid.num_parts,
        steps=steps,
        enter="own" if collective == "all_gather" else "full",
    )


def torus_form(collective: str, num_ranks: int, *, dims: tuple[int, ...]) -> ClosedForm:
    """Returns the closed form of the torus.

    Where the parts move unequal numbers of slots in a step (axes of unequal sizes), the phase
    has their sum on one lane. Its distance is that of the outermost axis in use.
    """
    grid = _Grid(dims)
    if num_ranks == 1:
        return ClosedForm(1, ())
    ends: set[int] = set()
    stages: list[list[tuple[int, int, int]]] = []  # for each part: last step, slots, axis
    for order in grid.orders:
        rest, step, stage = num_ranks, 0, []
        for axis in order:
            rest //= dims[axis]
            step += dims[axis] - 1
            stage.append((step, rest, axis))
            ends.add(step)
        stages.append(stage)
    scatters: list[Phase] = []
    before = 0
    for end in sorted(ends):
        now = [next((slots, axis) for last, slots, axis in s if last >= end) for s in stages]
        slots = [count for count, _ in now]
        outermost = min(axis for _, axis in now)
        alike = len(set(slots)) == 1
        scatters.append(
            Phase(
                end - before,
                slots[0] if alike else sum(slots),
                distance=grid.strides[outermost],
                block=grid.strides[outermost] * dims[outermost],
                lanes=len(slots) if alike else 1,
                reduce=True,
            )
        )
        before = end
    gathers = [
        Phase(p.steps, p.slots, distance=p.distance, block=p.block, lanes=p.lanes)
        for p in reversed(scatters)
    ]
    phases = {
        "all_reduce": (*scatters, *gathers),
        "reduce_scatter": tuple(scatters),
        "all_gather": tuple(gathers),
    }
    return ClosedForm(num_ranks * grid.num_parts, phases[collective])
