"""Collectives beside axes of the partitioner: where an operand's cut over them is known.

In a `jax.shard_map` that is manual over some axes of the mesh, the partitioner owns the others, and
an operand that a plan cuts anew could make it gather over them. Where the operand's
PartitionSpec over those axes is known, the plan works on what one device holds (`xcoll.nesting`).

A spec is known from the type, where axes are Explicit, and else from
`jax.lax.with_sharding_constraint` and what follows it: operations element by element or that move
whole dimensions, other collectives, calls. Products of matrices and loops end it. Of a wrong spec
the values would be right, and the partitioner would exchange what it holds otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core
from jax.sharding import AxisType

from xcoll import cut_rules as rules
from xcoll.cut_rules import Cut
from xcoll.nesting import Nest
from xcoll.sites import OPAQUE, REGION, Scope, Spec, enter, operand_bytes, operand_type, read

# fmt: off
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
        out = rules.result(spec.collective, eqn.params, cut)
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
        outs = [rules.result(spec.collective, e.params, c) for e, c in zip(eqns, cuts, strict=True)]
        if any(isinstance(out, int) for out in outs):
            return None  # Only of axes of one device, which divide nothing.
        return Nest(
            axes, tuple(map(rules.partition_spec, cuts)), tuple(map(rules.partition_spec, outs))
        )

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
        cut = rules.entries(typed, aval.ndim, {a for a in free if types[a] == AxisType.Explicit})
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
    """

    known: dict[Any, Cut | None]
    done: dict[Any, tuple[Cut | None, ...]] = field(default_factory=dict)

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
            return (rules.constraint(eqn),)
        if name == "optimization_barrier":
            return [self.read(v) for v in eqn.invars]
        if name in rules.MOVED:
            cut = self.read(eqn.invars[0])
            return (None if cut is None else rules.MOVED[name](eqn, cut),)
        if name in rules.ELEMENTWISE:
            shape = rules.shape_of(eqn.outvars[0])
            arrays = [
                v for v in eqn.invars if isinstance(v, core.Var) and rules.shape_of(v) == shape
            ]
            cuts = {cut for v in arrays if (cut := self.read(v)) is not None}
            return (cuts.pop() if len(cuts) == 1 else None,) * len(eqn.outvars)
        spec = read(eqn)
        if spec is not None:
            cut = self.read(eqn.invars[0]) if eqn.invars else None
            out = None if cut is None else rules.result(spec.collective, eqn.params, cut)
            return (None if isinstance(out, int) else out,) * len(eqn.outvars)
        outs: Sequence[Cut | None] = unknown
        for _, _, body, within in enter(eqn, scope):
            inputs: tuple[Cut | None, ...] = (None,) * len(body.invars)
            is_call = len(eqn.invars) == len(body.invars) and name in _CALLS
            if is_call or name == "shard_map":
                inputs = tuple(rules.inside(self.read(v), within) for v in eqn.invars)
            results = self.run(body, inputs, within)
            if is_call:
                outs = results
        return outs


def _both(a: Any, b: Any) -> bool:
    return bool(a and b)


def _free_axes(scope: Scope) -> tuple[str, ...]:
    """Returns the axes of the mesh that are not manual, those of one device included."""
    if scope.mesh is None or scope.mesh.empty:
        return ()
    return tuple(a for a in scope.mesh.axis_names if a not in scope.sizes())


def _sizes(scope: Scope) -> Mapping[str, int]:
    return {} if scope.mesh is None else dict(scope.mesh.shape)
