"""Collectives beside axes of the partitioner: where an operand's cut over them is known.

In a `jax.shard_map` that is manual over some axes of the mesh, the partitioner owns the others, and
an operand that a plan cuts anew could make it gather over them. Where the operand's
PartitionSpec over those axes is known, the plan works on what one device holds (`xcoll.nesting`).

A spec is known from the type, where axes are Explicit, and else from
`jax.lax.with_sharding_constraint` and what follows it: element by element operations, other
collectives, calls. Nothing is guessed: a wrong spec would be right but slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xcoll import payload
from xcoll.nesting import Nest
from xcoll.sites import OPAQUE, REGION, Scope, Spec, enter, operand_bytes, operand_type, read

Cut = tuple[tuple[str, ...], ...]
"""The mesh axes that each dimension is divided over, outermost first."""

# fmt: off
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name",
    "ne", "neg", "not", "or", "pow", "pvary", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
    "xcoll_mark", "xor",
})
"""Operations whose result is cut as their operands are, all of which have to be cut alike."""

_CALLS = frozenset({
    "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2", REGION,
})
"""Equations that hand their operands to their one body, and its results back."""
# fmt: on


@dataclass
class Cuts:
    """What is known of how a program's values are cut over the partitioner's axes.

    Attributes:
      jaxpr: the program.
      scope: where it stands.
      inputs: what is known of its inputs; nothing by default.
    """

    jaxpr: core.Jaxpr | None = None
    scope: Scope = field(default_factory=Scope)
    inputs: Sequence[Cut | None] = ()
    _known: dict[Any, Cut | None] | None = None

    def why_not(self, eqn: core.JaxprEqn, spec: Spec, scope: Scope) -> str | None:
        """Returns why a collective has to stay as it is beside the partitioner's axes, or None."""
        if not scope.auto_axes:
            return None
        axes, operand = ", ".join(scope.auto_axes), operand_type(eqn)
        cut = self._cut(eqn.invars[0], scope)
        if cut is None:
            return (
                f"the partitioner owns mesh axes {axes} here, and how it cuts the operand over them"
                " is not known; say it before the collective, as in"
                " x = jax.lax.with_sharding_constraint(x, P(None, 'model'))"
            )
        sizes = _sizes(scope)
        for dimension, names in enumerate(cut):
            count = math.prod(sizes[a] for a in names)
            if operand.shape[dimension] % count:
                return (
                    f"dimension {dimension} of shape {operand.shape} does not divide evenly over"
                    f" the {count} ranks of {names}, which the partitioner owns"
                )
        out = _result(spec.collective, eqn.params, cut)
        if isinstance(out, int):
            return (
                f"it cuts or joins dimension {out}, which the partitioner divides over {cut[out]};"
                " use another dimension, or constrain this one to be whole"
            )
        return None

    def group(self, eqns: Sequence[core.JaxprEqn], spec: Spec, scope: Scope) -> Nest | None:
        """Returns how the operands of a group are cut; None where all axes are manual."""
        axes = _free_axes(scope)
        if not axes:
            return None
        cuts = [self._cut(eqn.invars[0], scope) or () for eqn in eqns]
        outs = [_result(spec.collective, e.params, c) for e, c in zip(eqns, cuts, strict=True)]
        if any(isinstance(out, int) for out in outs):
            return None  # Only of axes of one device, which divide nothing.
        return Nest(axes, tuple(map(_spec, cuts)), tuple(map(_spec, outs)))

    def local_shape(self, eqn: core.JaxprEqn, scope: Scope) -> tuple[int, ...]:
        """Returns the shape of what one device holds of an operand, as far as is known."""
        shape, sizes = tuple(operand_type(eqn).shape), _sizes(scope)
        cut = self._cut(eqn.invars[0], scope) if _free_axes(scope) else None
        if cut is None:
            return shape
        counts = [math.prod(sizes[a] for a in names) for names in cut]
        return tuple(n // c for n, c in zip(shape, counts, strict=True))

    def operand_bytes(self, eqn: core.JaxprEqn, scope: Scope) -> int:
        """Returns the bytes that one device holds of an equation's operand, as far as is known."""
        num_bytes, shape = operand_bytes(eqn), getattr(eqn.invars[0].aval, "shape", None)
        if not _free_axes(scope) or not num_bytes or shape is None:
            return num_bytes
        return num_bytes * math.prod(self.local_shape(eqn, scope)) // math.prod(shape)

    def _cut(self, value: Any, scope: Scope) -> Cut | None:
        """Returns how a value is cut over the axes that are not manual; None where not known."""
        aval = value.aval
        types = dict(zip(scope.mesh.axis_names, scope.mesh.axis_types, strict=True))
        typed = aval.sharding.spec if any(t == AxisType.Explicit for t in types.values()) else ()
        free = _free_axes(scope)
        cut = _entries(typed, aval.ndim, {a for a in free if types[a] == AxisType.Explicit})
        hidden = {a for a in scope.auto_axes if types[a] != AxisType.Explicit}
        if not hidden or aval.ndim == 0:
            return cut
        if self._known is None:
            self._known = {}
            if self.jaxpr is not None:
                inputs = self.inputs or (None,) * len(self.jaxpr.invars)
                _Follower(self._known).run(self.jaxpr, tuple(inputs), self.scope)
        known = self._known.get(value) if isinstance(value, core.Var) else None
        if known is None or len(known) != aval.ndim or any(map(_both, cut, known)):
            return None
        return tuple(
            a or tuple(x for x in b if x in hidden) for a, b in zip(cut, known, strict=True)
        )


@dataclass
class _Follower:
    """Follows constraints through a program; what differs from call to call is not known.

    Attributes:
      known: what is known of each variable; filled.
      done: the results of bodies, by what was known of their inputs.
      equal: variables whose elements are all the same.
    """

    known: dict[Any, Cut | None]
    done: dict[Any, tuple[Cut | None, ...]] = field(default_factory=dict)
    equal: set[Any] = field(default_factory=set)

    def run(
        self, jaxpr: core.Jaxpr, inputs: tuple[Cut | None, ...], scope: Scope
    ) -> tuple[Cut | None, ...]:
        """Returns what is known of a body's results, given that of its inputs."""
        key = (id(jaxpr), inputs, scope.axis_sizes)
        if key not in self.done:
            for v, cut in zip(jaxpr.invars, inputs, strict=True):
                self.write(v, cut)
            for eqn in jaxpr.eqns:
                for v, cut in zip(eqn.outvars, self.step(eqn, scope), strict=True):
                    self.write(v, cut)
            self.done[key] = tuple(self.read(v) for v in jaxpr.outvars)
        return self.done[key]

    def read(self, value: Any) -> Cut | None:
        return self.known.get(value) if isinstance(value, core.Var) else None

    def write(self, v: Any, cut: Cut | None) -> None:
        self.known[v] = cut if self.known.get(v, cut) == cut else None

    def step(self, eqn: core.JaxprEqn, scope: Scope) -> Sequence[Cut | None]:
        """Returns what is known of an equation's results."""
        name, unknown = eqn.primitive.name, (None,) * len(eqn.outvars)
        if name in OPAQUE:
            return unknown
        if name == "sharding_constraint":
            return (_constraint(eqn),)
        if name == "optimization_barrier":
            return [self.read(v) for v in eqn.invars]
        if name == "broadcast_in_dim" and operand_type(eqn).ndim == 0:
            self.equal.add(eqn.outvars[0])  # The same element everywhere: no matter how it is cut.
        if name in _MOVED:
            cut = self.read(eqn.invars[0])
            return (None if cut is None else _MOVED[name](eqn, cut),)
        if name in _ELEMENTWISE:
            shape = _shape(eqn.outvars[0])
            arrays = [v for v in eqn.invars if isinstance(v, core.Var) and _shape(v) == shape]
            cuts = {self.read(v) for v in arrays if v not in self.equal}
            return (cuts.pop() if len(cuts) == 1 else None,) * len(eqn.outvars)
        spec = read(eqn)
        if spec is not None:
            cut = self.read(eqn.invars[0]) if eqn.invars else None
            out = None if cut is None else _result(spec.collective, eqn.params, cut)
            return (None if isinstance(out, int) else out,) * len(eqn.outvars)
        outs: Sequence[Cut | None] = unknown
        for _, _, body, within in enter(eqn, scope):
            inputs: tuple[Cut | None, ...] = (None,) * len(body.invars)
            is_call = len(eqn.invars) == len(body.invars) and name in _CALLS
            if is_call or name == "shard_map":
                inputs = tuple(_inside(self.read(v), within) for v in eqn.invars)
            results = self.run(body, inputs, within)
            if is_call:
                outs = results
        return outs


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


_MOVED: Mapping[str, Callable[[core.JaxprEqn, Cut], Cut | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": lambda eqn, cut: tuple(cut[d] for d in eqn.params["permutation"]),
}
"""Operations that move dimensions."""


def _both(a: Any, b: Any) -> bool:
    return bool(a and b)


def _shape(v: core.Var) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _constraint(eqn: core.JaxprEqn) -> Cut | None:
    sharding, aval = eqn.params["sharding"], operand_type(eqn)
    if not isinstance(sharding, NamedSharding) or eqn.params.get("unconstrained_dims"):
        return None
    return _entries(sharding.spec, aval.ndim, set(sharding.mesh.axis_names))


def _entries(spec: Any, ndim: int, axes: set[str]) -> Cut:
    """Returns a PartitionSpec as a cut over some of its axes."""
    entries = [e if isinstance(e, tuple) else () if e is None else (e,) for e in spec]
    cut = [tuple(a for a in e if a in axes) for e in entries[:ndim]]
    return (*cut, *((),) * (ndim - len(cut)))


def _inside(cut: Cut | None, scope: Scope) -> Cut | None:
    """Returns what is left of a cut over the axes that are not manual.

    A dimension that a manual axis divides below one of the partitioner's is not known inside.
    """
    manual = scope.sizes()
    for names in cut or ():
        is_manual = [a in manual for a in names]
        if is_manual != sorted(is_manual, reverse=True):
            return None
    return None if cut is None else tuple(tuple(a for a in n if a not in manual) for n in cut)


def _result(collective: str, params: Mapping[str, Any], cut: Cut) -> Cut | int:
    """Returns how a collective's result is cut; or the cut dimension that it would have to move."""
    if collective in ("reduce_scatter", "scatter"):
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


def _spec(cut: Any) -> PartitionSpec:
    return PartitionSpec(*(names if len(names) != 1 else names[0] for names in cut))


def _free_axes(scope: Scope) -> tuple[str, ...]:
    """Returns the axes of the mesh that are not manual, those of one device included."""
    if scope.mesh is None or scope.mesh.empty:
        return ()
    return tuple(a for a in scope.mesh.axis_names if a not in scope.sizes())


def _sizes(scope: Scope) -> Mapping[str, int]:
    return {} if scope.mesh is None else dict(scope.mesh.shape)
