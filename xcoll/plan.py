"""Plans: what one group of collectives will do, as frozen, hashable data.

A plan is a short pipeline of stages. Each stage is one collective over a *span* of
ranks, carried out by one algorithm: for example reduce-scatter over the devices of a
host, all-reduce over hosts, all-gather over the devices.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from xcoll import records
from xcoll.choosing import check_choice
from xcoll.codecs import Codec
from xcoll.dtypes import number
from xcoll.errors import unknown
from xcoll.hardware.links import Platform
from xcoll.policy import Choice
from xcoll.schedule import COLLECTIVES

EXACT = "; exact: "
"""Stands in a plan's reason before why no codec is used, where the policy permits one."""

OPS = ("sum", "max", "min", "prod", "none")
"""How the values of a request combine."""

_JSON_VERSION = 4


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
      pairs: source and destination ranks of a permute.
      in_step: other mesh axes, with sizes, along which all devices are sure to do the same at the
        same time, so that their permutes can be one.
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
    pairs: tuple[tuple[int, int], ...] = ()
    in_step: tuple[tuple[str, int], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of ranks the collective spans."""
        return math.prod(self.axis_sizes)

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of one site's operand, per rank."""
        return math.prod(shape) * self.itemsize

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
      codec: how its payload travels; None for the payload's own bits.
      beside: devices that do the same between the same places, along axes of the request or those
        in step with it. Where partners swap, those of the lower half send up the ranks while the
        others send down, then the other way about: for transports on which two ranks that swap
        send one after the other.
      num_chunks: chunks of the payload that take the stage one after another, so that one is
        encoded or decoded while another is on the wire.
    """

    collective: str
    span: Span
    choice: Choice
    dims: tuple[int, ...] = ()
    codec: Codec | None = None
    beside: Span | None = None
    num_chunks: int = 1

    @property
    def is_of_permutes(self) -> bool:
        """Whether permutes carry it out, and not a collective of XLA's (or the user's own)."""
        return self.collective != "permute" and self.choice.name not in ("native", "direct")

    def __str__(self) -> str:
        """Reads like the algorithm, the codec after a slash, then the chunks.

        >>> from xcoll import codecs
        >>> span = Span(("dcn",), 2)
        >>> print(Stage("all_gather", span, Choice("ring"), codec=codecs.int8(), num_chunks=2))
        ring/int8 in 2 chunks
        """
        encoded = f"{self.choice}/{self.codec}" if self.codec else str(self.choice)
        return f"{encoded} in {self.num_chunks} chunks" if self.num_chunks > 1 else encoded


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
        unit roundoff of the dtype; 0 where nothing is rounded. Without the codecs' part.
      max_error: bound on ``|result - exact|`` in every block, as a fraction of the sum over ranks
        of the block's largest magnitude; codecs and roundoff together (`xcoll.precision`).
      kernels: what carries the codecs out: ``"Pallas"``, or why not; empty without codecs.
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
    max_error: float
    kernels: str
    candidates: tuple[Candidate, ...]
    reason: str
    topology: str

    @property
    def is_native(self) -> bool:
        """Whether the program stays as it is."""
        (stage, *others) = self.stages
        return not others and stage.choice.name == "native" and stage.codec is None

    @property
    def is_lossy(self) -> bool:
        """Whether a codec may change values on the way."""
        return any(stage.codec is not None and stage.codec.is_lossy for stage in self.stages)

    def to_json(self) -> str:
        """Returns the plan as JSON text; `from_json` reads it back, equal."""
        return json.dumps({"version": _JSON_VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
          ValueError: the text is not such a plan: no JSON, another version, a field that is
            missing, unknown, or has a wrong value.
        """

        def make(data: dict[str, Any]) -> Plan:
            made: Plan = records.read(cls, data, "plan")
            _check(made)
            return made

        what = "a plan written by to_json"
        return records.decode("Plan.from_json", what, text, _JSON_VERSION, make)


def _check(plan: Plan) -> None:
    """Checks what the types alone do not say."""
    request = plan.request
    others = tuple(axis for axis, _ in request.in_step)
    _known("request.collective", "collective", request.collective, (*COLLECTIVES, "permute"))
    _known("request.op", "op", request.op, OPS)
    _known("request.platform", "platform", request.platform, (*get_args(Platform), "unknown"))
    _check_dtype(request)
    if len(set(request.axes)) != len(request.axes) or len(request.axes) != len(request.axis_sizes):
        raise ValueError(
            f"request: axes {request.axes} with sizes {request.axis_sizes}; each axis needs one"
        )
    if len({*request.axes, *others}) != len(request.axes) + len(others):
        raise ValueError(
            f"request: in_step {request.in_step} beside axes {request.axes}; name each axis once"
        )
    if request.root >= request.num_ranks:
        raise ValueError(
            f"request: root {request.root} of {request.num_ranks} ranks; a root is one of the ranks"
        )
    if any(end >= request.num_ranks for pair in request.pairs for end in pair):
        raise ValueError(f"request: pairs {request.pairs} of {request.num_ranks} ranks")
    if not plan.stages:
        raise ValueError("stages: a plan has at least one")
    sizes = dict(zip(request.axes, request.axis_sizes, strict=True))
    for stage in plan.stages:
        _known("stages", "collective", stage.collective, (*COLLECTIVES, "permute"))
        check_choice("stages", stage.choice)
        if min(*stage.dims, stage.num_chunks, 1) < 1:
            raise ValueError(f"stages: {stage}: dims and numbers of chunks are at least 1")
        if stage.dims and math.prod(stage.dims) != stage.span.num_ranks:
            raise ValueError(
                f"stages: {stage}: dims {stage.dims} make {math.prod(stage.dims)} ranks, and its"
                f" span has {stage.span.num_ranks}"
            )
        _check_span(stage, stage.span, sizes)
        if stage.beside is not None:
            _check_span(stage, stage.beside, {**sizes, **dict(request.in_step)})
    wire = (plan.wire_bytes, *(candidate.wire_bytes for candidate in plan.candidates))
    used = [
        *(axis for operation in plan.operations for axis in operation.axes),
        *(axis for pairs in wire for axis, _ in pairs),
    ]
    for axis in used:
        _known("plan", "axis", axis, request.axes)


def _check_dtype(request: Request) -> None:
    """Checks that jax has the dtype, with items of that size; those of keys have any."""
    if request.dtype.startswith("key<") and request.itemsize:
        return
    dtype = number(request.dtype)
    if dtype is None or dtype.name != request.dtype:
        rule = "jax has no such dtype"
    elif dtype.itemsize != request.itemsize:
        rule = f"its items have {dtype.itemsize} bytes"
    else:
        return
    raise ValueError(
        f"request: dtype {request.dtype!r} with itemsize {request.itemsize}: {rule}; write for"
        " example 'float32' with itemsize 4"
    )


def _check_span(stage: Stage, span: Span, sizes: dict[str, int]) -> None:
    for axis in span.axes:
        _known("plan", "axis", axis, tuple(sizes))
    ranks, block = math.prod(sizes[axis] for axis in span.axes), span.num_ranks * span.stride
    if len(set(span.axes)) < len(span.axes) or min(ranks, block) < 1 or ranks % block:
        raise ValueError(
            f"stages: {stage}: {span} does not fit a mesh of {sizes}: each of its axes is named"
            " once, and their ranks are whole blocks of num_ranks * stride"
        )


def _known(where: str, kind: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(unknown(where, kind, value, valid))
