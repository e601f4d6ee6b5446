"""The proof refuses what is wrong: right schedules are broken, one change at a time."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from algorithm_table import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runner import enter, expected, results, run

from xcoll.algorithms import build, hierarchical, recursive_doubling, ring, tree
from xcoll.errors import ScheduleError
from xcoll.proof import prove
from xcoll.schedule import (
    FoldStep,
    Lane,
    NativeStep,
    PermuteStep,
    Repeat,
    Schedule,
    ShuffleStep,
    Slots,
    Step,
)

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def written_out(schedule: Schedule) -> Schedule:
    """Returns the schedule without repeats: each iteration has its own slots."""
    steps: list[Step] = []
    for step, iteration in schedule.flat():
        if isinstance(step, PermuteStep):
            step = PermuteStep(
                tuple(
                    replace(
                        lane,
                        pairs=active(lane, iteration),
                        send=fixed(lane.send, iteration),
                        recv=fixed(lane.recv, iteration),
                        active=(),
                    )
                    for lane in step.lanes
                )
            )
        steps.append(step)
    return replace(schedule, steps=tuple(steps))


def active(lane: Lane, iteration: int) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a, b in lane.pairs if not lane.active or iteration in lane.active[a])


def fixed(slots: Slots, iteration: int) -> Slots:
    start = tuple((s + slots.advance * iteration) % slots.modulus for s in slots.start)
    return replace(slots, start=start, advance=0)


def with_step(schedule: Schedule, number: int, *steps: Step) -> Schedule:
    new = (*schedule.steps[:number], *steps, *schedule.steps[number + 1 :])
    return replace(schedule, steps=new)


def broken(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yields wrong schedules, each a single change away from a right one."""
    for number, step in enumerate(schedule.steps):
        at = f"step {number}"
        yield f"{at} left out", with_step(schedule, number)
        if not isinstance(step, PermuteStep):
            continue
        if any(lane.reduce for lane in step.lanes):
            yield f"{at} done twice", with_step(schedule, number, step, step)
        for i, lane in enumerate(step.lanes):
            for what, changed in broken_lanes(lane, schedule.num_slots):
                lanes = (*step.lanes[:i], *changed, *step.lanes[i + 1 :])
                new = (PermuteStep(lanes),) if lanes else ()
                yield f"{at} lane {i}: {what}", with_step(schedule, number, *new)


def broken_lanes(lane: Lane, num_slots: int) -> Iterator[tuple[str, tuple[Lane, ...]]]:
    yield "left out", ()
    yield "sums instead of copies or the reverse", (replace(lane, reduce=not lane.reduce),)
    for i, (source, destination) in enumerate(lane.pairs):
        others = (*lane.pairs[:i], *lane.pairs[i + 1 :])
        if others:
            yield f"pair {source}, {destination} left out", (replace(lane, pairs=others),)
            a, b = others[0]
            twice = (*lane.pairs[:i], (a, destination), *lane.pairs[i + 1 :])
            yield f"rank {a} sends twice", (replace(lane, pairs=twice),)
            twice = (*lane.pairs[:i], (source, b), *lane.pairs[i + 1 :])
            yield f"rank {b} receives twice", (replace(lane, pairs=twice),)
        itself = (*lane.pairs[:i], (source, source), *lane.pairs[i + 1 :])
        yield f"rank {source} sends to itself", (replace(lane, pairs=itself),)
        beyond = (*lane.pairs[:i], (source, 10**6), *lane.pairs[i + 1 :])
        yield f"rank {source} sends to nobody", (replace(lane, pairs=beyond),)
        for end, rank in (("send", source), ("recv", destination)):
            slots: Slots = getattr(lane, end)
            for by in (1, num_slots):
                if by == 1 and num_slots == 1:
                    continue
                start = list(slots.start)
                start[rank] = start[rank] + by
                wide = replace(slots, start=tuple(start), modulus=10**6)
                yield f"{end} slot of rank {rank} {by} further", (replace(lane, **{end: wide}),)


# Its all-gather also brings ranks what the scatter has passed through them already, the root
# above all: to leave that out is no fault.
REDUNDANT = {("halving_doubling", "broadcast")}


