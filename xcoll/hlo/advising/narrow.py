"""Sums in bfloat16 or float16 whose every use is a cast to float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xcoll.hlo.advising.flow import MOVES, Flow
from xcoll.hlo.advising.words import named, places
from xcoll.hlo.rows import Advice, Row
from xcoll.hlo.text import Instruction, shapes

_NARROW = {"bf16": "bfloat16", "f16": "float16"}
_SUMS = ("all-reduce", "reduce-scatter")
_HANDED_ON = MOVES - {"convert", "tuple"} | {"all-gather"}


def late_casts(flow: Flow, rows: Sequence[Row]) -> Iterator[Advice]:
    """Yields one advice for all lines that sum a narrow type over the same axes, and then cast.

    A cast counts where the program has it: compilers put in casts of their own, and XLA:CPU carries
    bfloat16 as float32, which is told from the name of the sum's own computation.
    """
    late: dict[tuple[str, tuple[str, ...] | None, str], list[Row]] = {}
    for row in rows:
        narrow = _cast_late(flow, row) if row.kind in _SUMS else None
        if narrow is not None:
            late.setdefault((narrow, row.axes, row.made_by), []).append(row)
    for (dtype, axes, made_by), found in late.items():
        instead = (
            "Cast before the sum; or, to keep the bytes, sum with"
            " xcoll.Policy(accumulate='float32'), which rounds once."
        )
        if made_by == "partitioner":
            instead = (
                "Have them made in float32: preferred_element_type=jnp.float32 for a dot product,"
                " dtype=jnp.float32 for a sum. Gradients of float32 weights"
                " xcoll.gradients.value_and_grad casts before it sums them."
            )
        over = f" over {named(axes)}" if axes else ""
        yield Advice(
            kind="late-cast",
            text=(
                f"Sums{over} of {dtype}{places(found)} are cast to float32 in all their uses, when"
                f" they have been rounded already. {instead}"
            ),
            rows=tuple(row.name for row in found),
            saves_s=None,
        )


def _cast_late(flow: Flow, row: Row) -> str | None:
    """Returns the narrow dtype of a sum that is used in float32 alone."""
    i = flow.module.computations[row.computation].instructions[row.name]
    promoted = (i.attribute("to_apply") or "").endswith("_promoted")
    for dtype, name in _NARROW.items():
        if row.dtypes == (dtype,) and _uses(flow, row.computation, row.name, "f32"):
            return name
        if promoted and row.dtypes == ("f32",):
            rounded = _converts(flow, row.computation, row.name)
            casts = rounded and all(
                _dtype(convert) == dtype and _uses(flow, where, convert.name, "f32")
                for where, convert in rounded
            )
            if casts:
                return name
    return None


def _uses(flow: Flow, computation: str, name: str, dtype: str) -> bool:
    """Whether a value is only used by the program's own casts to ``dtype``."""
    found = _converts(flow, computation, name)
    return bool(found) and all(
        _dtype(convert) == dtype and convert.op_name.endswith("/convert_element_type")
        for _, convert in found or ()
    )


def _converts(flow: Flow, computation: str, name: str) -> list[tuple[str, Instruction]] | None:
    """Returns the casts of a value, with their computations; None where it has other uses."""
    if name == flow.module.computations[computation].root:
        fusion = flow.fusion(computation)
        return None if fusion is None else _converts(flow, *fusion)
    found: list[tuple[str, Instruction]] = []
    for user in flow.users(computation, name):
        inside: list[tuple[str, Instruction]] | None
        opcode = user.opcode.removesuffix("-start").removesuffix("-done")
        if user.opcode == "convert":
            found.append((computation, user))
            continue
        if user.opcode == "fusion":
            inside = []
            called = flow.called(user)
            for number, operand in enumerate(user.operands):
                parameter = called.parameter(number)
                if operand == name and parameter is not None:
                    uses = _converts(flow, called.name, parameter)
                    inside = None if uses is None or inside is None else inside + uses
        elif opcode in _HANDED_ON or opcode in _SUMS:
            inside = _converts(flow, computation, user.name)
        else:
            return None
        if inside is None:
            return None
        found += inside
    return found


def _dtype(i: Instruction) -> str:
    ((dtype, _),) = shapes(i.type)
    return dtype
