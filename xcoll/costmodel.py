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

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xcoll.algorithms import ALGORITHMS, build, closed_form
from xcoll.hardware import figure
from xcoll.loads import Load, loads, span_digits, twin_tree_loads
from xcoll.natives import native_ps, transfer_ps
from xcoll.plan import Span, Stage
from xcoll.policy import Choice
from xcoll.schedule import ClosedForm, Phase, ShuffleStep, slot_elements
from xcoll.topology import Device, Digit, Topology

_PAIRWISE_MAX_RANKS = 256
"""Up to this many ranks, every turn of a pairwise exchange is priced by itself."""

NATIVE_AS = {
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "all_to_all",
}
"""What stands for the collectives that jax.lax lacks (`xcoll.composites`); on a GPU, XLA has a
broadcast."""


def native_as(collective: str, platform: str) -> str:
    """Returns what XLA runs for a collective: itself, or what stands for it."""
    if collective == "broadcast" and platform == "gpu":
        return collective
    return NATIVE_AS.get(collective, collective)


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


class Pricer:
    """Prices plans on a topology, each stage once.

    Args:
      topology: a known topology.
      itemsize: bytes of an element.
    """

    def __init__(self, topology: Topology, itemsize: int):
        assert topology.device is not None
        self.topology = topology
        self.device = topology.device
        self.itemsize = itemsize
        self._digits: dict[Span, tuple[Digit, ...]] = {}
        self._stages: dict[tuple[Stage, Operand], int] = {}

    def plan_ps(self, collective: str, stages: Sequence[Stage], num_elements: int) -> int:
        """Returns the predicted time of a plan.

        Args:
          collective: what the plan as a whole does.
          stages: the plan's stages.
          num_elements: elements of the operand on each rank.
        """
        cut = operands(collective, stages, num_elements)
        return sum(self.stage_ps(stage, o) for stage, o in zip(stages, cut, strict=True))

    def stage_ps(self, stage: Stage, operand: Operand) -> int:
        """Returns the predicted time of one stage on its operand."""
        key = (stage, operand)
        if key not in self._stages:
            self._stages[key] = self._stage_ps(stage, operand)
        return self._stages[key]

    def _stage_ps(self, stage: Stage, operand: Operand) -> int:
        device = self.device
        digits = self._digits.get(stage.span)
        if digits is None:
            digits = self._digits[stage.span] = span_digits(self.topology, stage.span)
        if stage.choice.name == "native":
            collective = native_as(stage.collective, device.platform)
            return native_ps(device, digits, collective, operand.num_elements * self.itemsize)
        slot_bytes = operand.slot_elements * self.itemsize
        form = stage_form(stage)
        local = _shuffles(stage.choice, stage.collective) * form.num_slots * slot_bytes
        return transfer_ps(local, device.copy_bytes_per_s) + sum(
            phase_ps(device, digits, stage.choice, phase, slot_bytes) for phase in form.phases
        )


@functools.cache
def _shuffles(choice: Choice, collective: str) -> int:
    """Returns how many local passes over the buffer an algorithm makes, for any number of ranks."""
    if ALGORITHMS[choice.name].needs_dims:
        return 0
    return sum(isinstance(step, ShuffleStep) for step in build(choice, collective, 3).steps)


def packing_ps(device: Device, num_bytes: int) -> int:
    """Returns the time to put the sites of a group into one buffer, and to take them out."""
    return 2 * transfer_ps(num_bytes, device.copy_bytes_per_s)


