"""Hints: programs whose collectives do something else than their author is likely to want."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from xcoll import _compat
from xcoll.sites import read

_ELEMENTWISE = frozenset(
    {"convert_element_type", "div", "mul", "neg", "reshape", "transpose", "copy", "squeeze",
     "broadcast_in_dim", "integer_pow", "copy_p"}
)
"""Steps through which a summed value is followed."""


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
        if spec is not None and spec.op == "sum" and spec.collective == "all_reduce":
            first = _summed_before(eqn.invars[0], frozenset(spec.axes), maker)
            if first is not None:
                yield (
                    f"{_compat.source_line(eqn)}: {spec.name} over {spec.axes} of a value that"
                    f" was summed over the same axis before ({_compat.source_line(first)}), so that the"
                    " result is too large by the number of ranks. Under check_vma=True the gradient"
                    " of a replicated parameter is summed already: leave this sum out, or"
                    " jax.lax.pcast(params, axes, to='varying') before differentiating."
                )
        if eqn.primitive.name == "convert_element_type" and str(eqn.params["new_dtype"]) == "float32":
            before = maker.get(eqn.invars[0]) if isinstance(eqn.invars[0], core.Var) else None
            narrow = before and str(before.invars[0].aval.dtype) if before and before.invars else None
            summed = read(before) if before is not None else None
            if summed is not None and summed.op == "sum" and narrow in ("bfloat16", "float16"):
                yield (
                    f"{_compat.source_line(before)}: {summed.name} over {summed.axes} in {narrow},"
                    " cast to float32 afterwards: the sum has already been rounded. Cast before the"
                    " sum to keep its bits."
                )


def _summed_before(value: Any, axes: frozenset[Any], maker: Any) -> core.JaxprEqn | None:
    while isinstance(value, core.Var) and value in maker:
        eqn = maker[value]
        spec = read(eqn)
        if spec is not None:
            is_sum = spec.op == "sum" and spec.collective == "all_reduce"
            return eqn if is_sum and axes & frozenset(spec.axes) else None
        if eqn.primitive.name not in _ELEMENTWISE and eqn.primitive.name != "pvary":
            return None
        value = eqn.invars[0]
    return None
