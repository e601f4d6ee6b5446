"""Prices the permutes of an algorithm: runs of steps with the same traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xcoll.hardware import figure
from xcoll.loads import OnLink, loads, twin_tree_loads
from xcoll.natives import passed_ps, transfer_ps
from xcoll.plan import Stage
from xcoll.policy import Choice
from xcoll.schedule import ClosedForm, Phase
from xcoll.topology import Device, Digit

_PAIRWISE_MAX_RANKS = 256
"""Up to this many ranks, every turn of a pairwise exchange is priced by itself."""


@dataclass(frozen=True)
class Run:
    """Steps that are alike.

    Attributes:
      steps: how many.
      parts: what moves in each of them at the same time.
    """

    steps: int
    parts: tuple[Phase, ...]


def runs(stage: Stage, form: ClosedForm) -> Iterator[Run]:
    """Yields the permutes of a stage.

    Closed forms keep one distance for all children of a k-nomial tree, for all turns of a pairwise
    exchange, and for all axes of a torus; they are written out here.
    """
    name, ranks = stage.choice.name, stage.span.num_ranks
    if name == "torus":
        yield from _torus(stage.collective, stage.dims)
        return
    for phase in form.phases:
        if phase.kind != "permute":
            continue
        if name == "pairwise":
            if ranks > _PAIRWISE_MAX_RANKS:
                # Every step is priced like the farthest.
                yield Run(phase.steps, (replace(phase, distance=ranks // 2),))
                continue
            for distance in range(1, ranks):
                yield Run(1, (replace(phase, distance=distance),))
        elif name == "tree":
            radix = dict(stage.choice.options).get("radix", 2)
            children = tuple(
                replace(
                    phase,
                    steps=1,
                    lanes=1,
                    distance=child * phase.distance,
                    block=radix * phase.distance,
                )
                for child in range(1, phase.steps * phase.lanes + 1)
            )
            if phase.lanes > 1:
                yield Run(phase.steps, children)
            else:
                yield from (Run(1, (child,)) for child in children)
        else:
            yield Run(phase.steps, (phase,))


def _torus(collective: str, dims: tuple[int, ...]) -> Iterator[Run]:
    """Yields the runs of rings over several axes, each part of the payload on its own order."""
    axes = [axis for axis, size in enumerate(dims) if size > 1]
    ends: list[list[tuple[int, Phase]]] = []
    for first in range(len(axes)):
        rest, end, phases = math.prod(dims), 0, []
        for axis in axes[first:] + axes[:first]:
            rest //= dims[axis]
            end += dims[axis] - 1
            stride = math.prod(dims[axis + 1 :])
            phases.append((end, Phase(1, rest, distance=stride, block=stride * dims[axis])))
        ends.append(phases)
    scatters: list[Run] = []
    before = 0
    for end in sorted({end for phases in ends for end, _ in phases}):
        parts = tuple(next(p for last, p in phases if last >= end) for phases in ends)
        scatters.append(Run(end - before, parts))
        before = end
    if collective != "all_gather":
        for run in scatters:
            yield Run(run.steps, tuple(replace(part, reduce=True) for part in run.parts))
    if collective != "reduce_scatter":
        yield from reversed(scatters)


@dataclass(frozen=True)
class Load:
    """What a run of steps takes, for any size of a slot.

    Attributes:
      steps: how many.
      fixed_ps: start and latency of each.
      wires: for each level, slots on its busiest link, its bytes a second, and percent of the time
        that a full-duplex transfer takes.
      worked_slots: slots that pass the device's memory.
    """

    steps: int
    fixed_ps: int
    wires: tuple[tuple[int, int, int], ...]
    worked_slots: int

    def time_ps(self, device: Device, slot_bytes: int) -> int:
        """Returns the predicted time of all steps."""
        wire = 0
        for slots, bandwidth, percent in self.wires:
            wire = max(wire, transfer_ps(slots * slot_bytes, bandwidth) * percent // 100)
        work = passed_ps(device, self.worked_slots * slot_bytes)
        return self.steps * (self.fixed_ps + wire + work)


def load_of(device: Device, digits: tuple[Digit, ...], run: Run, stage: Stage) -> Load:
    """Returns what a run of steps takes.

    Args:
      device: the devices.
      digits: the levels the ranks lie on, innermost first.
      run: the steps.
      stage: what they belong to.
    """
    choice, beside = stage.choice, stage.beside
    turns = 1
    ranks = math.prod(digit.level.size for digit in digits)
    sent: dict[int, int] = {}
    percent: dict[int, int] = {}
    latency = 0
    # Levels are told apart by their stride among the ranks.
    by_stride = {digit.stride: digit for digit in digits}
    for part in run.parts:
        busiest: dict[int, int] = {}
        hops: dict[int, int] = {}
        for on_link in _traffic(choice, digits, part):
            at = on_link.digit.stride
            busiest[at] = max(busiest.get(at, 0), on_link.messages)
            hops[at] = max(hops.get(at, 0), on_link.hops)
        along = 0
        for at, messages in busiest.items():
            digit = by_stride[at]
            link = digit.level.link
            sent[at] = sent.get(at, 0) + messages * part.slots
            swap = choice.name == "double_tree" or _is_swap(digit, part, ranks)
            duplex = link.swap_percent if swap else link.unlike_percent
            if swap and beside is not None:
                # Both directions are busy in each turn, each by half of the ranks, rounded up.
                turns, half = 2, beside.num_ranks - beside.num_ranks // 2
                duplex = link.unlike_percent * 2 * half // beside.num_ranks
            percent[at] = max(percent.get(at, 0), duplex)
            if link.network == "torus":
                # A message turns from one dimension into the next.
                along += hops[at] * link.latency_ps
            else:
                latency = max(latency, hops[at] * link.latency_ps)
        latency = max(latency, along)
    lanes = sum(part.lanes for part in run.parts)
    slots = sum(part.lanes * part.slots for part in run.parts)
    if device.platform == "cpu":
        # Hosts copy every message, and start permutes one after another.
        starts, passes = lanes * turns, 1
    else:
        starts, passes = 1, 3 if run.parts[0].reduce else 2
    return Load(
        steps=run.steps,
        fixed_ps=starts * _step_ps(device, run) + start_ps(device) + latency,
        wires=tuple(
            (slots, by_stride[at].level.bandwidth_bytes_per_s, percent[at])
            for at, slots in sent.items()
        ),
        worked_slots=slots * passes,
    )


def _step_ps(device: Device, run: Run) -> int:
    """Returns the start of a step: where few devices send, little more than that of a lone one."""
    step = device.step_ps
    if not 0 < device.lone_step_ps < step or any(part.pattern != "sparse" for part in run.parts):
        return step
    # In every block so many ranks, one sends.
    block = min(max(2 * part.distance, part.block) for part in run.parts)
    return device.lone_step_ps + (step - device.lone_step_ps) // block


def _traffic(choice: Choice, digits: tuple[Digit, ...], part: Phase) -> Iterator[OnLink]:
    return twin_tree_loads(digits) if choice.name == "double_tree" else loads(digits, part)


def start_ps(device: Device) -> int:
    """Returns what a permute costs beyond the start of an operation: NCCL's own start on a GPU."""
    return int(figure("nccl", "base_ring")[0]) * 1000 if device.platform == "gpu" else 0


def _is_swap(digit: Digit, phase: Phase, ranks: int) -> bool:
    """Whether hosts exchange over one connection, which Gloo does one way at a time.

    Some edges of a double tree do as well; they are each other's reverse.
    """
    if phase.pattern == "shift":
        block = phase.block or digit.stride * digit.level.size
        return 2 * phase.distance == block and phase.distance >= digit.stride
    # What the ranks beyond a power of two hand over goes one way.
    return phase.pattern == "exchange" and 2 * phase.distance <= ranks
