"""Plans: what one group of collectives will do, as frozen, hashable data.

A plan is a short pipeline of stages. Each stage is one collective over a *span* of
ranks, carried out by one algorithm: for example reduce-scatter over the devices of a
host, all-reduce over hosts, all-gather over the devices.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from xcoll.policy import Choice


@dataclass(frozen=True)
class Request:
    """What is to be planned: one collective over one packed payload.

    Attributes:
      collective: the schedules' name, e.g. ``"all_reduce"``.
      op: how values combine: sum, max, min, prod; ``"none"`` where nothing is combined.
      axes: mesh axes, in the order that makes rank numbers (row-major).
      axis_sizes: their sizes.
      dtype: name of the payload's dtype.
      shapes: operand shapes per rank, one a site of the group.
      platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``: whose native collective is the rival.
      root: the root rank of a rooted collective.
    """

    collective: str
    op: str
    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    dtype: str
    itemsize: int
    shapes: tuple[tuple[int, ...], ...]
    platform: str = "cpu"
    root: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks the collective spans."""
        return math.prod(self.axis_sizes)

    @property
    def num_elements(self) -> int:
        """Elements of the operand, per rank, over all sites of the group."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the operand, per rank."""
        return self.num_elements * self.itemsize


@dataclass(frozen=True)
class Span:
    """The ranks that a stage connects: ranks of ``axes`` that differ in one digit.

    With ``r`` the row-major rank over ``axes``, the digit is ``(r // stride) % num_ranks``. A span
    of whole mesh axes has stride 1; one inside an axis may have another.
    """

    axes: tuple[str, ...]
    num_ranks: int
    stride: int = 1


@dataclass(frozen=True)
class Stage:
    """One collective over a span of ranks, carried out by one algorithm.

    Attributes:
      collective: the schedules' name.
      span: the ranks it connects.
      choice: the algorithm.
      dims: for algorithms over several levels at once (torus, pipelined hierarchical): the
        sizes of the levels inside the span, outermost first; else empty.
    """

    collective: str
    span: Span
    choice: Choice
    dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operation:
    """Operations that a plan emits into the compiled program.

    Attributes:
      kind: HLO name, e.g. ``"collective-permute"``, ``"all-reduce"``.
      axes: the mesh axes it acts over.
      operand_bytes: bytes of one operand, per rank.
      count: how often it runs in one execution of the plan.
    """

    kind: str
    axes: tuple[str, ...]
    operand_bytes: int
    count: int


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered and not chosen.

    Attributes:
      name: how the plan reads, e.g. ``"hierarchical(native, native)"``.
      predicted_time_ps: picoseconds, or None where it was not priced.
      wire_bytes: bytes sent per rank, by axis.
      reason: why it was not chosen.
    """

    name: str
    predicted_time_ps: int | None
    wire_bytes: tuple[tuple[str, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one group will do, what it is predicted to cost, and what it beat.

    Attributes:
      request: what was planned.
      stages: carried out in order. A single stage with algorithm ``native`` leaves the
        program as it is.
      name: how the plan reads, e.g. ``"hierarchical(native, native)"``.
      predicted_time_ps: picoseconds; None where the topology is unknown.
      native_time_ps: the same for XLA's own collective.
      wire_bytes: bytes sent per rank (the busiest), by axis.
      operations: what the compiled program will contain.
      error_bound: bound on ``|result - exact| / sum over ranks of |x|``, as a multiple of the
        unit roundoff of the dtype; 0 where nothing is rounded.
      candidates: the plans it beat, with reasons.
      reason: why this plan.
      topology: fingerprint of the topology it was planned for.
    """

    request: Request
    stages: tuple[Stage, ...]
    name: str
    predicted_time_ps: int | None
    native_time_ps: int | None
    wire_bytes: tuple[tuple[str, int], ...]
    operations: tuple[Operation, ...]
    error_bound: int
    candidates: tuple[Candidate, ...]
    reason: str
    topology: str

    @property
    def is_native(self) -> bool:
        """Whether the program stays as it is."""
        return len(self.stages) == 1 and self.stages[0].choice.name == "native"

    def to_json(self) -> str:
        """Returns the plan as JSON text; `from_json` reads it back, equal."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
          ValueError: the text is not such a plan.
        """
        try:
            return _plan(json.loads(text))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as err:
            raise ValueError(f"Plan.from_json: not a plan written by to_json: {err}") from err


def _plan(data: dict[str, Any]) -> Plan:
    request = dict(data["request"])
    request["shapes"] = tuple(map(tuple, request["shapes"]))
    request["axes"] = tuple(request["axes"])
    request["axis_sizes"] = tuple(request["axis_sizes"])
    return Plan(
        **{
            **data,
            "request": Request(**request),
            "stages": tuple(
                Stage(s["collective"], _span(s["span"]), _choice(s["choice"]), tuple(s["dims"]))
                for s in data["stages"]
            ),
            "wire_bytes": _pairs(data["wire_bytes"]),
            "operations": tuple(
                Operation(**{**o, "axes": tuple(o["axes"])}) for o in data["operations"]
            ),
            "candidates": tuple(
                Candidate(**{**c, "wire_bytes": _pairs(c["wire_bytes"])})
                for c in data["candidates"]
            ),
        }
    )


def _span(data: dict[str, Any]) -> Span:
    return Span(tuple(data["axes"]), data["num_ranks"], data["stride"])


def _choice(data: dict[str, Any]) -> Choice:
    return Choice(data["name"], _pairs(data["options"]), tuple(map(_choice, data["levels"])))


def _pairs(data: list[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((str(k), int(v)) for k, v in data)