@every_case
@pytest.mark.parametrize("num_ranks", [4, 5, 6])
def test_every_single_change_is_refused(case: Case, num_ranks: int):
    for schedule in case.schedules(num_ranks):
        right = written_out(schedule)
        prove(right)
        for what, wrong in broken(right):
            accepted = accepts(wrong)
            if accepted and (case.choice.name, case.collective) in REDUNDANT:
                assert "left out" in what or "further" in what
                assert runs_right(wrong), what
            else:
                assert not accepted, what


@pytest.mark.parametrize(
    "schedule",
    [
        build(ring(), "broadcast", 7, root=2),
        build(ring(), "broadcast", 12),
        build(hierarchical(num_segments=2), "all_reduce", 8, dims=(2, 4)),
        build(hierarchical(num_segments=3), "all_reduce", 9, dims=(3, 3)),
    ],
    ids=lambda s: f"{s.algorithm} {s.num_ranks}",
)
def test_other_iterations_are_refused(schedule: Schedule):
    # A rank that sends once less is missed; once more does no harm only where it sends again what
    # is there, or what the right thing then overwrites.
    changed = 0
    for number, step in enumerate(schedule.steps):
        assert isinstance(step, Repeat)
        ((lane,), now) = (step.body[0].lanes, range(step.count))
        for source, _ in lane.pairs if lane.active else ():
            right = lane.active[source]
            for begin, end in ((1, 0), (0, -1), (-1, 0), (0, 1)):
                span = range(right.start + begin, right.stop + end)
                if {*span} & {*now} == {*right}:
                    continue
                spans = (*lane.active[:source], span, *lane.active[source + 1 :])
                body = (PermuteStep((replace(lane, active=spans),)),)
                wrong = with_step(schedule, number, replace(step, body=body))
                more = len(span) > len(right)
                assert not accepts(wrong) or (more and not lane.reduce and runs_right(wrong))
                changed += 1
    assert changed > 2 * schedule.num_ranks


