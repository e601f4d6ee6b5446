"""Schedules: collective algorithms as data.

A schedule says which slots of a per-rank buffer move between which ranks, step
by step. It holds no arrays and imports no JAX: one verifier (`xcoll.proof`), one
simulator (`xcoll.simulate`) and one lowering (`xcoll.lower`) consume it.

The buffer of a rank is an array of ``num_slots`` slots of equal size. It is in one of
two layouts:

* ``"full"``: all ``num_slots`` slots are present;
* ``"own"``: only the rank's own share, ``num_slots // num_ranks`` consecutive slots
  that belong at ``rank * share``, is present.

What the slots hold before and after is the contract of the collective
(`xcoll.proof.prove` states and checks it).

References:
  The chunk-program view of collectives follows Cowan et al., "MSCCLang: Microsoft
  Collective Communication Language", ASPLOS 2023, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from xcoll.errors import unknown

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
"""The collectives a schedule can carry out, by the name used in plans and reports."""

SCATTERED = ("reduce_scatter", "all_to_all", "scatter")
"""Those whose operand is one row a rank."""

TO_SHARES = ("reduce_scatter", "scatter")
"""Those that leave each rank one share of the payload."""

FROM_SHARES = ("all_gather", "gather")
"""Those that each rank enters with one share of the result."""

ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Those of them that have a root rank."""

Layout = Literal["full", "own"]


@dataclass(frozen=True)
class Slots:
    """Which slots each rank touches in an iteration of a step.

    Rank ``r`` touches, for each ``p`` of ``pattern``, the slot
    ``base[r] + scale * ((start[r] + advance * iteration) % modulus) + p``.

    Attributes:
      start: one integer a rank.
      modulus: what ``start + advance * iteration`` is taken modulo of.
      advance: how much the start moves with each iteration of a `Repeat`.
      scale: slots per unit of ``start``.
      pattern: offsets of the slots moved together; the same for all ranks.
      base: one integer a rank, which no iteration changes; empty for zeros.
    """

    start: tuple[int, ...]
    modulus: int
    advance: int = 0
    scale: int = 1
    pattern: tuple[int, ...] = (0,)
    base: tuple[int, ...] = ()

    def first(self, rank: int, iteration: int = 0) -> int:
        """Returns the slot that the pattern of ``rank`` counts from in ``iteration``."""
        unit = (self.start[rank] + self.advance * iteration) % self.modulus
        return (self.base[rank] if self.base else 0) + self.scale * unit

    @property
    def count(self) -> int:
        """Number of slots moved."""
        return len(self.pattern)


@dataclass(frozen=True)
class Lane:
    """One permutation of ranks: each source sends slots to one destination.

    Attributes:
      pairs: ``(source, destination)``; no rank is twice a source or twice a destination,
        and none sends to itself.
      send: the slots read at the source. Values are those from before the step.
      recv: the slots written at the destination.
      reduce: combine with what the destination holds (True) or overwrite it (False).
      active: the iterations of a `Repeat` in which each rank, as a source, sends; empty where all
        send in every one. A pair that is not active does nothing to its destination, although
        inside a compiled loop, whose pairs cannot change, the bytes still travel.
    """

    pairs: tuple[tuple[int, int], ...]
    send: Slots
    recv: Slots
    reduce: bool = False
    active: tuple[range, ...] = ()

    def sending(self, iteration: int = 0) -> tuple[tuple[int, int], ...]:
        """Returns the pairs that are active in ``iteration``."""
        if not self.active:
            return self.pairs
        return tuple(pair for pair in self.pairs if iteration in self.active[pair[0]])


@dataclass(frozen=True)
class PermuteStep:
    """Permutations that happen at the same time, one a lane.

    Lanes of a step read the buffer from before the step and touch different slots of a
    destination.
    """

    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class NativeStep:
    """A whole XLA collective over all ranks of the schedule.

    ``all_reduce``: full to full. ``reduce_scatter``: full to own. ``all_gather``: own to full.
    ``all_to_all``: full to full; share ``s`` of rank ``r`` becomes share ``r`` of rank ``s``.
    """

    collective: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class FoldStep:
    """Combine the ``num_ranks`` shares of the buffer in rank order: full to own.

    Share ``s`` holds rank ``s``'s contribution, so the result is ``((x0 + x1) + x2) + ...``.
    """


@dataclass(frozen=True)
class ShuffleStep:
    """A local reordering of all slots: ``new[i] = old[(start[rank] + sign * i) % num_slots]``."""

    start: tuple[int, ...]
    sign: Literal[1, -1] = 1


LocalOrWire = PermuteStep | NativeStep | FoldStep | ShuffleStep


