"""Chooses a plan for a group of collectives: enumerate, price, choose, keep the reasons.

The same request, topology and policy give the same plan in every process: times are integers,
and ties go to the fewest stages, then to the name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from xcoll.accounting import error_bound, is_inexact, operations, wire_bytes
from xcoll.algorithms import ALGORITHMS, check_choice
from xcoll.candidates import (
    NATIVE,
    axis_spans,
    compose,
    does,
    hierarchies,
    span_of,
    whole,
    whole_span,
)
from xcoll.costmodel import NATIVE_AS, packing_ps, plan_ps
from xcoll.errors import UnsupportedError
from xcoll.loads import span_digits
from xcoll.natives import native_ps
from xcoll.plan import Candidate, Plan, Request, Span, Stage
from xcoll.policy import Choice, Policy
from xcoll.schedule import slot_elements
from xcoll.topology import Topology

GAIN_PERCENT = 10
"""A decomposition must be predicted this much faster than XLA's own collective."""

_MIN_TILES = 2048
"""Elements of two (8, 128) tiles: XLA:TPU turns smaller reduce-scatters into all-reduces."""


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
      topology: what the mesh lies on; None or an unknown one keeps everything native, except what the
        policy forces.
      policy: what is permitted or forced. ``where`` is the caller's business.
      strict: what a forced algorithm cannot do is an error; else it is kept native, with the reason.
        True whenever the policy forces algorithms by collective.

    Returns:
      The plan, with the candidates it beat.

    Raises:
      ValueError: the policy's algorithm or an option is unknown, or, if strict, cannot do this; the
        topology lacks an axis of the request, or has it in another size; the policy wants a
        deterministic sum and no plan can give one.

    Example:
      >>> from xcoll.topology import Topology
      >>> topology = Topology.parse("2*cpu:4@200Mbit", axes={"host": 2, "device": 4})
      >>> request = Request("all_reduce", "sum", ("host", "device"), (2, 4), "float32", 4, ((4194304,),))
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
            f" {topology.name!r} has axes {sizes}, the collective goes over {wanted}; give the topology the"
            " mesh's axes, for example Topology.parse(text, axes=dict(mesh.shape))"
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
        stage = Stage(request.collective, self.span, NATIVE)
        self.native_option = _Option("native", (stage,), self._native_ps())

    def native(self, reason: str, others: Sequence[_Option] = ()) -> Plan:
        return self._made(self.native_option, reason, others)

    def best(self) -> Plan:
        """Chooses freely."""
        options = [
            _Option(name, stages, self._price(stages), self._barred(stages))
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
        first = _least_departure(allowed)
        assert first.time_ps is not None
        if first.time_ps * 100 > native * (100 - GAIN_PERCENT):
            gain = 100 - 100 * first.time_ps // native if native else 0
            how = f"{gain} % faster" if gain > 0 else "not faster"
            return self.native(
                f"the best decomposition, {first.name}, is predicted {how}; {GAIN_PERCENT} % are needed",
                options,
            )
        gain = 100 - 100 * first.time_ps // native
        reason = (
            f"predicted {gain} % faster than native: {_ms(first.time_ps)} against {_ms(native)}"
        )
        return self._made(first, reason, [self.native_option, *options])

    def forced(self, choice: Choice, strict: bool) -> Plan:
        """Takes what the policy names, or says why that is not possible."""
        if choice == NATIVE:
            return self.native("the policy names native")
        found = self._stages(choice)
        if isinstance(found, str):
            if strict:
                raise UnsupportedError(
                    f"{self.request.collective} over {self.request.axes}: the policy names {choice}, but {found}"
                )
            return self.native(f"kept native: {found}")
        option = self._option(choice, found)
        return self._made(option, f"the policy names {choice}", [self.native_option])

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
        if does(options[0], request.collective, request.op) is not None:
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

    def _stages(self, choice: Choice) -> tuple[Stage, ...] | str:
        """Returns the stages of a forced choice, or why it cannot be done."""
        request = self.request
        segments = dict(choice.options).get("num_segments", 1)
        if choice.name == "hierarchical" and segments == 1:
            return self._hierarchy(choice)
        if (
            choice.name not in ALGORITHMS
            or request.collective not in ALGORITHMS[choice.name].collectives
        ):
            return does(choice, request.collective, request.op) or ""
        dims: tuple[int, ...] = ()
        if ALGORITHMS[choice.name].needs_dims:
            spans = self._levels()
            if len(spans) < 2:
                return f"{choice.name} needs two levels or axes, and there is one"
            dims = tuple(span.num_ranks for span in reversed(spans))
            if choice.name == "hierarchical" and len(dims) > 2:
                # The pipelined form knows two levels: the innermost, and everything around it.
                dims = (request.num_ranks // dims[-1], dims[-1])
        return (Stage(request.collective, self.span, choice, dims),)

    def _hierarchy(self, choice: Choice) -> tuple[Stage, ...] | str:
        request, spans = self.request, self._levels()
        if len(spans) < 2:
            return "hierarchical needs two levels, and there is one"
        if len(choice.levels) > len(spans):
            return f"{choice} has {len(choice.levels)} levels, and there are {len(spans)}"
        levels = [*choice.levels, *[NATIVE] * (len(spans) - len(choice.levels))]
        stages = compose(request.collective, spans, levels)
        if stages is None:
            return (
                f"hierarchical has no {request.collective}; it does all_reduce, reduce_scatter,"
                " all_gather, all_to_all"
            )
        for stage in stages:
            reason = does(stage.choice, stage.collective, request.op)
            if reason is not None:
                return reason
        return stages

    def _levels(self) -> tuple[Span, ...]:
        """Spans of the levels, innermost first: as the links are, or else one a mesh axis."""
        request, digits = self.request, self.topology.digits(self.request.axes)
        if not self.topology.is_known:
            return axis_spans(request)
        runs: list[list] = []
        for digit in digits:
            if runs and runs[-1][-1].level.link == digit.level.link:
                runs[-1].append(digit)
            else:
                runs.append([digit])
        if len(runs) > 1:
            return tuple(span_of(request, run) for run in runs)
        # All on the same kind of link: cut between mesh axes, if there are several.
        return axis_spans(request)

    def _option(self, choice: Choice, stages: tuple[Stage, ...]) -> _Option:
        name = str(choice)
        if len(stages) > 1:
            half = len(stages) // 2 + 1 if self.request.collective == "all_reduce" else len(stages)
            parts = [s.choice for s in stages[:half]]
            if self.request.collective == "all_gather":
                parts.reverse()
            name = f"hierarchical({', '.join(map(str, parts))})"
        time = self._price(stages) if self.topology.is_known else None
        return _Option(name, stages, time, self._barred(stages))

    def _price(self, stages: Sequence[Stage]) -> int:
        request = self.request
        assert self.topology.device is not None
        time = plan_ps(
            self.topology, request.collective, stages, request.num_elements, request.itemsize
        )
        packed = len(request.shapes) > 1
        return time + (packing_ps(self.topology.device, request.num_bytes) if packed else 0)

    def _native_ps(self) -> int | None:
        if self.topology.device is None:
            return None
        collective = NATIVE_AS.get(self.request.collective, self.request.collective)
        digits = span_digits(self.topology, self.span)
        # XLA's combiner makes one operation of a group.
        return native_ps(self.topology.device, digits, collective, self.request.num_bytes)

    def _barred(self, stages: Sequence[Stage]) -> str | None:
        if self.topology.platform != "tpu":
            return None
        elements = self.request.num_elements
        for stage in stages:
            if stage.collective != "reduce_scatter":
                break
            slot = slot_elements(elements, stage.span.num_ranks)
            if stage.choice == NATIVE and (slot < _MIN_TILES or slot % 1024):
                return (
                    f"XLA:TPU turns a reduce-scatter to {slot} elements (under two tiles) into an"
                    " all-reduce"
                )
            if stage.choice == NATIVE and self.request.itemsize == 1:
                return "XLA:TPU turns a reduce-scatter of 8-bit values into an all-reduce"
            elements = slot
        return None

    def _made(self, option: _Option, reason: str, others: Sequence[_Option]) -> Plan:
        request, topology = self.request, self.topology
        return Plan(
            request=request,
            stages=option.stages,
            name=option.name,
            predicted_time_ps=option.time_ps,
            native_time_ps=self.native_option.time_ps,
            wire_bytes=wire_bytes(request, option.stages),
            operations=operations(request, option.stages),
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
                reason = f"predicted {_ms(other.time_ps)}, the chosen plan {_ms(chosen.time_ps)}"
            elif chosen.stages[0].choice == NATIVE and len(chosen.stages) == 1:
                reason = f"predicted faster than native by less than {GAIN_PERCENT} %"
            elif (other.time_ps or 0) * 100 > chosen.time_ps * (100 - GAIN_PERCENT):
                reason = f"faster by less than {GAIN_PERCENT} %, and leaves less to XLA"
            else:
                reason = "the policy wants another"
        return Candidate(
            other.name,
            other.time_ps,
            wire_bytes(self.request, other.stages),
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


def _ms(time_ps: int) -> str:
    """Reads picoseconds as people do.

    >>> _ms(743_000_000_000), _ms(12_500_000)
    ('743 ms', '12.5 us')
    """
    for unit, scale in (("s", 10**12), ("ms", 10**9), ("us", 10**6)):
        if time_ps >= scale:
            return f"{time_ps / scale:.3g} {unit}"
    return f"{time_ps / 1000:.3g} ns"
