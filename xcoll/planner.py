"""Chooses a plan for a group of collectives: enumerate, price, choose, keep the reasons.

The same request, topology and policy give the same plan in every process: times are integers,
and ties go to the fewest stages, then to the name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from xcoll.accounting import operations, wire_bytes
from xcoll.algorithms import ALGORITHMS, check_choice
from xcoll.candidates import GAIN_PERCENT, NATIVE, barred, does, hierarchies, whole, whole_span
from xcoll.costmodel import Pricer, carried_itemsize, native_as, packing_ps
from xcoll.errors import UnsupportedError
from xcoll.forced import forced_stages
from xcoll.loads import span_digits
from xcoll.natives import native_ps
from xcoll.plan import Candidate, Plan, Request, Stage
from xcoll.policy import Choice, Policy
from xcoll.roundoff import error_bound, is_inexact
from xcoll.topology import Topology
from xcoll.units import readable_time


@dataclass(frozen=True)
class _Option:
    name: str
    stages: tuple[Stage, ...]
    time_ps: int | None
    barred: str | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        return (self.time_ps or 0, len(self.stages), self.name)


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
        deterministic sum and no plan can give one.

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
    algorithm, deterministic = policy.algorithm, policy.deterministic
    plain = Policy(algorithm=algorithm, deterministic=deterministic, min_bytes=policy.min_bytes)
    return _plan(request, topology, plain, strict or policy.by_name)


@functools.lru_cache(maxsize=4096)
def _plan(request: Request, topology: Topology, policy: Policy, strict: bool) -> Plan:
    _check_axes(request, topology)
    forced = policy.forced(request.collective)
    if forced is not None:
        check_choice(f"plan({request.collective})", forced)
    make = _Maker(request, topology)
    if request.num_ranks == 1:
        return make.native("a single rank: nothing to communicate")
    if request.num_elements == 0:
        return make.native("empty payload")
    if _needs_order(request, policy):
        return make.deterministic(forced)
    if request.num_bytes < policy.min_bytes:
        return make.native(f"smaller than the policy's min_bytes={policy.min_bytes}")
    if forced is not None:
        return make.forced(forced, strict)
    if not topology.is_known:
        return make.native(f"unknown topology: {topology.why_unknown}")
    return make.best()


def _check_axes(request: Request, topology: Topology) -> None:
    sizes = topology.axis_sizes
    wanted = dict(zip(request.axes, request.axis_sizes, strict=True))
    if {axis: sizes.get(axis) for axis in wanted} != wanted:
        raise ValueError(
            f"plan({request.collective}): the topology does not match the mesh: topology"
            f" {topology.name!r} has axes {sizes}, the collective goes over {wanted}; give the"
            " topology the mesh's axes, for example Topology.parse(text, axes=dict(mesh.shape))"
        )


def _needs_order(request: Request, policy: Policy) -> bool:
    combines = request.op in ("sum", "prod") and is_inexact(request.dtype)
    return policy.deterministic and combines


class _Maker:
    """Makes the plan of one request."""

    def __init__(self, request: Request, topology: Topology):
        self.request = request
        self.topology = topology
        self.span = whole_span(request)
        self.summed = request.itemsize
        if topology.device is not None and topology.device.num_hosts > 1:
            # Between hosts every byte counts. Inside one, time is not known to go by the width.
            self.summed = carried_itemsize(request.dtype, request.itemsize, topology.platform)
        self.pricer = Pricer(topology, request.itemsize, self.summed) if topology.is_known else None
        stage = Stage(request.collective, self.span, NATIVE)
        self.native_option = _Option("native", (stage,), self._native_ps())

    def native(self, reason: str, others: Sequence[_Option] = ()) -> Plan:
        return self._made(self.native_option, reason, others)

    def best(self) -> Plan:
        """Chooses freely."""
        options = [
            _Option(name, stages, self._price(stages), barred(self.request, self.topology, stages))
            for name, stages in (
                *whole(self.request, self.topology),
                *hierarchies(self.request, self.topology, self._price),
            )
        ]
        options.sort(key=lambda option: option.order)
        native = self.native_option.time_ps
        assert native is not None
        allowed = [option for option in options if option.barred is None]
        if not allowed:
            return self.native("no algorithm does this", options)
        enough = [o for o in allowed if (o.time_ps or 0) * 100 <= native * (100 - GAIN_PERCENT)]
        first = _least_departure(enough) if enough else allowed[0]
        assert first.time_ps is not None
        if not enough:
            gain = 100 - 100 * first.time_ps // native if native else 0
            how = f"{gain} % faster" if gain > 0 else "not faster"
            return self.native(
                f"the best decomposition, {first.name}, is predicted {how}; {GAIN_PERCENT} % are"
                " needed",
                options,
            )
        gain = 100 - 100 * first.time_ps // native
        times = f"{readable_time(first.time_ps)} against {readable_time(native)}"
        reason = f"predicted {gain} % faster than native: {times}"
        return self._made(first, reason, [self.native_option, *options])

    def forced(self, choice: Choice, strict: bool) -> Plan:
        """Takes what the policy names, or says why that is not possible."""
        if choice == NATIVE:
            return self.native("the policy names native")
        found = forced_stages(self.request, self.topology, choice)
        if isinstance(found, str):
            if strict:
                raise UnsupportedError(
                    f"{self.request.collective} over {self.request.axes}: the policy names"
                    f" {choice}, but {found}"
                )
            return self.native(f"kept native: {found}")
        option = self._option(choice, found)
        note = f", although {option.barred}" if option.barred else ""
        return self._made(option, f"the policy names {choice}{note}", [self.native_option])

    def deterministic(self, forced: Choice | None) -> Plan:
        """Takes a plan that sums in rank order: direct over all ranks at once."""
        request = self.request
        call = f"{request.collective} over {request.axes}, Policy(deterministic=True)"
        if forced is not None and forced.name != "direct":
            raise ValueError(
                f"{call}: the policy also names {forced}, which does not sum in rank order; only"
                " direct does"
            )
        options = (
            [forced] if forced is not None else [Choice("direct", (("shots", s),)) for s in (2, 1)]
        )
        if does(options[0], request.collective, request, self.topology) is not None:
            raise ValueError(
                f"{call}: no algorithm does a {request.collective} in rank order; direct does"
                f" {', '.join(ALGORITHMS['direct'].collectives)}"
            )
        if request.collective != "all_reduce":
            options = options[:1]
        made = [self._option(o, (Stage(request.collective, self.span, o),)) for o in options]
        if made[0].time_ps is not None:
            made.sort(key=lambda option: option.order)
        reason = "the policy wants sums in rank order"
        return self._made(made[0], reason, [self.native_option, *made[1:]])

    def _option(self, choice: Choice, stages: tuple[Stage, ...]) -> _Option:
        name = str(choice)
        if len(stages) > 1:
            half = len(stages) // 2 + 1 if self.request.collective == "all_reduce" else len(stages)
            parts = [s.choice for s in stages[:half]]
            if self.request.collective == "all_gather":
                parts.reverse()
            name = f"hierarchical({', '.join(map(str, parts))})"
        time = self._price(stages) if self.topology.is_known else None
        return _Option(name, stages, time, barred(self.request, self.topology, stages))

    def _price(self, stages: Sequence[Stage]) -> int:
        request = self.request
        assert self.pricer is not None
        time = self.pricer.plan_ps(request.collective, stages, request.num_elements)
        packed = len(request.shapes) > 1
        return time + (packing_ps(self.pricer.device, request.num_bytes) if packed else 0)

    def _native_ps(self) -> int | None:
        if self.topology.device is None:
            return None
        collective = native_as(self.request.collective, self.topology.device.platform)
        digits = span_digits(self.topology, self.span)
        # XLA's combiner makes one operation of a group.
        num_bytes = self.request.num_elements * self.summed
        return native_ps(self.topology.device, digits, collective, num_bytes)

    def _made(self, option: _Option, reason: str, others: Sequence[_Option]) -> Plan:
        request, topology = self.request, self.topology
        return Plan(
            request=request,
            stages=option.stages,
            name=option.name,
            predicted_time_ps=option.time_ps,
            native_time_ps=self.native_option.time_ps,
            wire_bytes=wire_bytes(request, option.stages, topology),
            operations=operations(request, option.stages, topology),
            error_bound=error_bound(request, option.stages),
            candidates=tuple(self._beaten(o, option) for o in others if o is not option),
            reason=reason,
            topology=topology.fingerprint,
        )

    def _beaten(self, other: _Option, chosen: _Option) -> Candidate:
        reason = other.barred
        if reason is None and None not in (other.time_ps, chosen.time_ps):
            assert other.time_ps is not None and chosen.time_ps is not None
            if other.time_ps >= chosen.time_ps:
                slower, faster = readable_time(other.time_ps), readable_time(chosen.time_ps)
                reason = f"predicted {slower}, the chosen plan {faster}"
            elif chosen.stages[0].choice == NATIVE and len(chosen.stages) == 1:
                reason = f"predicted faster than native by less than {GAIN_PERCENT} %"
            elif (other.time_ps or 0) * 100 > chosen.time_ps * (100 - GAIN_PERCENT):
                reason = f"faster by less than {GAIN_PERCENT} %, and leaves less to XLA"
            else:
                reason = "the policy wants another"
        return Candidate(
            other.name,
            other.time_ps,
            wire_bytes(self.request, other.stages, self.topology),
            reason or "not priced: the topology is unknown",
        )


def _least_departure(options: Sequence[_Option]) -> _Option:
    """Returns the fastest option, or one about as fast that leaves more to XLA.

    Replacing XLA's collective at one level of a hierarchy has to be worth as much as replacing it
    altogether.
    """
    fastest = min(option.time_ps or 0 for option in options)
    close = [o for o in options if (o.time_ps or 0) * (100 - GAIN_PERCENT) <= fastest * 100]
    return min(close, key=lambda o: (sum(s.choice != NATIVE for s in o.stages), o.order))
