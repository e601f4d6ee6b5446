"""The primitives of collectives that jax.lax lacks, and their types.

Where varying-axes types are checked, a product over all ranks is invariant over its axes, as
`jax.lax.psum` is; the rooted collectives vary over them, since the root differs from the rest.
Where they are not checked, shapes and dtypes are all there is.

All primitives take ``axes``, a tuple of axis names; the rooted ones ``root``, a rank in row-major
order over ``axes``. They are strict: `xcoll.composites` has the functions that bind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from xcoll import _compat
from xcoll.errors import UnknownAxisError, unknown

Axes = tuple[Any, ...]


def _primitive(name: str) -> core.Primitive:
    primitive = core.Primitive(name)
    # Outside jit and shard_map an operation is run by compiling it, as jax's own are.
    primitive.def_impl(
        lambda *args, **params: jax.jit(lambda *a: primitive.bind(*a, **params))(*args)
    )
    return primitive


pprod_p = _primitive("xcoll_pprod")
"""All-reduce by multiplication: ``x -> x0 * x1 * ...`` on every rank."""

preduce_p = _primitive("xcoll_preduce")
"""Reduction to ``root`` by ``op``: sum, max, min or prod. Other ranks get zeros."""

pgather_p = _primitive("xcoll_pgather")
"""Stack on ``root``: ``(*s,) -> (num_ranks, *s)``. Other ranks get zeros."""

pscatter_p = _primitive("xcoll_pscatter")
"""Slice ``rank`` of the operand of ``root``: ``(num_ranks, *s) -> (*s,)``."""

pbroadcast_p = _primitive("xcoll_pbroadcast")
"""The operand of ``root``, on every rank. `jax.lax.pbroadcast` lowers on GPUs only."""


def vary(x: Any, axes: Axes) -> Any:
    """Casts ``x`` to vary over ``axes`` where types are checked, as jax's collectives do.

    Args:
      x: an array of any type.
      axes: axis names; those of a `jax.vmap` have no part in the types.

    Returns:
      ``x``, typed as varying over the mesh axes among ``axes``.
    """
    if not _compat.checks_vma():
        return x
    varying = _compat.varying_axes(jax.typeof(x))
    missing = tuple(a for a in _manual(axes) if a not in varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def check_axes(call: str, axes: Axes) -> None:
    """Checks that all of ``axes`` can be used where tracing is now.

    Raises:
      UnknownAxisError: one of them is not bound.
    """
    bound = _compat.bound_axes()
    for axis in axes:
        if axis not in bound:
            hint = "" if bound else " Call it inside jax.shard_map over a mesh with this axis."
            raise UnknownAxisError(unknown(call, "axis", axis, bound) + hint)


def _manual(axes: Axes) -> Axes:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(a for a in axes if a in manual)


def _typed(call: str, aval: Any, axes: Axes) -> Any:
    """Checks an operand and returns its type, which is the type of a rooted result."""
    check_axes(call, axes)
    if _compat.checks_vma():
        varying = _compat.varying_axes(aval)
        missing = [a for a in _manual(axes) if a not in varying]
        if missing:
            raise ValueError(
                f"{call}: the operand {aval} does not vary over {missing}; cast it with"
                f" jax.lax.pcast(x, {tuple(missing)!r}, to='varying')"
            )
    return aval


def _reshaped(aval: Any, shape: tuple[int, ...], spec: tuple[Any, ...]) -> Any:
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*spec))
    return aval.update(shape=shape, sharding=sharding)


def _pprod_type(aval: Any, *, axes: Axes) -> tuple[Any, set[Any]]:
    out = _typed("pprod", aval, axes)
    if _compat.checks_vma():
        rest = _compat.varying_axes(aval) - frozenset(axes)
        out = out.update(manual_axis_type=aval.mat.update(varying=rest))
    return out, _compat.named_axis_effects(axes)


def _preduce_type(aval: Any, *, axes: Axes, root: int, op: str) -> tuple[Any, set[Any]]:
    return _typed("preduce", aval, axes), _compat.named_axis_effects(axes)


def _pbroadcast_type(aval: Any, *, axes: Axes, root: int) -> tuple[Any, set[Any]]:
    return _typed("pbroadcast", aval, axes), _compat.named_axis_effects(axes)


def _pgather_type(aval: Any, *, axes: Axes, root: int) -> tuple[Any, set[Any]]:
    aval = _typed("pgather", aval, axes)
    shape = (jax.lax.axis_size(axes), *aval.shape)
    return _reshaped(aval, shape, (None, *aval.sharding.spec)), _compat.named_axis_effects(axes)


def _pscatter_type(aval: Any, *, axes: Axes, root: int) -> tuple[Any, set[Any]]:
    aval = _typed("pscatter", aval, axes)
    num_ranks = jax.lax.axis_size(axes)
    if not aval.shape or aval.shape[0] != num_ranks:
        raise ValueError(
            f"pscatter: the operand has shape {aval.shape}; its first dimension must be the"
            f" number of ranks over {axes}, {num_ranks}"
        )
    out = _reshaped(aval, aval.shape[1:], tuple(aval.sharding.spec)[1:])
    return out, _compat.named_axis_effects(axes)


_TYPES: dict[core.Primitive, Callable[..., Any]] = {
    pprod_p: _pprod_type,
    preduce_p: _preduce_type,
    pgather_p: _pgather_type,
    pscatter_p: _pscatter_type,
    pbroadcast_p: _pbroadcast_type,
}
for _p, _rule in _TYPES.items():
    _p.def_effectful_abstract_eval(_rule)