def accepts(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except ScheduleError as err:
        assert f"{schedule.num_ranks} ranks: " in str(err)
        return False
    return True


def runs_right(schedule: Schedule) -> bool:
    rng = np.random.default_rng(0)
    shape = (schedule.num_ranks, schedule.num_slots, 1)
    payload, garbage = rng.integers(0, 2**40, shape), rng.integers(0, 2**40, shape)
    got = results(schedule, run(schedule, enter(schedule, payload, garbage)))
    right = expected(schedule, payload)
    return all(b is None or np.array_equal(a, b) for a, b in zip(got, right, strict=True))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_is_accepted_runs_right(data: st.DataObject):
    # Changes of any kind, several at once: whatever the proof lets through must compute the
    # right thing, on arrays and by a runner that shares nothing with the proof.
    case = data.draw(st.sampled_from(CASES))
    num_ranks = data.draw(st.integers(2, 6))
    schedule = written_out(data.draw(st.sampled_from(case.schedules(num_ranks))))
    for _ in range(data.draw(st.integers(1, 2))):
        schedule = data.draw(changes(schedule))
    assert not accepts(schedule) or runs_right(schedule)


@st.composite
def changes(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    steps = list(schedule.steps)
    if not steps:
        return schedule
    i, j = draw(st.integers(0, len(steps) - 1)), draw(st.integers(0, len(steps) - 1))
    kind = draw(st.sampled_from(["swap", "repeat", "drop", "slot", "reduce", "local"]))
    step = steps[i]
    if kind == "swap":
        steps[i], steps[j] = steps[j], steps[i]
    elif kind == "repeat":
        steps.insert(j, step)
    elif kind == "drop":
        del steps[i]
    elif kind == "local":
        start = tuple(draw(st.integers(0, 3)) for _ in range(schedule.num_ranks))
        steps.insert(j, draw(st.sampled_from([ShuffleStep(start), FoldStep()])))
    elif isinstance(step, PermuteStep):
        k = draw(st.integers(0, len(step.lanes) - 1))
        lane = step.lanes[k]
        if kind == "reduce":
            lane = replace(lane, reduce=not lane.reduce)
        else:
            end = draw(st.sampled_from(["send", "recv"]))
            slots: Slots = getattr(lane, end)
            start = tuple((s + draw(st.integers(0, 1))) % slots.modulus for s in slots.start)
            lane = replace(lane, **{end: replace(slots, start=start)})
        steps[i] = PermuteStep((*step.lanes[:k], lane, *step.lanes[k + 1 :]))
    return replace(schedule, steps=tuple(steps))


def line(*pairs: tuple[int, int], send: int = 0, recv: int = 0, n: int = 3, **kw: bool) -> Lane:
    return Lane(tuple(pairs), Slots((send,) * n, 99), Slots((recv,) * n, 99), **kw)


def scheme(*lanes: Lane, **kw: object) -> Schedule:
    fields: dict[str, object] = dict(
        algorithm="mine", collective="broadcast", num_ranks=3, num_slots=2, root=0
    )
    return Schedule(steps=(PermuteStep(lanes),), **{**fields, **kw})  # type: ignore[arg-type]


SUM = {"collective": "all_reduce", "root": None}
MESSAGES = [
    (scheme(line((0, 0))), "step 0, rank 0: lane 0: sends to itself"),
    (scheme(line((0, 1), (0, 2))), "step 0, rank 0: lane 0: sends twice"),
    (scheme(line((0, 2), (1, 2))), "step 0, rank 2: lane 0: receives twice"),
    (scheme(line((0, 3))), "lane 0: pair (0, 3) out of range"),
    (scheme(line((1, 2))), "step 0, rank 1, slot 0: sends an empty slot to rank 2"),
    (scheme(line((0, 1), send=2)), "rank 0, slot 2: out of range, there are 2 slots"),
    (scheme(line((0, 1), recv=5)), "rank 1, slot 5: out of range"),
    (scheme(line((0, 1)), line((0, 1))), "rank 1, slot 0: written twice in one step"),
    (scheme(line((0, 1), reduce=True)), "rank 1, slot 0: combines with an empty slot"),
    (scheme(), "a step, and each of its lanes, must send something"),
    (scheme(line()), "a step, and each of its lanes, must send something"),
    (scheme(line((0, 1), n=2)), "lane 0: send needs a start for each rank"),
    (
        scheme(Lane(((0, 1),), Slots((0,) * 3, 2, pattern=(0, 0)), Slots((0,) * 3, 2))),
        "lane 0: send needs different slots in its pattern",
    ),
    (
        scheme(Lane(((0, 1),), Slots((0,) * 3, 2, pattern=(0, 1)), Slots((0,) * 3, 2))),
        "lane 0: sends 2 slots, receives 1",
    ),
    (
        scheme(Lane(((0, 1),), Slots((0,) * 3, 2), Slots((0,) * 3, 2, base=(0, 0)))),
        "lane 0: recv needs a start for each rank",
    ),
    (
        scheme(Lane(((0, 1),), Slots((0,) * 3, 2), Slots((0,) * 3, 2, base=(9, 2, 9)))),
        "rank 1, slot 2: out of range, there are 2 slots",
    ),
    (
        scheme(replace(line((0, 1)), active=(range(1),))),
        "lane 0: needs active iterations, in a run, of each rank",
    ),
    (
        scheme(replace(line((0, 1)), active=(range(0, 3, 2),) * 3)),
        "lane 0: needs active iterations, in a run, of each rank",
    ),
    (scheme(replace(line((0, 1)), active=(range(1, 2),) * 3)), "step 0: lane 0: no pair is active"),
    (
        scheme(replace(line((0, 1), (1, 2)), active=(range(1), range(0), range(1)))),
        "end, rank 1, slot 1: must hold chunk 1 of ranks {0}, holds nothing",
    ),
    (scheme(line((0, 1))), "end, rank 1, slot 1: must hold chunk 1 of ranks {0}, holds nothing"),
    (
        scheme(line((0, 1), recv=1, reduce=True), **SUM),
        "step 0, rank 1, slot 1: combines chunk 1 with chunk 0",
    ),
    (
        scheme(line((0, 1), (1, 0), reduce=True), **SUM),
        "end, rank 0, slot 0: must hold chunk 0 of ranks {0, 1, 2}, holds chunk 0 of ranks {0, 1}",
    ),
    (scheme(collective="allreduce"), "the collective must be one of all_reduce, "),
    (scheme(num_slots=0), "num_slots=0: ranks and slots must be at least 1"),
    (scheme(root=3), "root=3: must be a rank"),
    (scheme(root=None), "root=None: must be a rank"),
    (scheme(collective="all_to_all"), "num_slots=2 must be a multiple of the number of ranks"),
    (scheme(collective="reduce_scatter", num_slots=3), "root=0: must be None"),
    (scheme(collective="gather", num_slots=3), "enter='full': must be 'own'"),
    (scheme(enter="own"), "enter='own': must be 'full'"),
    (scheme(**SUM, enter="own"), "a payload that enters as one share has one slot"),
]


@pytest.mark.parametrize(("schedule", "message"), MESSAGES, ids=lambda value: str(value)[:40])
def test_messages_name_step_rank_slot_and_rule(schedule: Schedule, message: str):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        prove(schedule)


def test_counting_twice_names_the_rank():
    schedule = written_out(build(recursive_doubling(), "all_reduce", 4))
    with pytest.raises(ScheduleError, match=r"step 2, rank 1, slot 0: counts .* of rank 3 twice"):
        first, second = schedule.steps
        prove(replace(schedule, steps=(first, second, replace_pairs(second, ((3, 1), (2, 0))))))


def replace_pairs(step: Step, pairs: tuple[tuple[int, int], ...]) -> PermuteStep:
    assert isinstance(step, PermuteStep)
    return PermuteStep((replace(step.lanes[0], pairs=pairs),))


def test_iterations_of_a_repeat_are_told_apart():
    schedule = build(ring(), "all_reduce", 4)
    first = schedule.steps[0]
    assert isinstance(first, Repeat)
    with pytest.raises(ScheduleError, match=r"step 3 \(iteration 3\), rank \d, slot \d: counts"):
        prove(replace(schedule, steps=(replace(first, count=4), *schedule.steps[1:])))


GATHER, EXCHANGE = NativeStep("all_gather"), NativeStep("all_to_all")
LAYOUTS = [
    ("all_reduce", (GATHER,), "native all_gather needs the own layout, here it is full"),
    ("all_reduce", (NativeStep("reduce_scatter"),), "the result must be in the full layout"),
    ("all_reduce", (EXCHANGE, FoldStep(), FoldStep()), "FoldStep needs the full layout"),
    ("all_reduce", (EXCHANGE, FoldStep(), EXCHANGE), "native all_to_all needs the full layout"),
    ("all_reduce", (FoldStep(),), "combines chunk 0 with chunk 1"),
    ("all_reduce", (ShuffleStep((0, 0)),), "a shuffle needs a start for each rank"),
    ("all_reduce", (NativeStep("all_reduce"), NativeStep("all_reduce")), "counts the contribution"),
    ("all_reduce", (NativeStep("psum"),), "unknown native collective 'psum'"),  # type: ignore
    ("all_reduce", ("psum",), "unknown step 'psum'"),
    ("reduce_scatter", (EXCHANGE, ShuffleStep((2, 2, 2), -1), FoldStep()), "out of rank order"),
]


@pytest.mark.parametrize(("collective", "steps", "message"), LAYOUTS, ids=lambda v: str(v)[:40])
def test_whole_collectives_and_local_steps(collective: str, steps: tuple[Step, ...], message: str):
    schedule = Schedule(
        algorithm="mine", collective=collective, num_ranks=3, num_slots=3, steps=steps
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        prove(schedule)


def test_many_contributors_are_abbreviated():
    schedule = build(tree(), "reduce", 20)
    with pytest.raises(ScheduleError, match=r"\.\.\. 20 ranks\}, holds chunk 0 of ranks \{0, 1, 2"):
        prove(replace(schedule, steps=schedule.steps[:-1]))


@pytest.mark.parametrize("layout", ["side", "", None, ["full"]])
def test_a_layout_that_is_none_is_refused(layout):
    with pytest.raises(ValueError, match="unknown layout .*; valid: 'full', 'own'"):
        replace(build(ring(), "all_reduce", 4), enter=layout)
