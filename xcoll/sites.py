"""Sites: the collective equations of a traced program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from xcoll import _compat
from xcoll.barriers import barrier_p
from xcoll.composites import COMPOSITES
from xcoll.lockstep import UNKNOWN, Lockstep
from xcoll.planner import PERMUTATION as PERMUTATION

OPAQUE = frozenset({"pallas_call", "core_map", "custom_partitioning", "ffi_call", "xcoll_stages"})
"""Primitives whose bodies are somebody else's: nothing inside is looked at."""

REGION = "xcoll_region"
"""Name of the primitive around code that has its own policy (`xcoll.primitives`)."""


@dataclass(frozen=True)
class Spec:
    """How a collective primitive reads: jax.lax's name, the schedules' name, how it combines."""

    name: str
    collective: str
    op: str
    axes: tuple[Any, ...]
    root: int = 0
    kept_reason: str | None = None


BARRIER = "a barrier is one all-reduce of four bytes, which XLA does best"

_SUMS = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}
_MOVES = {
    "reduce_scatter": ("psum_scatter", "reduce_scatter", "sum"),
    "all_gather": ("all_gather", "all_gather", "none"),
    "all_gather_invariant": ("all_gather", "all_gather", "none"),
    "all_to_all": ("all_to_all", "all_to_all", "none"),
    "ppermute": ("ppermute", "permute", "none"),
    "pbroadcast": ("pbroadcast", "broadcast", "none"),
}
_UNPLANNED = {
    "all_gather_reduced": "all_gather",
    "unreduced_psum": "psum",
    "unreduced_pmax": "pmax",
    "unreduced_pmin": "pmin",
    "unreduced_reduce_scatter": "psum_scatter",
    "psum_start": "psum",
    "psum_invariant_start": "psum",
    "reduce_scatter_start": "psum_scatter",
    "all_gather_start": "all_gather",
    "all_gather_reduced_start": "all_gather",
    "all_to_all_start": "all_to_all",
    "ppermute_start": "ppermute",
    "ragged_all_to_all": "ragged_all_to_all",
    "pbroadcast_dynamic": "pbroadcast",
    "psend": "psend",
    "precv": "precv",
}
_BY_PRIMITIVE = {
    primitive: name
    for name in (*_SUMS, *_MOVES, *_UNPLANNED)
    if (primitive := _compat.lax_primitive(name)) is not None
}


def read(eqn: core.JaxprEqn) -> Spec | None:
    """Returns what an equation communicates, or None where it is no collective."""
    if eqn.primitive is barrier_p:
        return Spec("barrier", "barrier", "none", tuple(eqn.params["axes"]), 0, BARRIER)
    if eqn.primitive in COMPOSITES:
        composite = COMPOSITES[eqn.primitive]
        return Spec(
            composite.name(eqn.params),
            composite.collective,
            composite.op(eqn.params),
            tuple(eqn.params["axes"]),
            eqn.params.get("root", 0),
        )
    name = _BY_PRIMITIVE.get(eqn.primitive)
    if name is None:
        return None
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    kept = None
    if any(isinstance(a, int) for a in axes):
        axes = tuple(a for a in axes if not isinstance(a, int))
        if not axes:
            return None
        kept = "it also reduces over a positional axis"
    if eqn.params.get("axis_index_groups") is not None:
        kept = "axis_index_groups restrict it to parts of the axis"
    if name in _SUMS:
        return Spec(name.removesuffix("_invariant"), "all_reduce", _SUMS[name], axes, 0, kept)
    if name in _UNPLANNED:
        reason = (
            PERMUTATION
            if name == "ppermute_start"
            else "its asynchronous start and done are the user's own"
            if name.endswith("_start")
            else f"{name} has no decomposition"
        )
        return Spec(_UNPLANNED[name], _UNPLANNED[name], "none", axes, 0, reason)
    public, collective, op = _MOVES[name]
    if collective == "permute":
        kept = PERMUTATION
    return Spec(public, collective, op, axes, eqn.params.get("source", 0), kept)


