"""Hints: programs whose collectives do something else than their author is likely to want."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

from xcoll import _compat
from xcoll.sites import operand_type, read

_SCALING = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "div",
        "mul",
        "neg",
        "pvary",
        "reduce_sum",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    }
)
"""Steps through which a summed value is followed: linear, and of one array."""


def find_hints(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields a sentence for each doubtful sum in one body of a program.

    * A value that has been summed over an axis is summed over it once more: under
      ``check_vma=True`` the gradient of a replicated parameter is already the sum over ranks,
      so that a further ``pmean`` leaves it too large by the number of ranks.
    * bfloat16 or float16 values are summed and only then cast to float32.
    """
    maker: dict[Any, core.JaxprEqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
    for eqn in jaxpr.eqns:
        spec = read(eqn)
        if spec is not None and spec.collective == "all_reduce" and spec.op == "sum":
            first = _sum_behind(eqn.invars[0], maker)
            before = read(first) if first is not None else None
            if first is not None and before is not None and set(before.axes) & set(spec.axes):
                yield (
                    f"{_compat.source_line(eqn)}: {spec.name} over {spec.axes} of a value that"
                    f" was summed over the same axis before ({_compat.source_line(first)}), so that"
                    " the result is too large by the number of ranks. Under check_vma=True the"
                    " gradient of a replicated parameter is summed already: leave this sum out, or"
                    " jax.lax.pcast(params, axes, to='varying') before differentiating."
                )
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == np.float32:
            first = _sum_behind(eqn.invars[0], maker)
            before = read(first) if first is not None else None
            narrow = operand_type(first).dtype if first is not None else np.float32
            if first is not None and before is not None and narrow in ("bfloat16", "float16"):
                yield (
                    f"{_compat.source_line(first)}: {before.name} over {before.axes} in {narrow},"
                    " cast to float32 afterwards: the sum has already been rounded. Cast before the"
                    " sum to keep its bits."
                )


def _sum_behind(value: Any, maker: Any) -> core.JaxprEqn | None:
    """Returns the all-reduce that ``value`` is a scaled copy of, if it is one."""
    while isinstance(value, core.Var) and value in maker:
        eqn = maker[value]
        spec = read(eqn)
        if spec is not None:
            return eqn if spec.op == "sum" and spec.collective == "all_reduce" else None
        if eqn.primitive.name not in _SCALING:
            return None
        # A product with another array is a new value; one with a constant is the old one, scaled.
        inputs: list[Any] = [v for v in eqn.invars if isinstance(v, core.Var)]
        arrays = [v for v in inputs if v.aval.shape != ()]
        if len(arrays) > 1 or (len(eqn.invars) > 1 and not arrays):
            return None
        value = arrays[0] if arrays else eqn.invars[0]
    return None