@dataclass(frozen=True)
class Repeat:
    """``body``, ``count`` times; what depends on the iteration are `Slots` and `Lane.active`."""

    body: tuple[PermuteStep, ...]
    count: int


Step = LocalOrWire | Repeat


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A collective algorithm for a number of ranks.

    Attributes:
      algorithm: name of the algorithm.
      collective: one of `COLLECTIVES`.
      num_ranks: number of ranks, any positive number.
      num_slots: slots of a full buffer.
      steps: what is done, in order.
      enter: layout in which the payload enters. ``"own"`` for an all-gather and a gather;
        for an all-reduce only where each rank's whole payload is one share.
      root: the root rank of a rooted collective, else None.
      replicates_sums: True where several ranks compute the same sum, each for itself
        (recursive doubling). The lowering then fences the operands, so that the compiler
        cannot round them differently on different ranks.

    Raises:
      ValueError: ``enter`` is no layout; `xcoll.proof.prove` checks the rest.
    """

    algorithm: str
    collective: str
    num_ranks: int
    num_slots: int
    steps: tuple[Step, ...]
    enter: Layout = "full"
    root: int | None = None
    replicates_sums: bool = False

    def __post_init__(self) -> None:
        # What reads schedules asks for "own" only, and would take all else for "full".
        if self.enter not in get_args(Layout):
            raise ValueError(unknown("Schedule(enter=...)", "layout", self.enter, get_args(Layout)))

    def flat(self) -> Iterator[tuple[LocalOrWire, int]]:
        """Yields every step with its iteration, repeats written out."""
        for step in self.steps:
            if isinstance(step, Repeat):
                for iteration in range(step.count):
                    for inner in step.body:
                        yield inner, iteration
            else:
                yield step, 0

    @property
    def share(self) -> int:
        """Slots in one rank's own share (the shares are ``num_ranks`` of them)."""
        return self.num_slots // self.num_ranks


def swaps(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether two ranks send to each other.

    >>> swaps([(0, 1), (1, 0)]), swaps([(0, 1), (1, 2), (2, 0)])
    (True, False)
    """
    known = set(pairs)
    return any((d, s) in known for s, d in known if s != d)


# libtpu pads the shares of a large reduce-scatter to eight tiles itself, and sends what it added.
_UNITS = ((1024, 1), (16384, 128), (131072, 1024), (math.inf, 8192))
"""Slots of fewer elements than the first number are whole units of the second."""


def slot_elements(num_elements: int, num_slots: int, block: int = 1) -> int:
    """Returns the elements of one slot when a payload is cut into ``num_slots``, padded.

    Args:
      num_elements: of the payload.
      num_slots: it is cut into.
      block: elements that a codec encodes together: slots are whole blocks.

    Large slots are whole (8, 128) tiles of a TPU, the largest eights of them, medium ones whole
    rows of 128, small ones not padded beyond what divides; the padding is at most an eighth. The
    lowering and the byte counts of plans both call this, so that they cannot disagree.

    >>> slot_elements(10, 4), slot_elements(5000, 4), slot_elements(100_000, 4)
    (3, 1280, 25600)
    """
    elements = -(-num_elements // num_slots)
    unit = next(size for most, size in _UNITS if elements < most)
    both = math.lcm(unit, block)
    # An odd block must not make the padding large: then slots are whole blocks only.
    unit = both if both <= max(unit, elements // 8) else block
    return -(-elements // unit) * unit


@dataclass(frozen=True)
class Phase:
    """A run of alike steps of a schedule in closed form, for pricing without building it.

    Attributes:
      steps: number of steps.
      slots: slots that the busiest rank sends in each step, on each lane.
      kind: ``"permute"``, or the name of the XLA collective of a `NativeStep` (then ``steps``
        is 1 and ``slots`` the slots of its operand), or ``"fold"`` for a `FoldStep`.
      pattern: ``"shift"``: every rank sends to the rank ``distance`` further in its block of
        ``block`` consecutive ranks, cyclically. ``"exchange"``: partners swap inside blocks of
        ``2 * distance``. ``"sparse"``: about one rank in ``2 * distance`` sends, over ``distance``
        (trees).
      distance: difference of rank numbers between partners.
      block: consecutive ranks that a shift stays within; 0 for all ranks of the schedule.
      lanes: directions in use at the same time (2: both directions of a ring).
      reduce: the receiver combines what it receives with what it holds.
    """

    steps: int
    slots: int
    kind: str = "permute"
    pattern: Literal["shift", "exchange", "sparse"] = "shift"
    distance: int = 1
    block: int = 0
    lanes: int = 1
    reduce: bool = False


@dataclass(frozen=True)
class ClosedForm:
    """What a schedule does, without its tables: enough to price it for any number of ranks."""

    num_slots: int
    phases: tuple[Phase, ...]