def phase_ps(
    device: Device, digits: tuple[Digit, ...], choice: Choice, phase: Phase, slot_bytes: int
) -> int:
    """Returns the predicted time of a run of alike steps of an algorithm."""
    num_bytes = phase.slots * slot_bytes
    if phase.kind == "fold":
        return transfer_ps(num_bytes, device.copy_bytes_per_s)
    if phase.kind != "permute":
        return native_ps(device, digits, phase.kind, num_bytes)
    # Hosts copy every message, and start permutes one after another.
    starts, passes = (phase.lanes, 1) if device.platform == "cpu" else (1, 3 if phase.reduce else 2)
    work = transfer_ps(phase.lanes * num_bytes * passes, device.memory_bytes_per_s)
    time = phase.steps * (starts * device.step_ps + work)
    ranks = math.prod(digit.level.size for digit in digits)
    if choice.name == "double_tree":
        # Some edges of the two trees are each other's reverse.
        swap = replace(phase, pattern="exchange", distance=1)
        on_links = list(twin_tree_loads(digits))
        return time + phase.steps * _links_ps(device, on_links, (swap,), num_bytes, ranks)
    for count, parts in _written_out(choice, phase, ranks):
        on_links = [load for part in parts for load in loads(digits, part)]
        time += count * _links_ps(device, on_links, parts, num_bytes, ranks)
    return time


def _written_out(
    choice: Choice, phase: Phase, ranks: int
) -> Iterator[tuple[int, tuple[Phase, ...]]]:
    """Yields how many steps of a phase have the same traffic, and that traffic, summed.

    The closed forms keep one distance for all children of a k-nomial tree, and for all turns of a
    pairwise exchange.
    """
    if choice.name == "pairwise":
        # Beyond that, every step is priced like the farthest.
        every = range(1, ranks) if ranks <= _PAIRWISE_MAX_RANKS else [ranks // 2] * phase.steps
        for distance, steps in Counter(every).items():
            yield steps, (replace(phase, distance=distance),)
    elif choice.name == "tree":
        block = dict(choice.options).get("radix", 2) * phase.distance
        children = [
            replace(phase, lanes=1, distance=child * phase.distance, block=block)
            for child in range(1, phase.steps * phase.lanes + 1)
        ]
        if phase.lanes > 1:
            yield phase.steps, tuple(children)
        else:
            yield from ((1, (child,)) for child in children)
    elif choice.name == "torus":
        # Each part is on an axis of its own, so that lanes do not share links.
        yield phase.steps, (replace(phase, lanes=1),)
    else:
        yield phase.steps, (phase,)


def _links_ps(
    device: Device, on_links: Sequence[Load], parts: Sequence[Phase], num_bytes: int, ranks: int
) -> int:
    """Returns the time of one step on its busiest level."""
    wire = across = along = 0
    for level in {load.digit.level.dimension: load.digit.level for load in on_links}.values():
        mine = [load for load in on_links if load.digit.level.dimension == level.dimension]
        messages: dict[Digit, int] = {}
        for load in mine:
            before = messages.get(load.digit, 0)
            together = before + load.messages if len(parts) > 1 else max(before, load.messages)
            messages[load.digit] = together
        time = transfer_ps(max(messages.values()) * num_bytes, level.bandwidth_bytes_per_s)
        if device.platform == "cpu":
            time = time * max(_duplex(mine[0].digit, part, ranks) for part in parts) // 100
        wire = max(wire, time)
        latency = max(load.hops for load in mine) * level.link.latency_ps
        if level.link.network == "torus":
            # A message turns from one dimension into the next.
            along += latency
        else:
            across = max(across, latency)
    return wire + max(across, along) + start_ps(device)


def start_ps(device: Device) -> int:
    """Returns what a permute costs beyond the start of an operation: NCCL's own start on a GPU."""
    return int(figure("nccl", "base_ring")[0]) * 1000 if device.platform == "gpu" else 0


def _duplex(digit: Digit, phase: Phase, ranks: int) -> int:
    """Percent of a full-duplex transfer's time that Gloo takes between these hosts."""
    # What the ranks beyond a power of two hand over goes one way.
    swaps = phase.pattern == "exchange" and 2 * phase.distance <= ranks
    if phase.pattern == "shift":
        block = phase.block or digit.stride * digit.level.size
        swaps = 2 * phase.distance == block and phase.distance >= digit.stride
    return int(figure("cpu", "duplex_swap" if swaps else "duplex_ring"))
