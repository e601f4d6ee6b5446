"""Shardings of the parameters of a model, from the names its dimensions carry.

Flax is read where it is already imported; this imports none of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xcoll.errors import unknown
from xcoll.sharding.mapped import Axes, as_tuple, check_names, mapped, normalised
from xcoll.sharding.problems import Problems

_CALL = "Rules.shardings"


@dataclass(frozen=True)
class Named:
    """A parameter as it is to be placed.

    Attributes:
      value: an array, or what has its shape.
      names: what its dimensions are called; empty where it has none.
      own_rules: rules that it carries itself.
      rebuild: makes what stands in its place of the sharding.
    """

    value: Any
    names: Any = ()
    own_rules: Mapping[str, Axes] = field(default_factory=dict)
    rebuild: Callable[[Any], Any] = lambda sharding: sharding


def place(rules: Mapping[str, Axes], params: Any, mesh: Mesh | AbstractMesh, names: Any) -> Any:
    """Places every parameter; see `xcoll.sharding.Rules.shardings`."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{_CALL}(mesh={mesh!r}): must be a jax.sharding.Mesh")
    problems = Problems(_CALL)
    flat, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_named)
    given = None if names is None else _matched(structure, names)
    out = []
    for position, (path, leaf) in enumerate(flat):
        name = jax.tree_util.keystr(path) or "the parameter"
        named = _read(name, leaf)
        if given is not None:
            own = _read_names(name, given[position])
            named = Named(named.value, own, {}, named.rebuild)
        out.append(named.rebuild(_place_one(rules, name, named, mesh, problems)))
    problems.raise_any()
    return jax.tree.unflatten(structure, out)


def _place_one(
    rules: Mapping[str, Axes],
    path: str,
    named: Named,
    mesh: Mesh | AbstractMesh,
    problems: Problems,
) -> Any:
    """Returns the sharding of one parameter, and notes what is wrong with it."""
    if isinstance(named.names, NamedSharding):
        if named.names.mesh != mesh:
            problems.add(
                f"it carries a NamedSharding on another mesh, {named.names.mesh}; annotate it with"
                " logical names",
                path,
            )
        return named.names
    if not named.names:
        # A variable may hold a tree of arrays.
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, named.value)
    for name, axes in named.own_rules.items():
        if name in rules and rules[name] != axes:
            problems.add(
                f"its own sharding rules map {name!r} to {axes!r}, these rules to {rules[name]!r};"
                " make them agree, or leave its own out",
                path,
            )
    entries, wrong = mapped({**named.own_rules, **rules}, named.names)
    wrong += _misfits(entries, named, mesh)
    for problem in wrong:
        problems.add(problem, path)
    return None if wrong else NamedSharding(mesh, PartitionSpec(*entries))


def _misfits(entries: list[Any], named: Named, mesh: Mesh | AbstractMesh) -> list[str]:
    """Returns what is wrong between the mesh, the shape, and what dimensions are split over."""
    shape = getattr(named.value, "shape", None)
    if shape is None:
        kind = type(named.value).__name__
        return [f"it has names {named.names!r}, but is no array (a {kind}); name arrays only"]
    wrong = []
    if len(entries) > len(shape):
        wrong.append(
            f"it has {len(entries)} names, {named.names!r}, and {len(shape)} dimensions,"
            f" {tuple(shape)}; name each dimension once"
        )
    for position, entry in enumerate(entries):
        axes = () if entry is PartitionSpec.UNCONSTRAINED else as_tuple(entry)
        missing = [axis for axis in axes if axis not in mesh.shape]
        name = named.names[position]
        wrong += [
            unknown(f"logical name {name!r}", "mesh axis", axis, mesh.shape)
            + f" Make the mesh with it, or map {name!r} to one that is there."
            for axis in missing
        ]
        ranks = math.prod(mesh.shape[axis] for axis in axes if axis not in missing)
        if missing or position >= len(shape) or shape[position] % ranks == 0:
            continue
        number = int(shape[position])
        low = number // ranks * ranks
        nearest = f"{low} or {low + ranks}" if low else f"{ranks}"
        wrong.append(
            f"dimension {position} ({name!r}) of shape {tuple(shape)} does not divide: {number}"
            f" over the {ranks} ranks of {', '.join(map(repr, axes))}; make it {nearest}, or map"
            f" {name!r} to None"
        )
    return wrong


def _read(path: str, leaf: Any) -> Named:
    """Returns a leaf with its names: Flax NNX's, Linen's, or none."""
    nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
    if nnx is not None and isinstance(leaf, nnx.Variable):
        carried = leaf.get_metadata()
        names = _read_names(path, carried.get("out_sharding"))
        own = _own_rules(path, carried.get("sharding_rules"))
        return Named(leaf.get_value(), names, own, leaf.replace)
    if meta is not None and isinstance(leaf, meta.Partitioned):
        own = _own_rules(path, getattr(leaf, "rules", None))
        return Named(leaf.value, _read_names(path, leaf.names), own)
    if not hasattr(leaf, "shape"):
        raise TypeError(
            f"{_CALL}: {path} is a {type(leaf).__name__}, not an array; give arrays, or their"
            " shapes by jax.eval_shape or nnx.eval_shape"
        )
    return Named(leaf)


def _read_names(path: str, names: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(names, nnx.Variable):  # from nnx.get_partition_spec
        names = names.get_value()
    if names is None or isinstance(names, NamedSharding):
        return () if names is None else names
    return check_names(f"{_CALL}: {path}", names)


def _own_rules(path: str, pairs: Any) -> dict[str, Axes]:
    call = f"{_CALL}: {path}: its own sharding rules"
    return {name: normalised(call, name, axes) for name, axes in pairs or ()}


def _matched(structure: Any, names: Any) -> list[Any]:
    """Returns the names of each leaf.

    Raises:
      ValueError: they are not a tree of the parameters' structure.
    """
    try:
        return list(structure.flatten_up_to(names))
    except (ValueError, TypeError) as err:
        raise ValueError(
            f"{_CALL}(names=...): must have the structure of the parameters, with a tuple of"
            f" logical names, or None, in place of each: {err}"
        ) from err


def _is_named(value: Any) -> bool:
    nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
    return (nnx is not None and isinstance(value, nnx.Variable)) or (
        meta is not None and isinstance(value, meta.Partitioned)
    )
