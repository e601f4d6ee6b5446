"""Every algorithm: proved, run on arrays, counted, and compared with its closed form."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from algorithm_table import AG, AR, CASES, ROOTED, RS, TABLE, Case
from schedule_runner import enter, expected, results, run

from xcoll.algorithms import ALGORITHMS, build, check_choice, closed_form, supports
from xcoll.algorithms import choices as choice_functions
from xcoll.errors import UnsupportedError
from xcoll.policy import Choice
from xcoll.proof import prove
from xcoll.schedule import NativeStep, PermuteStep, Repeat, Schedule

MAX_RANKS = 64
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_the_table_has_every_algorithm_and_collective():
    told = {(choice.name, c) for choice, collectives, _ in TABLE for c in collectives}
    made = {(name, c) for name, algorithm in ALGORITHMS.items() for c in algorithm.collectives}
    assert told == made


def test_every_algorithm_has_a_choice_function():
    for choice, _, levels in TABLE:
        function = getattr(choice_functions, choice.name)
        assert function().name == choice.name
        assert ALGORITHMS[choice.name].needs_dims == bool(levels)


@every_case
def test_proved_for_every_number_of_ranks(case: Case):
    for num_ranks in range(1, MAX_RANKS + 1):
        for schedule in case.schedules(num_ranks):
            assert (schedule.algorithm, schedule.collective) == (case.choice.name, case.collective)
            assert schedule.num_ranks == num_ranks
            prove(schedule)


@pytest.mark.parametrize("case", [c for c in CASES if c.collective in ROOTED], ids=str)
def test_proved_for_every_root(case: Case):
    for num_ranks in range(1, 18):
        for schedule in case.schedules(num_ranks, roots="all"):
            prove(schedule)


@every_case
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 8, 12, 13, 16])
def test_runs_right_on_arrays(case: Case, num_ranks: int):
    rng = np.random.default_rng(num_ranks)
    for schedule in case.schedules(num_ranks):
        shape = (num_ranks, schedule.num_slots, 2)
        payload = rng.integers(-(2**40), 2**40, shape)
        garbage = rng.integers(-(2**40), 2**40, shape)
        got = results(schedule, run(schedule, enter(schedule, payload, garbage)))
        for mine, right in zip(got, expected(schedule, payload), strict=True):
            if right is not None:
                np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("case", [c for c in CASES if c.collective == AR], ids=str)
def test_sums_are_computed_once_or_declared_replicated(case: Case):
    # Adding draws a fresh random number: ranks agree only if one of them computed the result
    # and the others have copies. What is not declared must never need the compiler to round alike.
    rng = np.random.default_rng(0)
    for num_ranks in (2, 3, 6, 8, 13):
        for schedule in case.schedules(num_ranks):
            zeros = np.zeros((num_ranks, schedule.num_slots, 1))
            got = results(schedule, run(schedule, zeros, lambda a, b: rng.random(a.shape)))
            alike = all(np.array_equal(mine, got[0]) for mine in got)
            assert alike != schedule.replicates_sums


@pytest.mark.parametrize("collective", [AR, RS])
@pytest.mark.parametrize("shots", [1, 2])
def test_direct_adds_in_rank_order(collective: str, shots: int):
    # Float addition is not associative: on these operands another order has other bits.
    schedule = build(Choice("direct", (("shots", shots),)), collective, 7)
    payload = np.random.default_rng(0).standard_normal((7, 7, 3)).astype(np.float32)
    if collective == AR and shots == 1:
        payload = np.repeat(payload[:, :1], 7, axis=1)
    got = results(schedule, run(schedule, enter(schedule, payload, payload * 0)))
    total = payload[0]
    for row in payload[1:]:
        total = total + row
    for rank, mine in enumerate(got):
        right = total if mine.shape == total.shape else total[rank : rank + 1]
        np.testing.assert_array_equal(mine, right)


def permute_steps(schedule: Schedule) -> list[PermuteStep]:
    return [step for step, _ in schedule.flat() if isinstance(step, PermuteStep)]


def busiest(step: PermuteStep) -> int:
    sent: Counter[int] = Counter()
    for lane in step.lanes:
        for source, _ in lane.pairs:
            sent[source] += len(lane.send.pattern)
    return max(sent.values())


@every_case
def test_closed_form_says_what_moves_in_every_step(case: Case):
    # Phases are in the order of the steps, and have what the busiest rank sends in each.
    for num_ranks in range(1, MAX_RANKS + 1):
        for dims in case.dims(num_ranks):
            schedule = build(case.choice, case.collective, num_ranks, dims=dims)
            form = closed_form(case.choice, case.collective, num_ranks, dims=dims)
            told = [
                (phase.slots * phase.lanes, phase.reduce)
                for phase in form.phases
                if phase.kind == "permute"
                for _ in range(phase.steps)
            ]
            done = [(busiest(step), step.lanes[0].reduce) for step in permute_steps(schedule)]
            assert told == done, (num_ranks, dims)
            assert form.num_slots == schedule.num_slots
            assert all(phase.steps > 0 and phase.slots > 0 for phase in form.phases)
            kinds = [step.collective for step in schedule.steps if isinstance(step, NativeStep)]
            assert [p.kind for p in form.phases if p.kind not in ("permute", "fold")] == kinds


@every_case
def test_closed_form_of_a_pod(case: Case):
    n = 131072
    for dims in {(): [()], (2,): [(512, 256)]}.get(case.levels, [(n,), (512, 256), (64, 64, 32)]):
        form = closed_form(case.choice, case.collective, n, dims=dims)
        assert len(form.phases) <= 2 * 17 + 2


# Textbook steps and bytes (slots sent by the busiest rank, over the slots of a payload), by
# number of ranks n; p: the largest power of two that is not above it.
@dataclass(frozen=True)
class Textbook:
    name: str
    collective: str
    steps: str
    payloads: str
    options: tuple[tuple[str, int], ...] = ()


TEXTBOOK = [
    # Patarasuk and Yuan 2009
    Textbook("ring", AR, "2*(n-1)", "2*(n-1)/n"),
    Textbook("ring", RS, "n-1", "(n-1)/n"),
    Textbook("ring", AG, "n-1", "(n-1)/n"),
    # n chunks down a chain of n ranks
    Textbook("ring", "broadcast", "n-1 + n-1", "2*(n-1)/n"),
    Textbook("bidirectional_ring", AR, "n-1 + n//2 if n > 2 else 2*(n-1)", "2*(n-1)/n"),
    Textbook("bidirectional_ring", AG, "n//2", "(n-1)/n"),
    # Thakur, Rabenseifner and Gropp 2005; two more steps where n is no power of two
    Textbook("recursive_doubling", AR, "log(p) + 2*(n > p)", "log(p) + 2*(n > p)"),
    Textbook("halving_doubling", AR, "2*log(p) + 2*(n > p)", "2*(p-1)/p + 2*(n > p)"),
    Textbook("halving_doubling", "broadcast", "2*ceil(log(n))", "2*(n-1)/n"),
    Textbook("tree", AR, "2*ceil(log(n))", "2*ceil(log(n))"),
    Textbook("tree", "broadcast", "ceil(log(n))", "ceil(log(n))"),
    Textbook("tree", "reduce", "ceil(log(n))", "ceil(log(n))"),
    Textbook("tree", "gather", "ceil(log(n))", "(n-1)/n"),
    Textbook("tree", "scatter", "ceil(log(n))", "(n-1)/n"),
    # Bruck et al. 1997
    Textbook("bruck", AG, "ceil(log(n))", "(n-1)/n"),
    Textbook("pairwise", "all_to_all", "n-1", "(n-1)/n"),
]


@pytest.mark.parametrize("book", TEXTBOOK, ids=lambda b: f"{b.name}-{b.collective}")
def test_steps_and_bytes_are_those_of_the_textbook(book: Textbook):
    for n in range(1, MAX_RANKS + 1):
        schedule = build(Choice(book.name, book.options), book.collective, n)
        p = 1
        while 2 * p <= n:
            p *= 2
        names = {"n": n, "p": p, "ceil": math.ceil, "log": math.log2}
        steps = permute_steps(schedule)
        assert len(steps) == eval(book.steps, names)
        sent = sum(map(busiest, steps)) / schedule.num_slots
        assert sent == pytest.approx(eval(book.payloads, names), rel=1e-12)


def total_sent(schedule: Schedule) -> Counter[int]:
    sent: Counter[int] = Counter()
    for step in permute_steps(schedule):
        for lane in step.lanes:
            for source, _ in lane.pairs:
                sent[source] += len(lane.send.pattern)
    return sent


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_powers_of_two_send_the_fewest_bytes(n: int):
    # An all-reduce cannot send less than 2 (n - 1) / n payloads a rank, its halves half of it.
    for name, collective, halves in [
        ("halving_doubling", AR, 2),
        ("halving_doubling", RS, 1),
        ("recursive_doubling", AG, 1),
    ]:
        schedule = build(Choice(name), collective, n)
        sent = total_sent(schedule)
        assert {count * n for count in sent.values()} == {halves * (n - 1) * schedule.num_slots}


def test_several_axes_send_the_fewest_bytes_in_fewer_steps():
    for dims in [(4, 4), (2, 8), (3, 5), (2, 3, 4)]:
        n = math.prod(dims)
        schedule = build(Choice("torus"), AR, n, dims=dims)
        assert len(permute_steps(schedule)) == 2 * sum(d - 1 for d in dims)
        assert {c * n for c in total_sent(schedule).values()} == {2 * (n - 1) * schedule.num_slots}


def across(schedule: Schedule, inner: int) -> Counter[int]:
    """Counts slots sent from host to host, by sending host."""
    sent: Counter[int] = Counter()
    for step in permute_steps(schedule):
        for lane in step.lanes:
            for a, b in lane.pairs:
                if a // inner != b // inner:
                    sent[a // inner] += len(lane.send.pattern)
    return sent


@pytest.mark.parametrize("dims", [(2, 4), (4, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("segments", [2, 3, 8])
def test_pipelined_hierarchy(dims: tuple[int, int], segments: int):
    (outer, inner), n = dims, math.prod(dims)
    choice = Choice("hierarchical", (("num_segments", segments),))
    schedule = build(choice, AR, n, dims=dims)
    steps = permute_steps(schedule)
    # Each step is one permutation of all ranks: as many steps as slots to be sent.
    assert all(len(s.lanes) == 1 and len(s.lanes[0].pairs) == n for s in steps)
    assert len(steps) == 2 * segments * (n - 1)
    # Between hosts, a payload's all-reduce over hosts: 2 (outer - 1) / outer payloads a host.
    slots = schedule.num_slots
    assert set(across(schedule, inner).values()) == {2 * (outer - 1) * slots // outer}
    # A mixed step has one sender a host; all of them send out only while it fills and drains.
    out = [sum(a // inner != b // inner for a, b in s.lanes[0].pairs) for s in steps]
    mixed, alone = out.count(outer), out.count(n)
    assert mixed == 2 * (segments - 1) * (outer - 1) * inner
    assert alone == 2 * (outer - 1)


def test_hierarchy_of_two_hosts_of_four_sends_four_sevenths_of_a_ring():
    ring = build(Choice("ring"), AR, 8)
    levels = build(Choice("hierarchical", (("num_segments", 4),)), AR, 8, dims=(2, 4))
    flat = across(ring, 4)[0] / ring.num_slots
    assert across(levels, 4)[0] / levels.num_slots == pytest.approx(flat * 4 / 7)


def program(schedule: Schedule) -> list[PermuteStep]:
    """Returns the permute steps as written: the body of a repeat once."""
    steps: list[PermuteStep] = []
    for step in schedule.steps:
        steps += step.body if isinstance(step, Repeat) else []
        steps += [step] if isinstance(step, PermuteStep) else []
    return steps


# How many lanes (each a collective-permute with two tables) a program has at most. What is not
# named here has none: whole XLA collectives.
PROGRAM_LANES = {
    "ring": lambda n: 2,
    "bidirectional_ring": lambda n: 6,
    "recursive_doubling": lambda n: 3 * (n.bit_length() + 2),
    "halving_doubling": lambda n: 4 * (n.bit_length() + 1),
    "tree": lambda n: 8 * n.bit_length(),
    "double_tree": lambda n: 4 * (8 + n.bit_length()),
    "bruck": lambda n: n.bit_length(),
    "native": lambda n: 0,
    "direct": lambda n: 0,
}
# Their steps differ in their pairs, so that each is written out.
LINEAR = {
    ("ring", "broadcast"): lambda n: 2 * n,
    ("pairwise", "all_to_all"): lambda n: n,
    ("torus", AR): lambda n: 6 * n,
    ("torus", RS): lambda n: 3 * n,
    ("torus", AG): lambda n: 3 * n,
    ("hierarchical", AR): lambda n: 6 * n,
}


@every_case
def test_program_size(case: Case):
    bound = LINEAR.get((case.choice.name, case.collective)) or PROGRAM_LANES[case.choice.name]
    for num_ranks in (*range(1, 33), 63, 64, 100, 128):
        for dims in case.dims(num_ranks)[-1:]:
            schedule = build(case.choice, case.collective, num_ranks, dims=dims)
            assert sum(len(step.lanes) for step in program(schedule)) <= bound(num_ranks)


def test_same_arguments_same_object():
    assert build(Choice("ring"), AR, 8) is build(Choice("ring"), AR, 8)


def test_supports_says_what_the_algorithm_does():
    told = supports(Choice("ring"), "all_to_all")
    assert told == (
        "ring has no all_to_all; it does all_reduce, reduce_scatter, all_gather, broadcast"
    )
    for case in CASES:
        assert supports(case.choice, case.collective) is None


@pytest.mark.parametrize(
    ("levels", "collective", "reason"),
    [
        ((), AR, None),
        (("native", "tree"), AR, None),
        (("ring", "halving_doubling", "tree"), AR, "level 1 of .*halving_doubling has no all_gath"),
        (("tree", "native"), AR, "level 0 of .*tree has no reduce_scatter"),
        (("ring", "ring"), RS, None),
        (("bruck", "pairwise"), "all_to_all", None),
        (("bruck", "ring"), "all_to_all", "level 1 of .*ring has no all_to_all"),
        ((), "gather", "hierarchical has no gather; it does"),
    ],
)
def test_supports_of_a_hierarchy(levels: tuple[str, ...], collective: str, reason: str | None):
    got = supports(choice_functions.hierarchical(*levels), collective)
    if reason is None:
        assert got is None
    else:
        assert got is not None and re.search(reason, got)


def test_pipelined_hierarchy_takes_rings_only():
    assert supports(choice_functions.hierarchical("ring", "ring", num_segments=2), AR) is None
    got = supports(choice_functions.hierarchical("ring", "tree", num_segments=2), AR)
    assert got is not None and "pipelined levels are rings" in got


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("rng"), "psum: unknown algorithm 'rng'; valid: .*Did you mean 'ring'"),
        (Choice("tree", (("radx", 2),)), "unknown option of tree 'radx'; valid: 'radix'"),
        (Choice("ring", (("radix", 2),)), "unknown option of ring 'radix'; valid: none"),
        (Choice("tree", (("radix", 1),)), r"tree\(radix=1\): must be at least 2"),
        (Choice("direct", (("shots", 3),)), r"direct\(shots=3\): .* at least 1 and at most 2"),
        (Choice("tree", (("radix", True),)), r"radix=True\): must be an integer"),
        (Choice("ring", (), (Choice("ring"),)), "only hierarchical has levels"),
        (choice_functions.hierarchical("ring", "rink"), "unknown algorithm 'rink'"),
        (choice_functions.hierarchical(Choice("hierarchical")), "a level cannot be hierarchical"),
    ],
)
def test_bad_choices(choice: Choice, message: str):
    with pytest.raises(ValueError, match=message):
        check_choice("psum", choice)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "num_ranks=0", (Choice("ring"), AR, 0)),
        (
            ValueError,
            "unknown collective 'allreduce'.*'all_reduce'",
            (Choice("ring"), "allreduce", 2),
        ),
        (UnsupportedError, "ring has no gather", (Choice("ring"), "gather", 2)),
        (ValueError, "torus needs the sizes", (Choice("torus"), AR, 4)),
        (UnsupportedError, "composition of stages", (Choice("hierarchical"), AR, 4)),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, arguments: tuple[Choice, str, int]):
    for function in (build, closed_form):
        with pytest.raises(error, match=message):
            function(*arguments)


def test_bad_root_and_dims():
    with pytest.raises(ValueError, match=r"root=4\): must be a rank, 0 to 3"):
        build(Choice("tree"), "broadcast", 4, root=4)
    with pytest.raises(ValueError, match=r"dims=\(2, 3\).*number of ranks, 4"):
        build(Choice("torus"), AR, 4, dims=(2, 3))
    with pytest.raises(ValueError, match="only two levels are pipelined"):
        build(choice_functions.hierarchical(num_segments=2), AR, 8, dims=(2, 2, 2))


def test_schedules_are_values():
    schedule = build(Choice("double_tree"), AR, 6)
    assert hash(schedule) == hash(replace(schedule))
