"""Plans of sums that a policy wants a certain way: in rank order, or in float32.

Both are direct over all ranks at once: only there one place sees all terms.
"""

from __future__ import annotations

from dataclasses import replace

from xcoll.algorithms import ALGORITHMS
from xcoll.candidates import does
from xcoll.codecs.plain import plain
from xcoll.compress import compress
from xcoll.options import Option, Options
from xcoll.plan import Plan, Stage
from xcoll.policy import Choice


def accumulated(options: Options, forced: Choice | None) -> Plan:
    """Takes a plan that sums in float32: direct over all ranks, at the wire's own width."""
    made = wide_options(options, forced)
    others = [options.native, *made[1:]]
    return options.made(made[0], "the policy wants sums in float32", others)


def wide_options(options: Options, forced: Choice | None) -> list[Option]:
    """Returns the plans that sum in float32, the best first.

    Raises:
      ValueError: the policy names another algorithm.
    """
    request = options.request
    call = f"{request.collective} over {request.axes}, Policy(accumulate='float32')"
    if forced is not None and forced.name != "direct":
        raise ValueError(
            f"{call}: the policy also names {forced}, which rounds partial sums to"
            f" {request.dtype}; only direct sums all terms at once, and others where a codec"
            " carries them over all axes"
        )
    policy = replace(options.policy, deterministic=False, codec=(("", "", plain(request.dtype)),))
    choices = [forced] if forced else [Choice("direct", (("shots", s),)) for s in (2, 1)]
    span = options.native.stages[0].span
    made = []
    for choice in choices if request.collective == "all_reduce" else choices[:1]:
        stages = compress(request, (Stage(request.collective, span, choice),), policy)
        assert not isinstance(stages, str)
        made.append(options.option(stages))
    if made[0].time_ps is not None:
        made.sort(key=lambda option: option.order)
    return made


def deterministic(options: Options, forced: Choice | None) -> Plan:
    """Takes a plan that sums in rank order: direct over all ranks at once."""
    request = options.request
    call = f"{request.collective} over {request.axes}, Policy(deterministic=True)"
    if forced is not None and forced.name != "direct":
        raise ValueError(
            f"{call}: the policy also names {forced}, which does not sum in rank order; only"
            " direct does"
        )
    choices = [forced] if forced else [Choice("direct", (("shots", s),)) for s in (2, 1)]
    if does(choices[0], request.collective, request, options.topology) is not None:
        raise ValueError(
            f"{call}: no algorithm does a {request.collective} in rank order; direct does"
            f" {', '.join(ALGORITHMS['direct'].collectives)}"
        )
    if request.collective != "all_reduce":
        choices = choices[:1]
    span = options.native.stages[0].span
    made = [options.option((Stage(request.collective, span, o),)) for o in choices]
    if made[0].time_ps is not None:
        made.sort(key=lambda option: option.order)
    reason = "the policy wants sums in rank order"
    return options.made(made[0], reason, [options.native, *made[1:]])
