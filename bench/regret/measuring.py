"""Carries out, checks and times the plans of one case."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from bench.regret.considered import Candidate, Considered, kind_of
from bench.regret.grid import Case
from bench.regret.programs import check, expected, operand, program
from bench.regret.results import Result, Timed
from bench.timing import Machine, Meeting, Times, interleaved

AGAIN = "native, again"
"""The second variant of native, which shows what differences mean nothing."""

NEAR = 1.25
"""Plans within so many times the best, after the first rounds, are timed further."""

TURN_S, MOST_CALLS = 0.1, 20
"""How long a turn is, at least: an idle link carries its first 128 KiB faster than its rate."""

_SHORT_S = 0.02
_FEW, _MOST, _ROUNDS_S = 3, 6, 0.6
_GAP = 1.5
_COMPILING_S, _STARTING_S = 0.45, 1.0


def estimate_s(considered: Considered) -> float:
    """Returns about how many seconds `measure` will take."""
    times = {candidate.plan.name: candidate.predicted_s for candidate in considered.candidates}
    policies = {candidate.plan.name: candidate.policies for candidate in considered.candidates}
    near = contenders(times, policies, considered.chosen.values())
    checked = sum(times.values())
    every = sum(_turns_s(group, _first_rounds) for group in groups(times))
    again = {AGAIN: times["native"]} | {name: times[name] for name in near}
    further = sum(_turns_s(group, _last_rounds) for group in groups(again))
    return _STARTING_S + _COMPILING_S * len(times) + checked + every + further


def groups(times_s: Mapping[str, float]) -> list[dict[str, float]]:
    """Returns variants in groups that are alike in time, the fastest first.

    A group's turns are of as many calls each, and short ones need more of them.

    Args:
      times_s: by name.
    """
    found: list[dict[str, float]] = []
    last_s = 0.0
    for name, time_s in sorted(times_s.items(), key=lambda item: item[1]):
        if not found or time_s > _GAP * last_s:
            found.append({})
        found[-1][name] = last_s = time_s
    return found


def _turns_s(group: Mapping[str, float], rounds: Callable[[float], int]) -> float:
    best_s = min(group.values())
    return sum(group.values()) * _calls(best_s) * rounds(best_s)


def _calls(best_s: float) -> int:
    return min(MOST_CALLS, max(1, math.ceil(TURN_S / best_s)))


def _first_rounds(best_s: float) -> int:
    return 2 if best_s < _SHORT_S else 1


def _last_rounds(best_s: float) -> int:
    return min(_MOST, max(_FEW, math.ceil(_ROUNDS_S / (best_s * _calls(best_s)))))


@dataclass(frozen=True)
class _Variant:
    candidate: Candidate
    same_as: str
    run: Callable[[], Any]


def measure(
    case: Case,
    considered: Considered,
    topology: str,
    launch_s: float,
    mesh: jax.sharding.Mesh,
    meeting: Meeting,
    machine: Machine,
) -> Result:
    """Returns the times of the plans of a case, all of which gave the right result.

    All are timed once or twice; then the chosen ones, native, and what came near the best in
    rounds of their own: the best of many noisy times would be too good.

    Args:
      case: what is done.
      considered: its plans.
      topology: name of what they were planned for.
      launch_s: seconds that starting a program takes.
      mesh: what it runs on.
      meeting: of all its processes, which have to call this alike.
      machine: where it runs.

    Raises:
      SystemExit: a plan's result is wrong.
    """
    variants = _compiled(case, considered, mesh)
    runs = {name: v.run for name, v in variants.items() if not v.same_as}
    runs[AGAIN] = variants["native"].run

    def turns(about_s: Mapping[str, float], rounds: Callable[[float], int]) -> dict[str, Times]:
        found: dict[str, Times] = {}
        for group in groups(about_s):
            best_s = min(group.values())
            found |= interleaved(
                {name: runs[name] for name in runs if name in group},
                rounds(best_s),
                meeting,
                calls=_calls(best_s),
                warm_ups=0,
            )
        return found

    predicted_s = {name: variants[name].candidate.predicted_s for name in runs if name != AGAIN}
    times = turns(predicted_s, _first_rounds)
    near = contenders(
        {name: times[v.same_as or name].median_s for name, v in variants.items()},
        {name: v.candidate.policies for name, v in variants.items()},
        considered.chosen.values(),
    )
    about_s = {name: times[name].median_s for name in _named(near, variants)}
    times |= turns(about_s | {AGAIN: about_s["native"]}, _last_rounds)
    return Result(
        case=case,
        chosen=considered.chosen,
        timed=tuple(_timed(name, v, times, name in near) for name, v in variants.items()),
        native_noise=noise(times["native"], times[AGAIN]),
        too_slow=considered.too_slow,
        barred=considered.barred,
        topology=topology,
        launch_s=launch_s,
        machine=str(machine),
    )


def _compiled(case: Case, considered: Considered, mesh: jax.sharding.Mesh) -> dict[str, _Variant]:
    """Returns the plans' programs by name, compiled and checked; those alike are compiled once."""
    x = operand(case, mesh)
    ranks = [(s.index[0].start or 0) // case.operand_elements for s in x.addressable_shards]
    wanted = {rank: expected(case, rank) for rank in ranks}
    variants: dict[str, _Variant] = {}
    by_text: dict[str, str] = {}
    for candidate in considered.candidates:
        name = candidate.plan.name
        lowered = program(candidate.plan, mesh).lower(x)
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        same_as = by_text.setdefault(text, name)
        if same_as != name:
            variants[name] = _Variant(candidate, same_as, variants[same_as].run)
            continue
        compiled = lowered.compile()
        check(case, candidate.plan, compiled(x), wanted)
        variants[name] = _Variant(candidate, "", partial(compiled, x))
    return variants


def contenders(
    medians_s: Mapping[str, float],
    policies: Mapping[str, Sequence[str]],
    chosen: Iterable[str],
) -> set[str]:
    """Returns names of plans that may be the best under some policy, the chosen ones and native.

    Args:
      medians_s: times by name.
      policies: by name, under which policies a plan was considered.
      chosen: names.
    """
    found = {"native", *chosen}
    for policy in {policy for all_of_one in policies.values() for policy in all_of_one}:
        times = {name: medians_s[name] for name in medians_s if policy in policies[name]}
        best_s = min(times.values())
        found |= {name for name, time_s in times.items() if time_s <= NEAR * best_s}
    return found


def noise(one: Times, other: Times) -> float:
    """Returns how far two medians are apart, as a part of the smaller one."""
    low, high = sorted((one.median_s, other.median_s))
    return high / low - 1


def _named(names: set[str], variants: Mapping[str, _Variant]) -> set[str]:
    return {variants[name].same_as or name for name in names}


def _timed(name: str, variant: _Variant, times: Mapping[str, Times], is_contender: bool) -> Timed:
    plan = variant.candidate.plan
    rounds = times[variant.same_as or name].rounds_s
    return Timed(
        name=name,
        kind=kind_of(plan.stages),
        predicted_s=variant.candidate.predicted_s,
        policies=variant.candidate.policies,
        same_as=variant.same_as,
        is_contender=is_contender,
        rounds_s=(*rounds, *times[AGAIN].rounds_s) if plan.is_native else rounds,
    )
