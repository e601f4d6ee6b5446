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

_FIRST_ROUNDS = 2
_FEW, _MOST, _ROUNDS_S = 3, 9, 1.5
_COMPILING_S, _STARTING_S = 0.5, 1.0


def estimate_s(considered: Considered) -> float:
    """Returns about how many seconds `measure` will take."""
    times = [candidate.predicted_s for candidate in considered.candidates]
    calls, rounds = _calls(min(times)), _rounds(min(times))
    near = [time for time in times if time <= NEAR * min(times)]
    every = sum(times) * (1 + _FIRST_ROUNDS * calls)
    further = (sum(near) + 3 * times[0]) * rounds * calls
    return _STARTING_S + _COMPILING_S * len(times) + every + further


def _calls(best_s: float) -> int:
    return min(MOST_CALLS, max(1, math.ceil(TURN_S / best_s)))


def _rounds(best_s: float) -> int:
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
    mesh: jax.sharding.Mesh,
    meeting: Meeting,
    machine: Machine,
    on_turn: Callable[[str], None] | None = None,
) -> Result:
    """Returns the times of the plans of a case, all of which gave the right result.

    All are timed in a few rounds; then the chosen ones, native, and what came near the best in
    rounds of their own: the best of many noisy times would be too good.

    Args:
      case: what is done.
      considered: its plans.
      topology: name of what they were planned for.
      mesh: what it runs on.
      meeting: of all its processes, which have to call this alike.
      machine: where it runs.
      on_turn: told the name of each variant before it runs.

    Raises:
      SystemExit: a plan's result is wrong.
    """
    variants = _compiled(case, considered, mesh)
    runs = {name: v.run for name, v in variants.items() if not v.same_as}
    runs[AGAIN] = variants["native"].run
    calls = _calls(min(candidate.predicted_s for candidate in considered.candidates))
    times = interleaved(runs, _FIRST_ROUNDS, meeting, calls=calls, warm_ups=0, on_turn=on_turn)
    best_s = min(t.median_s for t in times.values())
    near = contenders(
        {name: times[v.same_as or name].median_s for name, v in variants.items()},
        {name: v.candidate.policies for name, v in variants.items()},
        considered.chosen.values(),
    )
    again = {name: run for name, run in runs.items() if name in _named(near, variants)}
    again[AGAIN] = runs[AGAIN]
    times |= interleaved(
        again, _rounds(best_s), meeting, calls=_calls(best_s), warm_ups=0, on_turn=on_turn
    )
    return Result(
        case=case,
        chosen=considered.chosen,
        timed=tuple(_timed(name, v, times) for name, v in variants.items()),
        native_noise=noise(times["native"], times[AGAIN]),
        too_slow=considered.too_slow,
        barred=considered.barred,
        topology=topology,
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


def _timed(name: str, variant: _Variant, times: Mapping[str, Times]) -> Timed:
    plan = variant.candidate.plan
    rounds = times[variant.same_as or name].rounds_s
    return Timed(
        name=name,
        kind=kind_of(plan.stages),
        predicted_s=variant.candidate.predicted_s,
        policies=variant.candidate.policies,
        same_as=variant.same_as,
        rounds_s=(*rounds, *times[AGAIN].rounds_s) if plan.is_native else rounds,
    )
