"""Options of the planner: stages with their price, bound and name, and the plan made of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xcoll.accounting import operations, wire_bytes
from xcoll.candidates import (
    GAIN_PERCENT,
    NATIVE,
    START_GAIN_PERCENT,
    barred,
    describe,
    margin_percent,
    whole_span,
)
from xcoll.compress import kernels_for
from xcoll.costmodel import (
    Pricer,
    carried,
    carried_itemsize,
    native_as,
    packing_ps,
    payload_elements,
)
from xcoll.loads import span_digits
from xcoll.natives import fresh_ps, native_on, result_bytes, transfer_ps
from xcoll.plan import Candidate, Plan, Request, Stage
from xcoll.policy import Policy
from xcoll.precision import max_error
from xcoll.regrouping import moved_elements
from xcoll.roundoff import error_bound
from xcoll.sharing import shared
from xcoll.topology import Topology
from xcoll.units import readable_time


@dataclass(frozen=True)
class Option:
    """A plan that could be: not priced (None) where the topology is unknown."""

    name: str
    stages: tuple[Stage, ...]
    time_ps: int | None
    barred: str | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        """The total order in which the best comes first."""
        return (self.time_ps or 0, len(self.stages), self.name)

    @property
    def is_encoded(self) -> bool:
        """Whether a codec is in it."""
        return any(stage.codec is not None for stage in self.stages)


class Options:
    """Prices the options of one request, and makes the plan of the one that is chosen."""

    def __init__(self, request: Request, topology: Topology, policy: Policy):
        self.request = request
        self.topology = topology
        self.policy = policy
        self._pricers: dict[str, Pricer] = {}
        self._shared: dict[tuple[Stage, ...], tuple[Stage, ...]] = {}
        stage = Stage(request.collective, whole_span(request), NATIVE)
        self.native = Option("native", (stage,), self._native_ps(request))
        self._start_ps = self._measured_start_ps()
        self._is_start = (self.native.time_ps or 0) < 3 * self._start_ps
        self.gain_percent = START_GAIN_PERCENT if self._is_start else GAIN_PERCENT

    def option(self, stages: tuple[Stage, ...], where: str = "") -> Option:
        """Returns the option of some stages.

        Args:
          stages: what to do.
          where: what the name needs besides, of several plans that read alike.
        """
        stages = self._sharing(stages)
        time = self.price(stages) if self.topology.is_known else None
        why_not = barred(self.request, self.topology, stages) or self._over_budget(stages)
        return Option(describe(self.request.collective, stages) + where, stages, time, why_not)

    def price(self, stages: Sequence[Stage]) -> int:
        """Returns the predicted time of a plan, packing included."""
        stages = self._sharing(tuple(stages))
        request = carried(self.request, stages)
        device = self.topology.device
        assert device is not None
        elements = payload_elements(request, stages)
        time = self._pricer(request).plan_ps(request.collective, stages, elements)
        if len(request.shapes) > 1 or elements > request.num_elements:
            time += packing_ps(device, self.request.num_bytes)
        moved = moved_elements(request, stages, elements)
        time += transfer_ps(moved * request.itemsize, device.copy_bytes_per_s)
        own = self.request
        time += fresh_ps(device, result_bytes(own.collective, own.num_bytes, own.num_ranks))
        if device.platform == "cpu" and self._is_start and _is_mixed(stages):
            # Small collectives and permutes of Gloo hold each other up, by about as much as
            # native's start; a stage's own curve has none of it.
            time += self._start_ps
        if request is not self.request:
            # The largest magnitude, the integers, and back.
            passes = 3 * self.request.num_elements * 4
            time += transfer_ps(passes, device.copy_bytes_per_s)
            span = self.native.stages[0].span
            time += native_on(
                self.topology, span, span_digits(self.topology, span), "all_reduce", 4
            )
        return time

    def _pricer(self, request: Request) -> Pricer:
        if request.dtype not in self._pricers:
            summed = self._summed_itemsize(request)
            self._pricers[request.dtype] = Pricer(self.topology, request.itemsize, summed)
        return self._pricers[request.dtype]

    def _sharing(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """Returns the stages as they share slow links (`xcoll.sharing`)."""
        if not self.topology.is_known:
            return stages
        if stages not in self._shared:
            request = carried(self.request, stages)
            price = self._pricer(request).stage_ps
            made = shared(request, self.topology, stages, price)
            self._shared[stages] = self._shared[made] = made
        return self._shared[stages]

    def bound(self, stages: Sequence[Stage]) -> float:
        """Returns the bound on a plan's error (`xcoll.precision`)."""
        return max_error(self.request, stages)

    def _over_budget(self, stages: Sequence[Stage]) -> str | None:
        budget = self.policy.max_error
        if budget is None or (bound := self.bound(stages)) <= budget:
            return None
        return f"its error bound, {bound:.3g}, is over the policy's max_error={budget:g}"

    def _summed_itemsize(self, request: Request) -> int:
        if self.topology.device is not None and self.topology.device.num_hosts > 1:
            # Between hosts every byte counts. Inside one, time is not known to go by the width.
            return carried_itemsize(request.dtype, request.itemsize, self.topology.platform)
        return request.itemsize

    def _native_ps(self, request: Request) -> int | None:
        if self.topology.device is None:
            return None
        collective = native_as(request.collective, self.topology.device.platform)
        span = whole_span(request)
        # XLA's combiner makes one operation of a group.
        num_bytes = request.num_elements * self._summed_itemsize(request)
        digits = span_digits(self.topology, span)
        return native_on(self.topology, span, digits, collective, num_bytes, at_best=True)

    def _measured_start_ps(self) -> int:
        """Returns what native was measured to take for next to nothing; 0 where it was not."""
        if self.topology.device is None or not self.topology.measured:
            return 0
        collective = native_as(self.request.collective, self.topology.device.platform)
        curve = self.topology.curve(collective, self.request.axes)
        return 0 if curve is None else curve.points[0][1]

    def made(self, option: Option, reason: str, others: Sequence[Option] = ()) -> Plan:
        """Returns the plan of an option, with the others as the candidates that it beat."""
        request, topology = self.request, self.topology
        return Plan(
            request=request,
            stages=option.stages,
            name=option.name,
            predicted_time_ps=option.time_ps,
            native_time_ps=self.native.time_ps,
            wire_bytes=wire_bytes(request, option.stages, topology),
            operations=operations(request, option.stages, topology),
            error_bound=error_bound(request, option.stages),
            max_error=self.bound(option.stages),
            kernels=kernels_for(request, option.stages, self.policy),
            candidates=tuple(self._beaten(o, option) for o in others if o is not option),
            reason=reason,
            topology=topology.fingerprint,
        )

    def _beaten(self, other: Option, chosen: Option) -> Candidate:
        reason = other.barred
        if reason is None and None not in (other.time_ps, chosen.time_ps):
            assert other.time_ps is not None and chosen.time_ps is not None
            if other.time_ps >= chosen.time_ps:
                slower, faster = readable_time(other.time_ps), readable_time(chosen.time_ps)
                reason = f"predicted {slower}, the chosen plan {faster}"
            elif chosen is self.native:
                reason = f"predicted faster than native by less than {self.gain_percent} %"
            elif (gain := self._too_little(other, chosen)) is not None:
                reason = gain
            else:
                reason = "the policy wants another"
        return Candidate(
            other.name,
            other.time_ps,
            wire_bytes(self.request, other.stages, self.topology),
            reason or "not priced: the topology is unknown",
        )

    def _too_little(self, other: Option, chosen: Option) -> str | None:
        """Returns why an option's gain over the chosen one is no reason to take it, or None."""
        assert other.time_ps is not None and chosen.time_ps is not None
        costs_precision = other.is_encoded and not chosen.is_encoded
        percent = GAIN_PERCENT if costs_precision else margin_percent(self.topology)
        if other.time_ps * 100 <= chosen.time_ps * (100 - percent):
            return None
        price = "costs precision" if costs_precision else "leaves less to XLA"
        return f"faster by less than {percent} %, and {price}"


def _is_mixed(stages: Sequence[Stage]) -> bool:
    """Whether some stages are of permutes, and some are collectives of XLA's."""
    return len({stage.is_of_permutes for stage in stages}) > 1


def least_departure(options: Sequence[Option], margin: int = GAIN_PERCENT) -> Option:
    """Returns the fastest option, or one about as fast that leaves more to XLA.

    Replacing XLA's collective at one level of a hierarchy has to be worth the margin; and a codec
    has to make a plan faster by `GAIN_PERCENT` than doing without.

    Args:
      options: priced ones.
      margin: percent (`xcoll.candidates.margin_percent`).
    """
    fastest = min(option.time_ps or 0 for option in options)
    near = [o for o in options if (o.time_ps or 0) * (100 - GAIN_PERCENT) <= fastest * 100]
    pool = [o for o in near if not o.is_encoded] or near
    fastest = min(option.time_ps or 0 for option in pool)
    close = [o for o in pool if (o.time_ps or 0) * (100 - margin) <= fastest * 100]

    def departure(option: Option) -> tuple[int, tuple[int, int, str]]:
        replaced = sum(stage.choice != NATIVE for stage in option.stages)
        return replaced, option.order

    return min(close, key=departure)
