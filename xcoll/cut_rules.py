"""How operations carry on the cut of an array over the axes of a mesh.

Each dimension is divided over some of the axes. How a result is divided follows from the operands,
or it is not known: where an operation has to move parts of a dimension that is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from xcoll import payload
from xcoll.schedule import TO_SHARES
from xcoll.sites import Scope, operand_type

Cut = tuple[tuple[str, ...], ...]
"""The mesh axes that each dimension is divided over, outermost first."""

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name",
    "ne", "neg", "not", "or", "pow", "pvary", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
    "xcoll_mark", "xor",
})
"""Operations whose result is cut as those operands of its shape of which it is known, where these
agree: the partitioner has to bring the others to the same cut anyway."""
# fmt: on


def shape_of(v: core.Var) -> tuple[int, ...]:
    """Returns a variable's shape; empty where it has none."""
    return getattr(v.aval, "shape", ())


def constraint(eqn: core.JaxprEqn) -> Cut | None:
    """Returns the cut that a sharding constraint demands, if it says one for every dimension."""
    sharding, aval = eqn.params["sharding"], operand_type(eqn)
    if not isinstance(sharding, NamedSharding) or eqn.params.get("unconstrained_dims"):
        return None
    return entries(sharding.spec, aval.ndim, set(sharding.mesh.axis_names))


def entries(spec: Any, ndim: int, axes: set[str]) -> Cut:
    """Returns a PartitionSpec as a cut over some of its axes."""
    names = [e if isinstance(e, tuple) else () if e is None else (e,) for e in spec]
    cut = [tuple(a for a in e if a in axes) for e in names[:ndim]]
    return (*cut, *((),) * (ndim - len(cut)))


def inside(cut: Cut | None, scope: Scope) -> Cut | None:
    """Returns what is left of a cut over the axes that are not manual.

    A dimension that a manual axis divides below one of the partitioner's is not known inside.
    """
    manual = scope.sizes()
    for names in cut or ():
        is_manual = [a in manual for a in names]
        if is_manual != sorted(is_manual, reverse=True):
            return None
    return None if cut is None else tuple(tuple(a for a in n if a not in manual) for n in cut)


def result(collective: str, params: Mapping[str, Any], cut: Cut) -> Cut | int:
    """Returns how a collective's result is cut; or the cut dimension that it would have to move."""
    if collective in TO_SHARES:
        d = params.get("scatter_dimension", 0)
        kept = cut if params.get("tiled", False) else cut[:d] + cut[d + 1 :]
        return d if cut[d] else kept
    if collective == "all_to_all":
        moved = [d for d in (params["split_axis"], params["concat_axis"]) if cut[d]]
        return moved[0] if moved else cut
    if collective in payload.GATHERED:
        d = params.get("all_gather_dimension", 0)
        if not params.get("tiled", False):
            return (*cut[:d], (), *cut[d:])
        return d if cut[d] else cut
    return cut


def partition_spec(cut: Any) -> PartitionSpec:
    """Returns a cut as a PartitionSpec."""
    return PartitionSpec(*(names if len(names) != 1 else names[0] for names in cut))


def _reshape(eqn: core.JaxprEqn, cut: Cut) -> Cut | None:
    """Returns the cut of a reshaped array, if dimensions that are cut stay as they are."""
    old, new = operand_type(eqn).shape, eqn.params["new_sizes"]
    out: list[tuple[str, ...]] = [()] * len(new)
    for d, names in enumerate(cut):
        if names:
            before = math.prod(old[:d])
            same = [e for e, n in enumerate(new) if n == old[d] and math.prod(new[:e]) == before]
            if eqn.params["dimensions"] is not None or not same:
                return None
            out[same[0]] = names
    return tuple(out)


def _broadcast(eqn: core.JaxprEqn, cut: Cut) -> Cut:
    """Returns the cut of an array with more dimensions."""
    out: list[tuple[str, ...]] = [()] * len(eqn.params["shape"])
    for names, d in zip(cut, eqn.params["broadcast_dimensions"], strict=True):
        out[d] = names
    return tuple(out)


def _squeeze(eqn: core.JaxprEqn, cut: Cut) -> Cut:
    return tuple(names for d, names in enumerate(cut) if d not in eqn.params["dimensions"])


def _reduce(eqn: core.JaxprEqn, cut: Cut) -> Cut | None:
    """Returns the cut of a reduction, if dimensions that are cut stay."""
    gone = eqn.params["axes"]
    if any(cut[d] for d in gone):
        return None
    return tuple(names for d, names in enumerate(cut) if d not in gone)


def _slice(eqn: core.JaxprEqn, cut: Cut) -> Cut | None:
    """Returns the cut of a slice, if dimensions that are cut are whole in it."""
    old, new = operand_type(eqn).shape, shape_of(eqn.outvars[0])
    return cut if all(a == b for a, b, names in zip(old, new, cut, strict=True) if names) else None


MOVED: Mapping[str, Callable[[core.JaxprEqn, Cut], Cut | None]] = {
    "broadcast_in_dim": _broadcast,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_sum": _reduce,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": lambda eqn, cut: tuple(cut[d] for d in eqn.params["permutation"]),
}
"""Operations that move dimensions."""
