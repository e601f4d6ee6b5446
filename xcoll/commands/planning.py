"""``xcoll plan``: what would be chosen for a collective, and what it beat.

Touches no device: plans are made from the topology's text alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from xcoll.commands.usage import UsageError, read_axes, say, show
from xcoll.dtypes import number
from xcoll.errors import unknown
from xcoll.plan import Plan, Request
from xcoll.planner import plan
from xcoll.policy import COLLECTIVE_OF, Policy
from xcoll.printing import Name
from xcoll.schedule import COLLECTIVES
from xcoll.topology import Topology
from xcoll.typed import read_choice, read_codec
from xcoll.units import read_bytes, readable_bytes, readable_time

_OPS = ("sum", "max", "min", "prod")
_COMBINING = ("all_reduce", "reduce_scatter", "reduce")
_OP_OF = {
    "psum": "sum",
    "pmean": "sum",
    "psum_scatter": "sum",
    "pmax": "max",
    "pmin": "min",
    "pprod": "prod",
}
"""Names that say how values combine."""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "plan",
        help="show the plan of a collective, and every candidate that it beat",
        description="Shows the plan of a collective, and every candidate that it beat.",
    )
    command.add_argument("collective", help="all_reduce, psum, reduce_scatter, all_gather, ...")
    command.add_argument(
        "--bytes", required=True, help="operand on each rank, for example 16MiB or 4096"
    )
    command.add_argument("--dtype", default="float32", help="its dtype (default: float32)")
    command.add_argument(
        "--topology", required=True, help="for example '2*cpu:4@200Mbit', v5p:4x4x4 or '4*h100:8'"
    )
    command.add_argument(
        "--axes", help="mesh axes in order, host=2,device=4 (default: the physical dimensions)"
    )
    command.add_argument("--over", help="the axes it goes over, host,device (default: all)")
    command.add_argument("--op", help="sum (default), max, min or prod")
    command.add_argument(
        "--algorithm", help="force one: ring, 'tree(radix=4)', 'hierarchical(native, ring)'"
    )
    command.add_argument(
        "--deterministic", action="store_true", help="sum floats in rank order, explicitly"
    )
    command.add_argument(
        "--codec", help="permit one: int8, or by axis: host=int8,device=bfloat16 (default: exact)"
    )
    command.add_argument(
        "--max-error",
        type=float,
        help="permit all codecs up to this error, over the sum of the ranks' largest magnitudes",
    )
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    axes = read_axes("--axes", arguments.axes) if arguments.axes is not None else None
    topology = Topology.parse(arguments.topology, axes=axes)
    policy = Policy(
        algorithm=None if arguments.algorithm is None else read_choice(arguments.algorithm),
        deterministic=arguments.deterministic,
        codec=None if arguments.codec is None else read_codec(arguments.codec),
        max_error=arguments.max_error,
    )
    for _, axis, _ in policy.permits:
        if axis and axis not in topology.axis_sizes:
            raise UsageError(unknown("--codec", "axis", axis, topology.axis_sizes))
    made = plan(_request(arguments, topology), topology, policy, strict=True)
    if arguments.json:
        say(made.to_json())
    else:
        _print(made, topology)
    return 0


def _request(arguments: argparse.Namespace, topology: Topology) -> Request:
    name = arguments.collective
    collective = COLLECTIVE_OF.get(name, name)
    if collective not in (*COLLECTIVES, "permute"):
        raise UsageError(
            unknown("plan", "collective", name, dict.fromkeys((*COLLECTIVES, *COLLECTIVE_OF)))
        )
    dtype = _dtype(arguments.dtype)
    sizes = topology.axis_sizes
    over = _over(arguments.over, sizes) if arguments.over is not None else tuple(sizes)
    num_bytes = read_bytes("--bytes", arguments.bytes)
    ranks = math.prod(sizes[axis] for axis in over)
    rows = ranks if collective in ("reduce_scatter", "all_to_all", "scatter") else 1
    itemsize = dtype.itemsize
    if num_bytes % (itemsize * rows):
        raise UsageError(
            f"--bytes {arguments.bytes}: {collective} of {dtype.name} over {ranks} ranks"
            f" needs a multiple of {itemsize * rows} bytes"
        )
    return Request(
        collective=collective,
        op=_op(name, collective, arguments.op),
        axes=over,
        axis_sizes=tuple(sizes[axis] for axis in over),
        dtype=dtype.name,
        itemsize=itemsize,
        shapes=((num_bytes // itemsize,),),
        platform=topology.platform,
        # As for a step that is manual over all axes, where no branch is around the collective.
        in_step=tuple((axis, size) for axis, size in sizes.items() if axis not in over),
    )


def _op(name: str, collective: str, given: str | None) -> str:
    if given is not None and given not in _OPS:
        raise UsageError(unknown("plan", "op", given, _OPS))
    if collective not in _COMBINING:
        if given is not None:
            raise UsageError(f"--op {given}: {name} combines nothing; leave --op out")
        return "none"
    own = _OP_OF.get(name)
    if own is not None and given not in (None, own):
        raise UsageError(
            f"--op {given}: {name} is a {own}; leave --op out, or name the collective {collective}"
        )
    return own or given or "sum"


def _dtype(text: str) -> np.dtype[Any]:
    dtype = number(text)
    if dtype is not None:
        return dtype
    raise UsageError(
        f"--dtype {text!r}: no dtype of numbers or bools that jax has; write for example float32,"
        " bfloat16, int8 or bool"
    )


def _over(text: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    over = tuple(text.split(","))
    for axis in over:
        if axis not in sizes:
            raise UsageError(unknown(f"--over {text}", "axis", axis, sizes))
        if over.count(axis) > 1:
            raise UsageError(f"--over {text}: axis {axis!r} is there twice; name each once")
    return over


def _print(made: Plan, topology: Topology) -> None:
    request = made.request
    sizes = zip(request.axes, request.axis_sizes, strict=True)
    table = Table()
    table.add_column("plan")
    table.add_column("predicted", justify="right")
    for axis in request.axes:
        table.add_column(f"over {axis}", justify="right")
    table.add_column("reason")
    rows = [
        (f"> {made.name}", made.predicted_time_ps, made.wire_bytes, f"chosen: {made.reason}"),
        *((c.name, c.predicted_time_ps, c.wire_bytes, c.reason) for c in made.candidates),
    ]
    for name, time, sent, reason in rows:
        by_axis = dict(sent)
        table.add_row(
            Name(name),
            readable_time(time),
            *(readable_bytes(by_axis.get(axis, 0)) for axis in request.axes),
            Name(reason),
            style="bold" if name.startswith("> ") else None,
        )
    parts: list[Any] = [
        str(topology),
        f"{request.collective} ({request.op}) of {readable_bytes(request.num_bytes)}"
        f" {request.dtype} over {', '.join(f'{axis}={size}' for axis, size in sizes)}",
        table,
    ]
    for stage in made.stages:
        span = stage.span
        parts.append(
            f"  {stage.collective} over {span.num_ranks} ranks of {', '.join(span.axes)}"
            f" (stride {span.stride}): {stage}"
        )
    if made.is_lossy:
        parts.append(
            f"  |error| <= {made.max_error:.3g} x sum over ranks of a block's largest magnitude"
        )
    show(Group(*parts))
