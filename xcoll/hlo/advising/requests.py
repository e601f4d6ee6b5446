"""Collectives of a compiled program as requests to the planner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from xcoll.hlo.rows import Row
from xcoll.hlo.text import Module, num_bytes
from xcoll.plan import Request
from xcoll.topology import Topology

# fmt: off
_DTYPES = {
    "pred": "bool", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "u64": "uint64", "f16": "float16", "bf16": "bfloat16",
    "f32": "float32", "f64": "float64",
}
# fmt: on
_OPS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "prod"}
_COLLECTIVES = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
}


def operation(module: Module, row: Row) -> str | None:
    """Returns how a row combines values, as the planner names it; None where it does otherwise."""
    kind = row.transfer or row.kind
    if kind not in ("all-reduce", "reduce-scatter"):
        return "none"
    i = module.computations[row.computation].instructions[row.name]
    combine = module.computations.get((i.attribute("to_apply") or "").lstrip("%"))
    if combine is None:  # a transfer between TPU slices does not say what is done with it
        return "sum" if row.transfer else None
    return _OPS.get(combine.instructions[combine.root].opcode)


def request_of(
    module: Module, rows: Sequence[Row], topology: Topology, axis_sizes: Mapping[str, int]
) -> Request | None:
    """Returns what the planner is asked for in place of some rows, summed or moved as one.

    Args:
      module: the program.
      rows: of one kind, axes and dtype.
      topology: what the mesh lies on.
      axis_sizes: the mesh's axes and their sizes.

    Returns:
      The request; None where the rows are nothing that the planner plans: permutes, groups that
      are a part of the axes, operands of several dtypes.
    """
    row = rows[0]
    collective, op = _COLLECTIVES.get(row.transfer or row.kind), operation(module, row)
    if collective is None or op is None or not row.axes or len(row.dtypes) != 1 or row.unread:
        return None
    sizes = tuple(axis_sizes[axis] for axis in row.axes)
    dtype = _DTYPES.get(row.dtypes[0])
    if dtype is None or (math.prod(sizes) != row.num_ranks and row.transfer is None):
        return None
    return Request(
        collective=collective,
        op=op,
        axes=row.axes,
        axis_sizes=sizes,
        dtype=dtype,
        itemsize=num_bytes(row.dtypes[0], ()),
        shapes=tuple(dims for r in rows for _, dims in r.operands),
        platform=topology.platform,
    )
