"""The chunk-set proof: checks that a schedule does what its collective says.

The state is, for every rank and slot, either nothing or a pair *(chunk, contributors)*:
which slice of the payload the slot holds, and the set of ranks whose contribution is in it.
Steps move and join such pairs; no arrays are involved, so the proof needs no hardware and holds
for every payload and every operation that is associative and commutative.

References:
  Cowan et al., "MSCCLang: Microsoft Collective Communication Language", ASPLOS 2023, section 3
  (chunk programs and their post-conditions).
"""

from __future__ import annotations

from collections import Counter
from operator import add
from typing import NoReturn

from xcoll.errors import ScheduleError
from xcoll.schedule import (
    COLLECTIVES,
    FROM_SHARES,
    ROOTED,
    TO_SHARES,
    FoldStep,
    Lane,
    Layout,
    LocalOrWire,
    NativeStep,
    PermuteStep,
    Schedule,
    ShuffleStep,
    Slots,
)

Held = tuple[int, int] | None
"""What a slot holds: the chunk, and its contributors as a bit mask; None for nothing."""

SHARED = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
"""Collectives in which every rank has a share, so that ranks must divide slots."""


def prove(schedule: Schedule) -> None:
    """Checks that a schedule fulfils the contract of its collective.

    With ``n`` ranks, ``S`` slots and ``k = S // n`` slots a share, written ``slot s: (chunk,
    contributors)``:

    * all_reduce: from ``(s, {r})`` to ``(s, all)`` on every rank. Where the payload enters as
      one share (``enter="own"``, ``k = 1``): from ``(0, {r})`` to ``(0, all)`` in the own share.
    * reduce_scatter: from ``(s, {r})`` to ``(s, all)`` in the rank's own share.
    * all_gather: from ``(s, {r})`` in the own share to ``(s, {s // k})`` everywhere.
    * all_to_all: from ``(s, {r})`` to ``(r * k + s % k, {s // k})``.
    * broadcast: from ``(s, {root})`` on the root to the same everywhere.
    * reduce: as all_reduce, on the root only. gather: as all_gather, on the root only.
    * scatter: from ``(s, {root})`` on the root to the same in each rank's own share.

    On the way: no rank sends or receives twice on a lane, or sends to itself; a step writes no
    slot twice; nothing is sent from an empty slot; whatever is combined is the same chunk, and no
    contribution is counted twice.

    Args:
      schedule: the schedule; any number of ranks.

    Raises:
      ScheduleError: a rule is broken; the message names step, rank, slot and rule.

    Example:
      >>> from xcoll.algorithms import build
      >>> from xcoll.policy import Choice
      >>> prove(build(Choice("ring"), "all_reduce", 7))
    """
    _check_header(schedule)
    state = _State(schedule)
    for number, (step, iteration) in enumerate(schedule.flat()):
        state.where = f"step {number}" + (f" (iteration {iteration})" if iteration else "")
        state.apply(step, iteration)
    state.where = "end"
    _check_end(schedule, state)


def _check_header(schedule: Schedule) -> None:
    def refuse(rule: str) -> NoReturn:
        raise ScheduleError(f"{_name(schedule)}: {rule}")

    if schedule.collective not in COLLECTIVES:
        refuse(f"the collective must be one of {', '.join(COLLECTIVES)}")
    if schedule.num_ranks < 1 or schedule.num_slots < 1:
        refuse(f"num_slots={schedule.num_slots}: ranks and slots must be at least 1")
    if schedule.collective in SHARED and schedule.num_slots % schedule.num_ranks:
        refuse(f"num_slots={schedule.num_slots} must be a multiple of the number of ranks")
    if schedule.collective in ROOTED:
        if schedule.root is None or not 0 <= schedule.root < schedule.num_ranks:
            refuse(f"root={schedule.root}: must be a rank")
    elif schedule.root is not None:
        refuse(f"root={schedule.root}: must be None, the collective has no root")
    own = schedule.collective in FROM_SHARES
    one_share = schedule.collective == "all_reduce" and schedule.enter == "own"
    if one_share and schedule.num_slots != schedule.num_ranks:
        refuse(f"num_slots={schedule.num_slots}: a payload that enters as one share has one slot")
    if not one_share and (schedule.enter == "own") != own:
        refuse(f"enter={schedule.enter!r}: must be {'own' if own else 'full'!r}")


def _name(schedule: Schedule) -> str:
    return f"{schedule.algorithm} {schedule.collective}, {schedule.num_ranks} ranks"


