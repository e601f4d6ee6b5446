"""The plans that the planner considers for a case, and which of them are worth timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.regret.grid import POLICIES
from xcoll.compress import why_exact
from xcoll.options import Option
from xcoll.plan import Plan, Request, Stage
from xcoll.planner import Maker, plan
from xcoll.policy import Policy
from xcoll.topology import Topology

FACTOR = 4
"""A plan that is predicted so many times slower than the best is not timed."""


@dataclass(frozen=True)
class Candidate:
    """A plan to be timed.

    Attributes:
      plan: the plan, as if it had been chosen.
      policies: under which it was considered.
    """

    plan: Plan
    policies: tuple[str, ...]

    @property
    def predicted_s(self) -> float:
        """The predicted time."""
        assert self.plan.predicted_time_ps is not None
        return self.plan.predicted_time_ps / 10**12


@dataclass(frozen=True)
class Considered:
    """What the planner considered for a case.

    Attributes:
      candidates: the plans to be timed, native first.
      chosen: name of the chosen plan, by policy.
      too_slow: names of the plans that are not timed, since they are predicted too slow.
      barred: names of those that the planner may not choose.
    """

    candidates: tuple[Candidate, ...]
    chosen: dict[str, str]
    too_slow: tuple[str, ...]
    barred: tuple[str, ...]


def considered(request: Request, topology: Topology) -> Considered:
    """Returns the plans for a request under all policies, each once.

    Raises:
      ValueError: the topology is unknown, so that nothing is predicted.
      RuntimeError: a chosen plan is none of those considered.
    """
    if not topology.is_known:
        raise ValueError(f"considered: nothing is known of the topology: {topology.why_unknown}")
    found: dict[str, tuple[Maker, Option, list[str]]] = {}
    chosen: dict[str, str] = {}
    too_slow: set[str] = set()
    barred: set[str] = set()
    for name, policy in POLICIES.items():
        made = plan(request, topology, policy)
        chosen[name] = made.name
        maker = _maker(request, topology, policy)
        options = maker.options()
        barred |= {option.name for option in options if option.barred is not None}
        options = [option for option in options if option.barred is None]
        near = worth_timing(options, made.stages)
        too_slow |= {option.name for option in options if option not in near}
        for option in near:
            found.setdefault(option.name, (maker, option, []))[2].append(name)
    if missing := set(chosen.values()) - set(found):
        raise RuntimeError(f"considered: {missing} chosen, and none of {list(found)}")
    return Considered(
        candidates=tuple(
            Candidate(maker.made(option, "it was considered"), tuple(policies))
            for maker, option, policies in found.values()
        ),
        chosen=chosen,
        too_slow=tuple(sorted(too_slow - set(found))),
        barred=tuple(sorted(barred)),
    )


def worth_timing(options: Sequence[Option], chosen: Sequence[Stage]) -> list[Option]:
    """Returns native, the chosen plan, and what is predicted within `FACTOR` times the best.

    Args:
      options: priced, native first.
      chosen: the stages of the chosen plan.
    """
    times = [option.time_ps for option in options if option.time_ps is not None]
    limit = FACTOR * min(times)
    return [
        option
        for position, option in enumerate(options)
        if position == 0
        or option.stages == tuple(chosen)
        or (option.time_ps is not None and option.time_ps <= limit)
    ]


def kind_of(stages: Sequence[Stage]) -> str:
    """Returns what kind of plan stages make.

    Example:
      >>> from xcoll.plan import Span
      >>> from xcoll.policy import Choice
      >>> kind_of([Stage("all_reduce", Span(("host", "device"), 8), Choice("ring"))])
      'flat'
    """
    (first, *others) = stages
    codec = next((str(stage.codec) for stage in stages if stage.codec is not None), "")
    if not others and first.choice.name == "native" and not codec:
        return "native"
    if others:
        kind = "levels"
    else:
        kind = "pipelined levels" if first.choice.name == "hierarchical" else "flat"
    return f"{kind}, {codec}" if codec else kind


def _maker(request: Request, topology: Topology, policy: Policy) -> Maker:
    """Returns what `xcoll.planner.plan` makes its choice with."""
    narrowed = replace(policy.narrowed(request.collective), where=None)
    is_exact = why_exact(request, narrowed) is not None
    return Maker(request, topology, narrowed.exact() if is_exact else narrowed)
