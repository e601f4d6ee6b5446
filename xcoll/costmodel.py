"""Prices stages of plans, in integer picoseconds.

The time of a plan is the sum over its stages, and that of a stage the sum over the phases of
the algorithm's closed form: what it costs to start the step, the latency of the hops, the bytes
on the busiest link over its bandwidth, and the local work. Nothing is assumed to overlap except
what one step holds (its lanes), and the codec's work on one chunk with the transfer of another.
Every division is of integers, so that no plan depends on the
processor that priced it.

References:
  Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994: latency and
  bandwidth. Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005: the closed forms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xcoll.algorithms import ALGORITHMS, build, closed_form
from xcoll.loads import span_digits
from xcoll.local_work import coding_ps
from xcoll.natives import fresh_ps, native_on, transfer_ps
from xcoll.plan import Request, Stage
from xcoll.policy import Choice
from xcoll.runs import Load, load_of, runs
from xcoll.schedule import FROM_SHARES, SCATTERED, TO_SHARES, ClosedForm, ShuffleStep, slot_elements
from xcoll.topology import Device, Digit, Topology

NATIVE_AS = {
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "all_to_all",
}
"""What stands for the collectives that jax.lax lacks (`xcoll.composites`); on a GPU, XLA has a
broadcast."""


REDUCTIONS = ("all_reduce", "reduce_scatter")
"""XLA's collectives that compute."""


def native_as(collective: str, platform: str) -> str:
    """Returns what XLA runs for a collective: itself, or what stands for it."""
    if collective == "broadcast" and platform == "gpu":
        return collective
    return NATIVE_AS.get(collective, collective)


def carried_itemsize(dtype: str, itemsize: int, platform: str) -> int:
    """Returns the bytes with which XLA's own collectives carry an element.

    XLA:CPU carries bfloat16 as float32, and float8 as float16. What only moves inside a plan
    (permutes, all-gathers, all-to-alls) travels as integers of its width instead.
    """
    if platform != "cpu":
        return itemsize
    if dtype == "bfloat16":
        return 4
    return 2 if dtype.startswith("float8") else itemsize


def block_of(stages: Sequence[Stage]) -> int:
    """Returns the elements of the blocks that a plan's payload is made of; 1 without codecs."""
    return math.lcm(*(max(1, stage.codec.block) for stage in stages if stage.codec is not None))