class _State:
    """What every slot of every rank holds, and in which layout."""

    def __init__(self, schedule: Schedule) -> None:
        n, slots, share = schedule.num_ranks, schedule.num_slots, schedule.share
        self.schedule = schedule
        self.where = "start"
        self.layout: Layout = schedule.enter
        self.checked: set[int] = set()
        self.held: list[list[Held]] = [[None] * slots for _ in range(n)]
        for rank, row in enumerate(self.held):
            if schedule.enter == "own":
                for s in range(rank * share, (rank + 1) * share):
                    row[s] = (0 if schedule.collective == "all_reduce" else s, 1 << rank)
            elif schedule.collective not in ("broadcast", "scatter") or rank == schedule.root:
                row[:] = [(s, 1 << rank) for s in range(slots)]

    def fail(self, rank: int | None, slot: int | None, rule: str) -> NoReturn:
        at = "" if rank is None else f", rank {rank}"
        at += "" if slot is None else f", slot {slot}"
        raise ScheduleError(f"{_name(self.schedule)}: {self.where}{at}: {rule}")

    def apply(self, step: LocalOrWire, iteration: int) -> None:
        if isinstance(step, PermuteStep):
            self.permute(step, iteration)
        elif isinstance(step, ShuffleStep):
            self.shuffle(step)
        elif isinstance(step, FoldStep):
            self.fold()
        elif isinstance(step, NativeStep):
            self.native(step)
        else:
            self.fail(None, None, f"unknown step {step!r}")

    def need(self, layout: Layout, what: str) -> None:
        if self.layout != layout and self.schedule.num_ranks > 1:
            self.fail(None, None, f"{what} needs the {layout} layout, here it is {self.layout}")
        if self.schedule.num_slots % self.schedule.num_ranks:
            self.fail(None, None, f"{what} needs as many slots for each rank")

    def permute(self, step: PermuteStep, iteration: int) -> None:
        if not step.lanes or not all(lane.pairs for lane in step.lanes):
            self.fail(None, None, "a step, and each of its lanes, must send something")
        self.layout = "full"  # an own share sits at its place in the full buffer
        # All reads come before the first write: a step sends what was there before it.
        writes: list[tuple[int, int, tuple[int, int], bool]] = []
        for number, lane in enumerate(step.lanes):
            if id(lane) not in self.checked:  # the body of a repeat is checked once
                self.check_lane(number, lane)
                self.checked.add(id(lane))
            pairs = lane.sending(iteration)
            if not pairs:
                self.fail(None, None, f"lane {number}: no pair is active")
            sends, recvs = self.firsts(lane.send, iteration), self.firsts(lane.recv, iteration)
            moved = list(zip(lane.send.pattern, lane.recv.pattern, strict=True))
            self.check_range([source for source, _ in pairs], sends, lane.send)
            self.check_range([destination for _, destination in pairs], recvs, lane.recv)
            for source, destination in pairs:
                row, out, into = self.held[source], sends[source], recvs[destination]
                for p, q in moved:
                    value = row[out + p]
                    if value is None:
                        self.fail(source, out + p, f"sends an empty slot to rank {destination}")
                    writes.append((destination, into + q, value, lane.reduce))
        # Within a lane destinations, and slots of a pattern, are different already.
        if len(step.lanes) > 1 and len({write[:2] for write in writes}) < len(writes):
            (rank, slot), _ = Counter(write[:2] for write in writes).most_common(1)[0]
            self.fail(rank, slot, "written twice in one step")
        for rank, slot, value, reduce in writes:
            row = self.held[rank]
            row[slot] = self.join(rank, slot, row[slot], value) if reduce else value

    def firsts(self, slots: Slots, iteration: int) -> list[int]:
        moved = slots.advance * iteration
        firsts = [slots.scale * ((start + moved) % slots.modulus) for start in slots.start]
        return list(map(add, slots.base, firsts)) if slots.base else firsts

    def check_range(self, ranks: list[int], firsts: list[int], slots: Slots) -> None:
        low, high, last = min(slots.pattern), max(slots.pattern), self.schedule.num_slots - 1
        if min(firsts) + low < 0 or max(firsts) + high > last:
            for rank in ranks:  # ranks that are not in the lane may start anywhere
                for slot in (firsts[rank] + low, firsts[rank] + high):
                    if not 0 <= slot <= last:
                        self.fail(rank, slot, f"out of range, there are {last + 1} slots")

    def check_lane(self, number: int, lane: Lane) -> None:
        n = self.schedule.num_ranks
        sources: set[int] = set()
        destinations: set[int] = set()
        for pair in lane.pairs:
            source, destination = pair
            if not (0 <= source < n and 0 <= destination < n):
                self.fail(None, None, f"lane {number}: pair {pair} out of range")
            if source == destination:
                self.fail(source, None, f"lane {number}: sends to itself")
            if source in sources:
                self.fail(source, None, f"lane {number}: sends twice")
            if destination in destinations:
                self.fail(destination, None, f"lane {number}: receives twice")
            sources.add(source)
            destinations.add(destination)
        for what, slots in (("send", lane.send), ("recv", lane.recv)):
            if len(slots.start) != n or len(slots.base) not in (0, n) or slots.modulus < 1:
                self.fail(None, None, f"lane {number}: {what} needs a start for each rank")
            if not slots.pattern or len(set(slots.pattern)) != len(slots.pattern):
                self.fail(None, None, f"lane {number}: {what} needs different slots in its pattern")
        if len(lane.active) not in (0, n) or any(span.step != 1 for span in lane.active):
            self.fail(None, None, f"lane {number}: needs active iterations, in a run, of each rank")
        if lane.send.count != lane.recv.count:
            counts = f"sends {lane.send.count} slots, receives {lane.recv.count}"
            self.fail(None, None, f"lane {number}: {counts}")

    def join(self, rank: int, slot: int, mine: Held, other: Held) -> tuple[int, int]:
        if mine is None or other is None:
            self.fail(rank, slot, "combines with an empty slot")
        if mine[0] != other[0]:
            self.fail(rank, slot, f"combines chunk {mine[0]} with chunk {other[0]}")
        if mine[1] & other[1]:
            twice = (mine[1] & other[1]).bit_length() - 1
            self.fail(rank, slot, f"counts the contribution of rank {twice} twice")
        return mine[0], mine[1] | other[1]

    def shuffle(self, step: ShuffleStep) -> None:
        slots = self.schedule.num_slots
        if len(step.start) != self.schedule.num_ranks or step.sign not in (1, -1):
            self.fail(None, None, "a shuffle needs a start for each rank and a sign of 1 or -1")
        self.layout = "full"
        self.held = [
            [row[(step.start[rank] + step.sign * i) % slots] for i in range(slots)]
            for rank, row in enumerate(self.held)
        ]

    def fold(self) -> None:
        self.need("full", "FoldStep")
        n, share = self.schedule.num_ranks, self.schedule.share
        folded: list[list[Held]] = []
        for rank, row in enumerate(self.held):
            total = row[:share]
            for slot in range(share, n * share):
                before, now = total[slot % share], row[slot]
                total[slot % share] = self.join(rank, slot, before, now)
                if before and now and before[1] > now[1] & -now[1]:
                    self.fail(rank, slot, f"share {slot // share} is folded out of rank order")
            folded.append(total)
        self.to_own(folded)

    def to_own(self, shares: list[list[Held]]) -> None:
        """Keeps one share a rank, at its place."""
        slots, share = self.schedule.num_slots, self.schedule.share
        self.held = [
            [None] * (rank * share) + mine + [None] * (slots - (rank + 1) * share)
            for rank, mine in enumerate(shares)
        ]
        self.layout = "own"

    def native(self, step: NativeStep) -> None:
        n, share, slots = self.schedule.num_ranks, self.schedule.share, self.schedule.num_slots
        kind = step.collective
        if kind == "all_reduce":
            if self.layout != "full":
                self.fail(None, None, "native all_reduce needs the full layout")
            row = self.total(range(slots))
            self.held = [list(row) for _ in range(n)]
        elif kind == "reduce_scatter":
            self.need("full", "native reduce_scatter")
            row = self.total(range(slots))
            self.to_own([row[r * share : (r + 1) * share] for r in range(n)])
        elif kind == "all_gather":
            self.need("own", "native all_gather")
            row = [self.held[slot // share][slot] for slot in range(n * share)]
            self.held = [list(row) for _ in range(n)]
            self.layout = "full"
        elif kind == "all_to_all":
            self.need("full", "native all_to_all")
            self.held = [
                [self.held[s // share][r * share + s % share] for s in range(n * share)]
                for r in range(n)
            ]
        else:
            self.fail(None, None, f"unknown native collective {kind!r}")

    def total(self, slots: range) -> list[Held]:
        """Returns the sum over ranks of every slot."""
        row = list(self.held[0])
        for rank in range(1, self.schedule.num_ranks):
            for slot in slots:
                row[slot] = self.join(rank, slot, row[slot], self.held[rank][slot])
        return row


def _check_end(schedule: Schedule, state: _State) -> None:
    n, slots, share = schedule.num_ranks, schedule.num_slots, schedule.share
    everyone = (1 << n) - 1
    collective, root = schedule.collective, schedule.root
    one_share = collective == "all_reduce" and schedule.enter == "own"
    own_only = collective in TO_SHARES or one_share
    if not own_only and state.layout != "full" and n > 1:
        state.fail(None, None, "the result must be in the full layout")
    for rank in range(n):
        if collective in ("reduce", "gather") and rank != root:
            continue
        for slot in range(rank * share, (rank + 1) * share) if own_only else range(slots):
            chunk = slot
            if collective in ("all_reduce", "reduce_scatter", "reduce"):
                contributors = everyone
                chunk = 0 if one_share else slot
            elif collective in ("broadcast", "scatter"):
                contributors = 1 << (root or 0)
            else:
                contributors = 1 << slot // share
                chunk = rank * share + slot % share if collective == "all_to_all" else slot
            got = state.held[rank][slot]
            if got != (chunk, contributors):
                want = _show((chunk, contributors))
                state.fail(rank, slot, f"must hold {want}, holds {_show(got)}")


def _show(held: Held) -> str:
    if held is None:
        return "nothing"
    ranks = [str(r) for r in range(held[1].bit_length()) if held[1] >> r & 1]
    text = (
        ", ".join(ranks) if len(ranks) <= 8 else f"{', '.join(ranks[:8])}, ... {len(ranks)} ranks"
    )
    return f"chunk {held[0]} of ranks {{{text}}}"
