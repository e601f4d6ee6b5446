"""Prices stages of plans, in integer picoseconds.

The time of a plan is the sum over its stages, and that of a stage the sum over the phases of
the algorithm's closed form: what it costs to start the step, the latency of the hops, the bytes
on the busiest link over its bandwidth, and the local work. Nothing is assumed to overlap except
what one step holds (its lanes). Every division is of integers, so that no plan depends on the
processor that priced it.

References:
  Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994: latency and
  bandwidth. Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005: the closed forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xcoll.algorithms import closed_form
from xcoll.hardware import figure
from xcoll.loads import loads, span_digits
from xcoll.natives import native_ps, transfer_ps
from xcoll.plan import Stage
from xcoll.policy import Choice
from xcoll.schedule import ClosedForm, Phase, slot_elements
from xcoll.topology import Device, Digit, Topology

NATIVE_AS = {
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "all_to_all",
}
"""What XLA runs for the collectives that jax.lax lacks (`xcoll.composites`)."""


@dataclass(frozen=True)
class Operand:
    """The payload that enters a stage, as the lowering cuts and pads it.

    Attributes:
      num_elements: elements on each rank.
      slot_elements: elements of one slot of the stage's schedule.
    """

    num_elements: int
    slot_elements: int


def operands(collective: str, stages: Sequence[Stage], num_elements: int) -> list[Operand]:
    """Returns the operand of each stage of a plan.

    Args:
      collective: what the plan as a whole does.
      stages: the plan's stages.
      num_elements: elements of the plan's operand on each rank.
    """
    out: list[Operand] = []
    entered: list[int] = []
    for stage in stages:
        ranks = stage.span.num_ranks
        num_slots = stage_form(stage).num_slots
        share = max(1, num_slots // ranks)
        part = stage.collective
        if part in ("all_gather", "gather"):
            slot, left = slot_elements(num_elements, share), num_elements * ranks
            if collective == "all_reduce" and entered:
                left = entered.pop()
        elif part in ("all_reduce", "broadcast", "reduce"):
            slots = 1 if enters_own(stage.choice, part) else num_slots
            slot, left = slot_elements(num_elements, slots), num_elements
        elif part == "reduce_scatter" and collective == "all_reduce":
            # Inside an all-reduce the shares need not be whole rows: any cut will do.
            entered.append(num_elements)
            slot = slot_elements(num_elements, num_slots)
            left = slot * share
        else:
            row = num_elements // ranks
            slot = slot_elements(row, share)
            left = num_elements if part == "all_to_all" else row
        out.append(Operand(num_elements, slot))
        num_elements = left
    return out


def stage_form(stage: Stage) -> ClosedForm:
    """Returns the closed form of a stage's algorithm."""
    if stage.choice.name == "native" and stage.collective in NATIVE_AS:
        as_collective = NATIVE_AS[stage.collective]
        return closed_form(stage.choice, as_collective, stage.span.num_ranks)
    return closed_form(stage.choice, stage.collective, stage.span.num_ranks, dims=stage.dims)


def enters_own(choice: Choice, collective: str) -> bool:
    """Whether an all-reduce gathers whole payloads (direct, one shot)."""
    shots = dict(choice.options).get("shots", 2)
    return collective == "all_reduce" and choice.name == "direct" and shots == 1


def plan_ps(
    topology: Topology, collective: str, stages: Sequence[Stage], num_elements: int, itemsize: int
) -> int:
    """Returns the predicted time of a plan.

    Args:
      topology: a known topology.
      collective: what the plan as a whole does.
      stages: the plan's stages.
      num_elements: elements of the operand on each rank.
      itemsize: bytes of an element.
    """
    return sum(
        stage_ps(topology, stage, operand, itemsize)
        for stage, operand in zip(stages, operands(collective, stages, num_elements), strict=True)
    )


def stage_ps(topology: Topology, stage: Stage, operand: Operand, itemsize: int) -> int:
    """Returns the predicted time of one stage.

    Args:
      topology: a known topology.
      stage: the stage.
      operand: its operand on each rank.
      itemsize: bytes of an element.
    """
    device = topology.device
    assert device is not None
    digits = span_digits(topology, stage.span)
    if stage.choice.name == "native":
        collective = NATIVE_AS.get(stage.collective, stage.collective)
        return native_ps(device, digits, collective, operand.num_elements * itemsize)
    slot_bytes = operand.slot_elements * itemsize
    return sum(
        phase_ps(device, digits, phase, slot_bytes)
        for whole in stage_form(stage).phases
        for phase in _by_child(whole)
    )


def _by_child(phase: Phase) -> Iterator[Phase]:
    """Writes a level of a k-nomial tree out: its c-th children are c distances away."""
    children = phase.steps * phase.lanes
    if phase.pattern != "sparse" or children == 1:
        yield phase
        return
    for child in range(1, children + 1):
        # Lanes of one step are priced one after another: what the parent sends is not parallel.
        yield replace(phase, steps=1, lanes=1, distance=child * phase.distance)


def packing_ps(device: Device, num_bytes: int) -> int:
    """Returns the time to put the sites of a group into one buffer, and to take them out."""
    return 2 * transfer_ps(num_bytes, device.copy_bytes_per_s)


def phase_ps(device: Device, digits: tuple[Digit, ...], phase: Phase, slot_bytes: int) -> int:
    """Returns the predicted time of a run of alike steps."""
    num_bytes = phase.slots * slot_bytes
    if phase.kind == "fold":
        return transfer_ps(num_bytes, device.copy_bytes_per_s)
    if phase.kind != "permute":
        return native_ps(device, digits, phase.kind, num_bytes)
    wire = latency = 0
    for load in loads(digits, phase):
        level = load.digit.level
        time = transfer_ps(load.messages * num_bytes, level.bandwidth_bytes_per_s)
        if device.platform == "cpu":
            time = time * _duplex(load.digit, phase) // 100
        wire = max(wire, time)
        latency = max(latency, load.hops * level.link.latency_ps)
    # Hosts copy every message, and start permutes one after another.
    starts, passes = (phase.lanes, 1) if device.platform == "cpu" else (1, 3 if phase.reduce else 2)
    work = transfer_ps(phase.lanes * num_bytes * passes, device.memory_bytes_per_s)
    return phase.steps * (starts * device.step_ps + latency + wire + work)


def _duplex(digit: Digit, phase: Phase) -> int:
    """Percent of a full-duplex transfer's time that Gloo takes between these hosts."""
    ranks = digit.stride * digit.level.size
    block = phase.block or ranks
    swaps = phase.pattern == "exchange" or (
        phase.pattern == "shift" and 2 * phase.distance == block and phase.distance >= digit.stride
    )
    return int(figure("cpu", "duplex_swap" if swaps else "duplex_ring"))
