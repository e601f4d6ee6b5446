"""Every algorithm: proved, run on arrays, and what is said of wrong choices of them."""

import re
from dataclasses import replace

import numpy as np
import pytest
from algorithm_table import AR, CASES, ROOTED, RS, TABLE, Case
from schedule_runner import enter, expected, results, run

from xcoll.algorithms import ALGORITHMS, build, check_choice, closed_form, supports
from xcoll.algorithms import choices as choice_functions
from xcoll.errors import UnsupportedError
from xcoll.policy import Choice
from xcoll.proof import prove

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
        # Halving scatters, and doubling gathers: two halves of one algorithm.
        (("ring", "halving_doubling", "tree"), AR, None),
        (("ring", "pairwise", "tree"), AR, None),
        (("ring", "bruck", "tree"), AR, "level 1 of .*bruck has no reduce_scatter"),
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
