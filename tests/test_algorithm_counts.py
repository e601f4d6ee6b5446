"""What schedules cost: steps, bytes and program size, against textbooks and closed forms."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
from algorithm_table import AG, AR, CASES, RS, Case

from xcoll.algorithms import build, closed_form
from xcoll.policy import Choice
from xcoll.schedule import NativeStep, PermuteStep, Repeat, Schedule

MAX_RANKS = 64
every_case = pytest.mark.parametrize("case", CASES, ids=str)


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


def log2(number: int) -> int:
    """Rounded up."""
    return math.ceil(math.log2(number))


# Textbook steps, and payloads that the busiest rank of each step sends in total, by number of
# ranks n; p is the largest power of two that is not above it.
TEXTBOOK = [
    # Patarasuk and Yuan 2009
    ("ring", AR, lambda n, p: 2 * (n - 1), lambda n, p: 2 * (n - 1) / n),
    ("ring", RS, lambda n, p: n - 1, lambda n, p: (n - 1) / n),
    ("ring", AG, lambda n, p: n - 1, lambda n, p: (n - 1) / n),
    # n chunks down a chain of n ranks
    ("ring", "broadcast", lambda n, p: 2 * (n - 1), lambda n, p: 2 * (n - 1) / n),
    ("bidirectional_ring", RS, lambda n, p: n - 1, lambda n, p: (n - 1) / n),
    ("bidirectional_ring", AG, lambda n, p: n // 2, lambda n, p: (n - 1) / n),
    # Thakur, Rabenseifner and Gropp 2005; two more steps where n is no power of two
    (
        "recursive_doubling",
        AR,
        lambda n, p: log2(p) + 2 * (n > p),
        lambda n, p: log2(p) + 2 * (n > p),
    ),
    (
        "halving_doubling",
        AR,
        lambda n, p: 2 * log2(p) + 2 * (n > p),
        lambda n, p: 2 * (p - 1) / p + 2 * (n > p),
    ),
    # Barnett et al. 1994
    ("halving_doubling", "broadcast", lambda n, p: 2 * log2(n), lambda n, p: 2 * (n - 1) / n),
    # Chan et al. 2007
    ("tree", AR, lambda n, p: 2 * log2(n), lambda n, p: 2 * log2(n)),
    ("tree", "broadcast", lambda n, p: log2(n), lambda n, p: log2(n)),
    ("tree", "reduce", lambda n, p: log2(n), lambda n, p: log2(n)),
    ("tree", "gather", lambda n, p: log2(n), lambda n, p: (n - 1) / n),
    ("tree", "scatter", lambda n, p: log2(n), lambda n, p: (n - 1) / n),
    # Bruck et al. 1997
    ("bruck", AG, lambda n, p: log2(n), lambda n, p: (n - 1) / n),
    # Thakur et al. 2005
    ("pairwise", AR, lambda n, p: 2 * (n - 1), lambda n, p: 2 * (n - 1) / n),
    ("pairwise", RS, lambda n, p: n - 1, lambda n, p: (n - 1) / n),
    ("pairwise", AG, lambda n, p: n - 1, lambda n, p: (n - 1) / n),
    ("pairwise", "all_to_all", lambda n, p: n - 1, lambda n, p: (n - 1) / n),
]
Formula = Callable[[int, int], float]


@pytest.mark.parametrize(
    ("name", "collective", "num_steps", "payloads"),
    TEXTBOOK,
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_steps_and_bytes_are_those_of_the_textbook(
    name: str, collective: str, num_steps: Formula, payloads: Formula
):
    p = 1
    for n in range(1, MAX_RANKS + 1):
        p = 2 * p if 2 * p == n else p
        schedule = build(Choice(name), collective, n)
        steps = permute_steps(schedule)
        assert len(steps) == num_steps(n, p)
        sent = sum(map(busiest, steps)) / schedule.num_slots
        assert sent == pytest.approx(payloads(n, p), rel=1e-12)


@pytest.mark.parametrize("n", [4, 8, 64])
def test_bruck_all_to_all_sends_half_of_the_shares_in_every_step(n: int):
    steps = permute_steps(build(Choice("bruck"), "all_to_all", n))
    assert [busiest(step) for step in steps] == [n // 2] * log2(n)


@pytest.mark.parametrize("num_chunks", [1, 8, 32])
def test_double_tree_sends_as_little_as_a_ring_in_logarithmic_latency(num_chunks: int):
    choice = Choice("double_tree", (("num_chunks", num_chunks),))
    for n in range(2, MAX_RANKS + 1):
        schedule = build(choice, AR, n)
        # Twice the payload, up and down, and no rank more than once a step.
        assert max(total_sent(schedule).values()) <= 2 * schedule.num_slots
        steps = permute_steps(schedule)
        assert set(map(busiest, steps)) == {1}
        assert len(steps) <= 4 * (num_chunks + log2(n))


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
    # Each step is one permutation of one slot: as many steps as slots, and the ring filling.
    slots = schedule.num_slots
    assert slots == (segments - 1) * n
    assert all(len(s.lanes) == 1 and s.lanes[0].send.count == 1 for s in steps)
    assert len(steps) == 2 * (slots + inner - 2)
    # Between hosts, a payload's all-reduce over hosts: 2 (outer - 1) / outer payloads a host.
    assert set(across(schedule, inner).values()) == {2 * (outer - 1) * slots // outer}
    # One sender a host at most, and meanwhile all its other ranks send inside.
    out = [sum(a // inner != b // inner for a, b in s.lanes[0].pairs) for s in steps]
    assert out.count(outer) == 2 * (segments - 1) * (outer - 1) * inner
    assert out.count(0) == len(steps) - out.count(outer)
    assert {len(s.lanes[0].pairs) for s in steps} == {n, n - outer}


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


# How many lanes (each a collective-permute with two tables) a program has at most: logarithmic
# in the ranks, unless said otherwise.
PROGRAM_LANES = {
    "ring": lambda n: 8,
    # Each part of the payload, one an axis, is on a lane; a lane changes where a part goes on.
    "torus": lambda n: 2 * 3 * 7,
    "hierarchical": lambda n: 6,
    "bidirectional_ring": lambda n: 6,
    "double_tree": lambda n: 4 * (8 + n.bit_length()),
    "bruck": lambda n: n.bit_length(),
    "native": lambda n: 0,
    "direct": lambda n: 0,
}
# Its steps differ in their pairs, so that each is written out.
LINEAR = {
    ("pairwise", collective): (lambda n, passes=passes: passes * n)
    for collective, passes in ((AR, 2), (RS, 1), (AG, 1), ("all_to_all", 1))
}


@every_case
def test_program_size(case: Case):
    name = case.choice.name
    bound = LINEAR.get((name, case.collective)) or PROGRAM_LANES.get(
        name, lambda n: 8 * n.bit_length()
    )
    for num_ranks in (*range(1, 33), 63, 64, 100, 128):
        for dims in case.dims(num_ranks)[-1:]:
            schedule = build(case.choice, case.collective, num_ranks, dims=dims)
            assert sum(len(step.lanes) for step in program(schedule)) <= bound(num_ranks)