@dataclass(frozen=True)
class Scope:
    """Where an equation stands: the mesh around it and how often it runs.

    Attributes:
      axis_sizes: size of each manual mesh axis in scope, as sorted pairs.
      auto_axes: axes of the mesh, larger than one, that the partitioner still owns.
      count: executions per call of the program; None where not known (a while loop).
      source: ``file:line`` of the call around equations that show no user's line of their own.
      lockstep: which devices are sure to run it at the same time.
    """

    axis_sizes: tuple[tuple[str, int], ...] = ()
    auto_axes: tuple[str, ...] = ()
    mesh: Any = None
    count: int | None = 1
    source: str | None = None
    lockstep: Lockstep = UNKNOWN

    def sizes(self) -> dict[str, int]:
        """Returns the manual axes' sizes by name."""
        return dict(self.axis_sizes)

    def mesh_sizes(self) -> dict[str, int]:
        """Returns the sizes of all axes of the mesh, in its order."""
        return dict(self.axis_sizes if self.mesh is None else self.mesh.shape)


def scope_of_mesh(mesh: Any, manual: frozenset[str], around: Scope | None = None) -> Scope:
    """Returns the scope inside a computation that is manual over some axes of ``mesh``.

    Args:
      mesh: the mesh, with devices or without.
      manual: its manual axes.
      around: the scope that it stands in, if any.
    """
    shape = dict(mesh.shape)
    return replace(
        around or Scope(),
        axis_sizes=tuple((a, shape[a]) for a in mesh.axis_names if a in manual),
        auto_axes=tuple(a for a in mesh.axis_names if a not in manual and shape[a] > 1),
        mesh=mesh,
    )


def enter(eqn: core.JaxprEqn, scope: Scope) -> Iterator[tuple[str, int | None, core.Jaxpr, Scope]]:
    """Yields ``(parameter, index in it or None, jaxpr, scope)`` of every body of an equation."""
    if eqn.primitive.name in OPAQUE:
        return
    name = eqn.primitive.name
    if name == "shard_map":
        manual = frozenset(dict(scope.axis_sizes)) | frozenset(_manual_axes(eqn.params))
        mesh = eqn.params["mesh"]
        if scope.mesh is not None and not _is_concrete(mesh) and _is_concrete(scope.mesh):
            mesh = scope.mesh
        inner = scope_of_mesh(mesh, manual, scope)
        lockstep = scope.lockstep.in_shard_map(eqn, scope.sizes(), inner.sizes())
        inner = replace(inner, lockstep=lockstep)
    elif name == REGION:
        inner = replace(scope, source=_compat.source_line(eqn) or scope.source)
    else:
        inner = replace(scope, lockstep=scope.lockstep.inside(eqn, scope.sizes()))
    if name == "scan":
        count = None if scope.count is None else scope.count * eqn.params["length"]
        inner = replace(inner, count=count)
    elif name == "while":
        inner = replace(inner, count=None)
    for key, value in eqn.params.items():
        if isinstance(value, core.Jaxpr):
            yield key, None, value, inner
        elif isinstance(value, tuple | list):
            for index, item in enumerate(value):
                if isinstance(item, core.Jaxpr):
                    yield key, index, item, inner


def _manual_axes(params: Mapping[str, Any]) -> frozenset[str]:
    return params.get("newly_manual_axes") or params.get("manual_axes") or frozenset()


def _is_concrete(mesh: Any) -> bool:
    return isinstance(mesh, Mesh)


def operand_type(eqn: core.JaxprEqn) -> Any:
    """Returns the type of an equation's first operand, with shape and dtype."""
    return eqn.invars[0].aval


def operand_bytes(eqn: core.JaxprEqn) -> int:
    """Returns the bytes per rank of an equation's operands; 0 where a size is symbolic."""
    types: list[Any] = [v.aval for v in eqn.invars]
    known = [t for t in types if hasattr(t, "shape") and not is_symbolic(t.shape)]
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in known)


def pairs_of(eqn: core.JaxprEqn) -> tuple[tuple[int, int], ...]:
    """Returns the source and destination ranks of a permute; nothing for other equations."""
    return tuple((int(s), int(d)) for s, d in eqn.params.get("perm", ()))


def is_symbolic(shape: tuple[Any, ...]) -> bool:
    """Returns whether a shape has dimensions that are not numbers yet (`jax.export`)."""
    return not all(isinstance(size, int) for size in shape)


def is_plain(dtype: Any) -> bool:
    """Returns whether a dtype is a number or boolean of whole bytes.

    >>> import jax
    >>> is_plain(np.dtype("float32")), is_plain(jax.random.key(0).dtype), is_plain(jnp.int4)
    (True, False, False)
    """
    if not any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
        return False
    if jnp.issubdtype(dtype, np.bool_) or jnp.issubdtype(dtype, np.complexfloating):
        return True
    info = jnp.iinfo if jnp.issubdtype(dtype, np.integer) else jnp.finfo
    return info(dtype).bits >= 8
