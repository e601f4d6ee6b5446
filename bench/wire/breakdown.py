"""Where the time of a plan goes: each stage by itself, and what the link and the codec take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from bench.timing import Times, interleaved
from bench.wire.bounds import crossing, encoded_bytes
from bench.wire.jobs import AXES
from bench.wire.programs import codec_of, compiled, mapped, place
from xcoll import Policy, optimize
from xcoll.codecs import Codec
from xcoll.costmodel import operands, payload_elements
from xcoll.plan import Plan, Stage
from xcoll.schedule import SCATTERED
from xcoll.units import readable_bytes

if TYPE_CHECKING:
    from bench.wire.cells import Cell

_ROUNDS = 3

Body = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a plan that is timed by itself.

    Attributes:
      name: for the table.
      body: of one rank.
      num_items: of its operand, on each rank.
      dtype: of its operand.
      policy: what xcoll makes of the body; None: it is what it is.
    """

    name: str
    body: Body
    num_items: int
    dtype: str = "float32"
    policy: Policy | None = None

    @property
    def is_stage(self) -> bool:
        """Whether this is a stage; one after another they are the plan."""
        return self.policy is not None


def breakdown(
    cell: Cell, name: str, plan: Plan, whole: Times, on_turn: Callable[[str], None]
) -> dict[str, Any]:
    """Times the pieces of a plan in turn, each with nothing else under way.

    Args:
      cell: what the plan is for.
      name: the variant.
      plan: its plan.
      whole: what it took.
      on_turn: told what runs.

    Returns:
      The figures, the same on every process.
    """
    pieces = [*stage_pieces(plan), *link_pieces(cell, plan)]
    turns: dict[str, Callable[[], jax.Array]] = {}
    for piece in pieces:
        x = place(cell.mesh, [np.ones(piece.num_items, piece.dtype)] * cell.job.num_ranks)
        fn = mapped(cell.mesh, piece.body)
        if piece.policy is not None:
            fn = optimize(fn, policy=piece.policy, topology=cell.topology)
        turns[piece.name] = _run(compiled(fn, x), x)
    times = interleaved(
        turns,
        _ROUNDS,
        cell.meeting,
        calls=cell.job.calls,
        on_turn=lambda piece: on_turn(f"{cell}: {name}: {piece}"),
    )
    stages = [times[piece.name].median_s for piece in pieces if piece.is_stage]
    return {
        "variant": name,
        "plan": plan.name,
        "whole_s": whole.median_s,
        "stages_s": sum(stages) if stages else None,
        "pieces": [
            {"piece": piece.name, "is_stage": piece.is_stage, **times[piece.name].to_dict()}
            for piece in pieces
        ],
    }


def stage_pieces(plan: Plan) -> list[Piece]:
    """Returns the stages as programs of their own; none where one of them can't be that.

    A stage can be run by itself if it is a collective over whole mesh axes. An encoded
    reduce-scatter and the all-gather after it are one piece, as they are one step of the plan.
    """
    request = plan.request
    sizes = dict(zip(request.axes, request.axis_sizes, strict=True))
    cut = operands(request.collective, plan.stages, payload_elements(request, plan.stages))
    pieces = []
    numbers = iter(range(len(plan.stages)))
    for number in numbers:
        stage = plan.stages[number]
        is_whole = stage.span.num_ranks == math.prod(sizes[axis] for axis in stage.span.axes)
        if not is_whole or stage.collective not in _BODIES:
            return []
        collective = stage.collective
        if _is_two_shot(plan.stages, number):
            collective = "all_reduce"
            next(numbers)
        elements = cut[number].num_elements
        if collective in SCATTERED:
            elements += -elements % stage.span.num_ranks
        pieces.append(
            Piece(
                name=f"{number + 1}. {_NAMES[collective]} over {', '.join(stage.span.axes)}"
                f" of {readable_bytes(4 * elements)}: {stage}",
                body=_BODIES[collective](stage.span.axes),
                num_items=elements,
                policy=Policy(algorithm=stage.choice, codec=stage.codec, min_bytes=0),
            )
        )
    return pieces


def link_pieces(cell: Cell, plan: Plan) -> Iterator[Piece]:
    """Yields the plan's bytes sent over the link and nothing else, and its codec's work."""
    job = cell.job
    codec = codec_of(plan)
    share = crossing(cell.collective, job.hosts, job.devices) / job.devices
    encoded = encoded_bytes(cell.payload_bytes, codec)
    num_bytes = max(1, int(share * encoded))
    yield Piece(
        name=f"the link: {readable_bytes(num_bytes)} of each device both ways, one permute",
        body=_shift(job.hosts, job.devices),
        num_items=num_bytes,
        dtype="int8",
    )
    if codec is None:
        return
    block = max(1, codec.block)
    elements = max(block, int(share * cell.payload_bytes) // 4 // block * block)
    yield Piece(
        name=f"encode {readable_bytes(4 * elements)} on each device",
        body=lambda x: _encode(codec, x),
        num_items=elements,
    )
    yield Piece(
        name=f"decode {readable_bytes(4 * elements)} on each device",
        body=lambda bits: codec.decode(bits[None], elements, dtype="float32")[0],
        num_items=codec.wire_items(elements),
        dtype=codec.wire_dtype,
    )


_BODIES: dict[str, Callable[[tuple[str, ...]], Body]] = {
    "all_reduce": lambda axes: lambda x: lax.psum(x, axes),
    "reduce_scatter": lambda axes: lambda x: lax.psum_scatter(x, axes, tiled=True),
    "all_gather": lambda axes: lambda x: lax.all_gather(x, axes, tiled=True),
    "all_to_all": lambda axes: lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
}

_NAMES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
}


def _is_two_shot(stages: tuple[Stage, ...], number: int) -> bool:
    stage, *after = stages[number : number + 2]
    return (
        stage.codec is not None
        and stage.collective == "reduce_scatter"
        and bool(after)
        and (after[0].collective, after[0].span, after[0].codec)
        == ("all_gather", stage.span, stage.codec)
    )


def _shift(hosts: int, devices: int) -> Body:
    """Sends to the next host; to its next device, since pairs of like devices share the link."""
    pairs = [
        (host * devices + device, (host + 1) % hosts * devices + (device + 1) % devices)
        for host in range(hosts)
        for device in range(devices)
    ]
    return lambda x: lax.ppermute(x, AXES, pairs)


def _encode(codec: Codec, x: jax.Array) -> jax.Array:
    encoded: jax.Array = codec.encode(x[None], dtype="float32")[0]
    return encoded


def _run(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[], jax.Array]:
    return lambda: program(x)