def carried(request: Request, stages: Sequence[Stage]) -> Request:
    """Returns the request as its stages see it: integers, where a codec turns the payload to them.

    Sums of fixed-point numbers are sums of integers, by any algorithm.
    """
    integers = stages[0].codec.integers if stages[0].codec is not None else None
    if integers is None:
        return request
    return replace(request, dtype=integers, itemsize=int(integers.removeprefix("int")) // 8)


def payload_elements(request: Request, stages: Sequence[Stage]) -> int:
    """Returns the elements of a group's packed payload: each site is whole blocks."""
    block = block_of(stages)
    if block == 1:
        return request.num_elements
    rows = request.num_ranks if request.collective in SCATTERED else 1
    return sum(-(-math.prod(s) // rows // block) * block * rows for s in request.shapes)


def wire_slot(stage: Stage, slot_elements: int, dtype: str, itemsize: int) -> tuple[int, str, int]:
    """Returns items, dtype and bytes of an item with which a slot travels.

    Args:
      stage: the stage.
      slot_elements: elements of the slot.
      dtype: of the payload.
      itemsize: of the payload, in bytes.
    """
    codec = stage.codec
    if codec is None or codec.integers is not None:
        return slot_elements, dtype, itemsize
    return codec.wire_items(slot_elements), codec.wire_dtype, codec.wire_itemsize


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
    block = block_of(stages)
    for stage in stages:
        ranks = stage.span.num_ranks
        num_slots = 1 if stage.collective == "permute" else stage_form(stage).num_slots
        share = max(1, num_slots // ranks)
        part = stage.collective
        if part in FROM_SHARES:
            slot, left = slot_elements(num_elements, share, block), num_elements * ranks
            if collective == "all_reduce" and entered:
                left = entered.pop()
        elif part in ("all_reduce", "broadcast", "reduce"):
            slots = 1 if enters_own(stage.choice, part) else num_slots
            slot, left = slot_elements(num_elements, slots, block), num_elements
        elif part == "permute":
            slot, left = slot_elements(num_elements, 1, block), num_elements
        elif part == "reduce_scatter" and collective == "all_reduce":
            # Inside an all-reduce the shares need not be whole rows: any cut will do.
            entered.append(num_elements)
            slot = slot_elements(num_elements, num_slots, block)
            left = slot * share
        else:
            row = num_elements // ranks
            slot = slot_elements(row, share, block)
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
      summed_itemsize: bytes with which XLA's own reductions carry it; by default the same.
    """

    def __init__(self, topology: Topology, itemsize: int, summed_itemsize: int | None = None):
        assert topology.device is not None
        self.topology = topology
        self.device = topology.device
        self.itemsize = itemsize
        self.summed_itemsize = itemsize if summed_itemsize is None else summed_itemsize
        self._stages: dict[tuple[Stage, Operand], int] = {}
        self._shapes = _shapes_on(topology)

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
        shape = self._shapes.get(stage)
        if shape is None:
            shape = self._shapes[stage] = _shape(self.topology, device, stage)
        if stage.choice.name == "native":
            collective = native_as(stage.collective, device.platform)
            num_bytes = operand.num_elements * self._itemsize_in(collective)
            return native_on(self.topology, stage.span, shape.digits, collective, num_bytes)
        chunks = stage.num_chunks
        slot = operand.slot_elements // chunks
        items, _, itemsize = wire_slot(stage, slot, "", self.itemsize)
        slot_bytes = items * itemsize
        local = transfer_ps(shape.local_slots * slot_bytes, device.copy_bytes_per_s)
        is_encoded = stage.codec is not None and stage.codec.integers is None
        if stage.codec is not None and is_encoded:
            wide = slot * _WIDE_BYTES
            local = coding_ps(device, stage.codec, shape.encoded * wide, shape.decoded * wide)
        sent = sum(load.time_ps(device, slot_bytes) for load in shape.loads)
        for collective, slots in shape.natives:
            num_bytes = slots * slot_bytes
            if not is_encoded:
                num_bytes = slots * slot * self._itemsize_in(collective)
            sent += native_on(self.topology, stage.span, shape.digits, collective, num_bytes)
        result = shape.result_slots * operand.slot_elements * self.itemsize
        joined = transfer_ps(result, device.copy_bytes_per_s) if chunks > 1 else 0
        return _in_chunks(device, sent, local, chunks) + joined + fresh_ps(device, result)

    def _itemsize_in(self, collective: str) -> int:
        return self.summed_itemsize if collective in REDUCTIONS else self.itemsize


def _in_chunks(device: Device, sent: int, local: int, chunks: int) -> int:
    """Returns the time of a stage of which each chunk takes so long on the wire, and to work on.

    While one is on the wire, another is worked on, as far as the device does both at once.
    """
    hidden = (chunks - 1) * min(sent, local) * device.overlap_percent // 100
    return chunks * (sent + local) - hidden


@dataclass(frozen=True)
class _Shape:
    """What a stage does on a topology, whatever its payload.

    Attributes:
      digits: the levels its ranks lie on.
      local_slots: slots that are folded or reordered by the device alone.
      natives: XLA's collectives in it, and the slots of their operands.
      loads: its permutes.
      encoded: slots that a codec encodes, where there is one.
      decoded: slots that it decodes.
      result_slots: slots of its result.
    """

    digits: tuple[Digit, ...]
    local_slots: int
    encoded: int
    decoded: int
    natives: tuple[tuple[str, int], ...]
    loads: tuple[Load, ...]
    result_slots: int


@functools.lru_cache(maxsize=32)
def _shapes_on(topology: Topology) -> dict[Stage, _Shape]:
    """Returns the shapes found so far for a topology, shared by all requests."""
    return {}


def _shape(topology: Topology, device: Device, stage: Stage) -> _Shape:
    digits = span_digits(topology, stage.span)
    if stage.collective == "permute":
        return _Shape(digits, 0, 1, 1, (("permute", 1),), (), 1)
    if stage.choice.name == "native":
        return _Shape(digits, 0, 0, 0, (), (), 0)
    form = stage_form(stage)
    folds = sum(phase.slots for phase in form.phases if phase.kind == "fold")
    encoded, decoded = (0, 0) if stage.codec is None else _coded_slots(stage, form)
    shares = stage.span.num_ranks if stage.collective in TO_SHARES else 1
    passes = _shuffles(stage.choice, stage.collective) + _buffers(device, stage, form)
    return _Shape(
        digits=digits,
        local_slots=folds + passes * form.num_slots,
        encoded=encoded,
        decoded=decoded,
        natives=tuple(
            (phase.kind, phase.slots)
            for phase in form.phases
            if phase.kind not in ("fold", "permute")
        ),
        loads=tuple(load_of(device, digits, run, stage) for run in runs(stage, form)),
        result_slots=form.num_slots // shares,
    )


_WIDE_BYTES = 4
"""Codecs work on float32."""


def _coded_slots(stage: Stage, form: ClosedForm) -> tuple[int, int]:
    """Returns the slots that a rank encodes in a stage, and those that it decodes."""
    slots, ranks = form.num_slots, stage.span.num_ranks
    if stage.collective == "all_gather":
        return max(1, slots // ranks), slots
    if stage.collective == "all_to_all":
        return slots, slots
    permutes = sum(p.steps * p.slots * p.lanes for p in form.phases if p.kind == "permute")
    if stage.collective == "all_reduce":
        # Each rank sums what all see: it decodes its own, too. Without permutes, all at once.
        return (permutes, 2 * permutes) if permutes else (max(1, slots // ranks), slots)
    return permutes or slots, permutes or slots


def _buffers(device: Device, stage: Stage, form: ClosedForm) -> int:
    """Returns how often a stage fills a buffer of all slots before the first step, on CPU hosts.

    XLA:CPU copies what enters, to update it in place, or clears what a gathering starts from. On
    other platforms a step's own passes over memory cover it.
    """
    is_pairwise_sum = (stage.choice.name, stage.collective) == ("pairwise", "reduce_scatter")
    permutes = any(phase.kind == "permute" for phase in form.phases)
    return int(device.platform == "cpu" and permutes and not is_pairwise_sum)


@functools.cache
def _shuffles(choice: Choice, collective: str) -> int:
    """Returns how many local passes over the buffer an algorithm makes, for any number of ranks."""
    if ALGORITHMS[choice.name].needs_dims:
        return 0
    return sum(isinstance(step, ShuffleStep) for step in build(choice, collective, 3).steps)


def packing_ps(device: Device, num_bytes: int) -> int:
    """Returns the time to put the sites of a group into one buffer, and to take them out."""
    return 2 * transfer_ps(num_bytes, device.copy_bytes_per_s)
