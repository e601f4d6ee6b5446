"""Chooses a plan for a group of collectives: enumerate, price, choose, keep the reasons.

The same request, topology and policy give the same plan in every process: times are integers,
and ties go to the fewest stages, then to the name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from xcoll.algorithms import check_choice
from xcoll.candidates import NATIVE, hierarchies, margin_percent, whole
from xcoll.compress import assignments, compress, why_exact
from xcoll.costmodel import REDUCTIONS
from xcoll.direct_sums import accumulated, deterministic, wide_options
from xcoll.errors import UnsupportedError
from xcoll.forced import forced_stages
from xcoll.options import Option, Options, least_departure
from xcoll.plan import EXACT, Plan, Request, Stage
from xcoll.policy import Choice, Policy
from xcoll.roundoff import is_inexact
from xcoll.topology import Topology
from xcoll.units import readable_time


def plan(
    request: Request, topology: Topology | None, policy: Policy, *, strict: bool = False
) -> Plan:
    """Plans one group of collectives.

    Args:
      request: what is to be done.
      topology: what the mesh lies on; None or an unknown one keeps everything native, except what
        the policy forces.
      policy: what is permitted or forced. ``where`` is the caller's business.
      strict: what a forced algorithm cannot do is an error; else it is kept native, with the
        reason. True whenever the policy forces algorithms by collective.

    Returns:
      The plan, with the candidates it beat.

    Raises:
      ValueError: the policy's algorithm or an option is unknown, or, if strict, cannot do this; the
        topology lacks an axis of the request, or has it in another size; the policy wants a
        deterministic sum and no plan can give one, or an error budget that no plan keeps.

    Example:
      >>> from xcoll.topology import Topology
      >>> topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
      >>> axes, sizes, shapes = ("host", "device"), (2, 4), ((4194304,),)
      >>> request = Request("all_reduce", "sum", axes, sizes, "float32", 4, shapes)
      >>> plan(request, topology, Policy()).name
      'hierarchical(native, native)'
    """
    if topology is None:
        sizes = dict(zip(request.axes, request.axis_sizes, strict=True))
        topology = Topology.unknown(sizes, "no topology was given")
    # The pass's own selection of sites is no part of a plan, and need not split the cache.
    plain_policy = replace(policy.narrowed(request.collective), where=None)
    return _plan(request, topology, plain_policy, strict or policy.by_name)


@functools.lru_cache(maxsize=4096)
def _plan(request: Request, topology: Topology, policy: Policy, strict: bool) -> Plan:
    _check_axes(request, topology)
    forced = policy.algorithm
    assert forced is None or isinstance(forced, Choice)
    if forced is not None and request.collective != "permute":
        check_choice(f"plan({request.collective})", forced)
    exact_because = why_exact(request, policy)
    make = Maker(request, topology, policy if exact_because is None else policy.exact())
    if request.num_ranks == 1:
        return make.native_plan("a single rank: nothing to communicate")
    if request.num_elements == 0:
        return make.native_plan("empty payload")
    wants_wide = policy.accumulate is not None and _is_narrow_sum(request)
    if policy.deterministic and _is_rounded(request):
        # What is summed in float32 is summed in rank order too.
        return (accumulated if wants_wide else deterministic)(make, forced)
    if request.num_bytes < (policy.min_bytes or 0):
        return make.native_plan(f"smaller than the policy's min_bytes={policy.min_bytes}")
    if wants_wide and exact_because is not None:
        return accumulated(make, forced)
    made = make.forced(forced, strict) if forced is not None else make.free()
    if wants_wide and not _sums_encoded(made.stages):
        # A codec sums in float32; where it is not used, or not on all axes, the dtype would.
        return accumulated(make, forced)
    if exact_because is not None and (policy.codec or policy.max_error):
        return replace(made, reason=f"{made.reason}{EXACT}{exact_because}")
    return made


def _check_axes(request: Request, topology: Topology) -> None:
    sizes = topology.axis_sizes
    wanted = dict(zip(request.axes, request.axis_sizes, strict=True))
    if {axis: sizes.get(axis) for axis in wanted} != wanted:
        raise ValueError(
            f"plan({request.collective}): the topology does not match the mesh: topology"
            f" {topology.name!r} has axes {sizes}, the collective goes over {wanted}; give the"
            " topology the mesh's axes, for example Topology.parse(text, axes=dict(mesh.shape))"
        )


def _is_rounded(request: Request) -> bool:
    return request.op in ("sum", "prod") and is_inexact(request.dtype)


def _is_narrow_sum(request: Request) -> bool:
    sums = request.op == "sum" and request.collective in REDUCTIONS
    return sums and request.dtype in ("bfloat16", "float16")


def _sums_encoded(stages: Sequence[Stage]) -> bool:
    return all(stage.codec is not None for stage in stages if stage.collective in REDUCTIONS)


class Maker(Options):
    """Makes the plan of one request.

    Its policy is narrowed to the request's collective, and has codecs only where they may be used.
    """

    def native_plan(self, reason: str, others: Sequence[Option] = ()) -> Plan:
        """Returns the plan that leaves the program as it is."""
        return self.made(self.native, reason, others)

    def options(self) -> list[Option]:
        """Returns all that a free choice is made from, native first, then the fastest."""
        found = [*self._exact_options(), *self._encoded_options()]
        return [self.native, *sorted(found, key=_cheapest)]

    def free(self) -> Plan:
        """Chooses among all algorithms, and codecs where there are any."""
        if not self.topology.is_known:
            advice = "; name an algorithm to use the codec anyway" if self.policy.is_lossy else ""
            return self.native_plan(f"unknown topology: {self.topology.why_unknown}{advice}")
        encoded = self._encoded_options()
        exact = [] if self.policy.codec else [self.native]
        has_budget = self.policy.max_error is not None
        if has_budget and self.policy.accumulate and _is_narrow_sum(self.request):
            exact = wide_options(self, None)
        if (over := self._check_budget([*exact, *encoded])) is not None:
            plan = Maker(self.request, self.topology, self.policy.exact()).free()
            return replace(plan, reason=f"{plan.reason}{EXACT}{over}")
        options = sorted([*self._exact_options(), *encoded], key=_cheapest)
        native = self.native.time_ps
        assert native is not None
        allowed = [option for option in options if option.barred is None]
        if not allowed:
            return self.native_plan(
                PERMUTATION if self.request.collective == "permute" else "no algorithm does this",
                options,
            )
        enough = [o for o in allowed if self._gains(o)]
        margin = margin_percent(self.topology)
        first = least_departure(enough, margin) if enough else allowed[0]
        assert first.time_ps is not None
        if not enough and (why_not := self._over_budget(self.native.stages)) is not None:
            return self.made(first, f"native is none: {why_not}", [self.native, *options])
        if not enough:
            gain = 100 - 100 * first.time_ps // native if native else 0
            how = f"{gain} % faster" if gain > 0 else "not faster"
            return self.native_plan(
                f"the best decomposition, {first.name}, is predicted {how};"
                f" {self.gain_percent} % are needed",
                options,
            )
        gain = 100 - 100 * first.time_ps // native
        times = f"{readable_time(first.time_ps)} against {readable_time(native)}"
        reason = f"predicted {gain} % faster than native: {times}"
        return self.made(first, reason, [self.native, *options])

    def _gains(self, option: Option) -> bool:
        """Whether an option is so much faster than native that it may replace it."""
        time, native = option.time_ps or 0, self.native.time_ps or 0
        # What was measured to take no time at all is beaten by nothing.
        return time < native and time * 100 <= native * (100 - self.gain_percent)

    def _exact_options(self) -> Iterator[Option]:
        if self.request.collective == "permute":
            return
        for _, stages in whole(self.request, self.topology):
            yield self.option(stages)
        for name, stages in hierarchies(self.request, self.topology, self.price):
            yield self.option(stages, _where(name))

    def _encoded_options(self) -> list[Option]:
        """Returns the plans with codecs, those over the error budget barred."""
        if not self.policy.is_lossy:
            return []
        found: dict[tuple[Stage, ...], Option] = {}
        settled = set[str]()
        for policy in assignments(self.request, self.policy):
            axis = "" if self.policy.codec else policy.permits[0][1]
            if axis in settled:
                continue
            new: dict[tuple[Stage, ...], Option] = {}
            for stages, where in self._structures(policy):
                made = compress(self.request, stages, policy)
                if not isinstance(made, str) and made not in found and _is_encoded(made):
                    new[made] = self.option(made, where)
            found |= new
            # Codecs come by their bytes: where the fastest plan of one is within the budget, a
            # finer one for the same axes has no faster.
            if not self.policy.codec and new and min(new.values(), key=_cheapest).barred is None:
                settled.add(axis)
        return list(found.values())

    def _structures(self, policy: Policy) -> Iterator[tuple[tuple[Stage, ...], str]]:
        """Yields exact plans to put codecs in, those of hierarchies the best once encoded."""

        def price(stages: Sequence[Stage]) -> int:
            made = compress(self.request, stages, policy)
            return _NEVER if isinstance(made, str) else self.price(made)

        yield self.native.stages, ""
        if self.request.collective == "permute":
            return
        for _, stages in whole(self.request, self.topology):
            yield stages, ""
        for name, stages in hierarchies(self.request, self.topology, price):
            yield stages, _where(name)

    def _check_budget(self, candidates: Sequence[Option]) -> str | None:
        """Returns None where a plan keeps the error budget; else why not, if the policy goes on.

        Raises:
          ValueError: no plan keeps it, and the policy does not say to be exact then.
        """
        budget = self.policy.max_error
        if budget is None or not candidates:
            return None
        best = min(candidates, key=lambda option: (self.bound(option.stages), option.name))
        bound = self.bound(best.stages)
        if bound <= budget:
            return None
        if self.policy.over_budget == "exact":
            return f"{best.name} has {bound:.3g}"
        raise ValueError(
            f"{self.request.collective} of {self.request.dtype} over {self.request.axes}: no plan"
            f" keeps Policy(max_error={budget:g}); the best, {best.name}, has an error bound of"
            f" {bound:.3g}. Allow that much, permit a finer codec, or say"
            " Policy(over_budget='exact')"
        )

    def forced(self, choice: Choice, strict: bool) -> Plan:
        """Takes what the policy names, or says why that is not possible."""
        if choice == NATIVE:
            return self.native_plan("the policy names native")
        request = self.request
        if request.collective == "permute":
            found: tuple[Stage, ...] | str = self.native.stages
        else:
            found = forced_stages(request, self.topology, choice)
        if isinstance(found, str):
            if strict:
                raise UnsupportedError(
                    f"{request.collective} over {request.axes}: the policy names {choice}, but"
                    f" {found}"
                )
            return self.native_plan(f"kept native: {found}")
        note = ""
        if self.policy.is_lossy:
            encoded = self._encoded_forms(found)
            if isinstance(encoded, str):
                if strict:
                    raise UnsupportedError(
                        f"{request.collective} over {request.axes}: the policy names {choice} and"
                        f" a codec, but {encoded}"
                    )
                note = f"{EXACT}{encoded}"
            else:
                exact = [] if self.policy.codec else [self.option(found)]
                over = self._check_budget([*exact, *encoded])
                fits = [o for o in encoded if self._over_budget(o.stages) is None]
                if fits:
                    found = min(fits, key=_cheapest).stages
                elif over is not None:
                    note = f"{EXACT}{over}"
        if request.collective == "permute" and not _is_encoded(found):
            return self.native_plan(PERMUTATION + note)
        option = self.option(found)
        if option.barred:
            note += f", although {option.barred}"
        return self.made(option, f"the policy names {choice}{note}", [self.native])

    def _encoded_forms(self, stages: tuple[Stage, ...]) -> list[Option] | str:
        made = [compress(self.request, stages, p) for p in assignments(self.request, self.policy)]
        options = [self.option(m) for m in made if not isinstance(m, str)]
        reasons = [m for m in made if isinstance(m, str)]
        return options or (reasons or ["no codec takes it"])[0]


PERMUTATION = "a permutation is already the smallest step"

_NEVER = 1 << 62
"""The price of what cannot be encoded."""


def _where(name: str) -> str:
    """Returns what a hierarchy's name says of its levels' sizes."""
    return name[name.index(" over ") :] if " over " in name else ""


def _is_encoded(stages: Sequence[Stage]) -> bool:
    return any(stage.codec is not None for stage in stages)


def _cheapest(option: Option) -> tuple[int, int, str]:
    return option.order
