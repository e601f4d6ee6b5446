"""What `value_and_grad` differentiates, on which mesh, and how the parameters lie on it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xcoll import cut_rules
from xcoll.errors import UnknownAxisError, unknown
from xcoll.gradients.batches import CALL, per_leaf


def mesh_of(mesh: Mesh | AbstractMesh | None, arguments: Any, axes: tuple[str, ...]) -> Any:
    """Returns the mesh to run on: the given one, that of the context, or the arguments'.

    Raises:
      ValueError: there is none, or an axis is manual already.
      UnknownAxisError: it lacks one of ``axes``.
    """
    context = jax.sharding.get_abstract_mesh()
    found: Any = mesh or (None if context.empty else context)
    if found is None:
        shardings = (_sharding(leaf) for leaf in jax.tree.leaves(arguments))
        found = next((s.mesh for s in shardings if s is not None), None)
    if found is None:
        raise ValueError(
            f"{CALL}: there is no mesh: none is given or set, and no argument is placed on one;"
            f" pass {CALL}(..., mesh=mesh), or call it under jax.set_mesh(mesh)"
        )
    for axis in axes:
        if axis not in found.axis_names:
            raise UnknownAxisError(
                unknown(f"{CALL}(axis_name={axes!r})", "mesh axis", axis, found.axis_names)
                + " axis_name says which of them are data parallel."
            )
    # The context's, since within a jax.shard_map it is the one that knows.
    kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
    manual = [axis for axis in axes if kinds.get(axis) == AxisType.Manual]
    if manual:
        raise ValueError(
            f"{CALL}(axis_name={axes!r}): axis {manual[0]!r} is manual here already, inside a"
            " jax.shard_map over it; use jax.value_and_grad and gradients.sync there, or call"
            f" {CALL} outside"
        )
    return found


def positions_of(argnums: Any, num_args: int) -> tuple[int, ...]:
    """Returns the differentiated positions, each at least 0.

    Raises:
      TypeError: they are no integers.
      ValueError: one is out of range, or repeated.
    """
    given = (argnums,) if isinstance(argnums, int | np.integer) else argnums
    if not isinstance(given, tuple | list) or not all(
        isinstance(i, int | np.integer) and not isinstance(i, bool) for i in given
    ):
        raise TypeError(f"{CALL}(argnums={argnums!r}): must be an integer or a tuple of them")
    for i in given:
        if not -num_args <= i < num_args:
            raise ValueError(
                f"{CALL}(argnums={argnums!r}): {i} is out of range for {num_args}"
                " positional arguments; parameters are to be passed by position"
            )
    positions = tuple(int(i) % num_args for i in given)
    if len(set(positions)) < len(positions) or not positions:
        raise ValueError(
            f"{CALL}(argnums={argnums!r}): must name each argument once, and at least one"
        )
    return positions


def param_cuts(
    params: tuple[Any, ...], param_specs: Any, is_tuple: bool, axes: tuple[str, ...], mesh: Any
) -> list[PartitionSpec | None]:
    """Returns how each parameter is divided over axes that are left to the partitioner.

    Args:
      params: the differentiated arguments.
      param_specs: as `value_and_grad` takes it.
      is_tuple: whether ``argnums`` is a sequence, and ``param_specs`` of tuples therefore.
      axes: the data-parallel axes.
      mesh: the mesh.

    Returns:
      A spec for each leaf; None where it is not known.

    Raises:
      ValueError: ``param_specs`` does not fit, or a parameter is divided over one of ``axes``.
    """
    tree: Any = params if is_tuple else params[0]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    given: list[Any] = [None] * len(leaves)
    if param_specs is not None:
        try:
            given = per_leaf(param_specs, tree)
        except ValueError as error:
            raise ValueError(
                f"{CALL}(param_specs=...): no pytree prefix of the parameters: {error}"
            ) from None
        given = [_as_spec(spec) for spec in given]
    cuts: list[PartitionSpec | None] = []
    for (path, leaf), spec in zip(leaves, given, strict=True):
        label = jax.tree_util.keystr(path) or "the parameter"
        cut = _own_spec(leaf, mesh) if spec is None else spec
        if cut is not None:
            _check_cut(label, leaf, cut, axes, mesh)
        cuts.append(cut)
    return cuts


def _sharding(leaf: Any) -> NamedSharding | None:
    """Returns where an array lies, as far as is known; its axes are those of a mesh."""
    if isinstance(leaf, jax.core.Tracer):
        typed = jax.typeof(leaf).sharding
        return None if typed.mesh.empty else typed
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _own_spec(leaf: Any, mesh: Any) -> PartitionSpec | None:
    """Returns how a parameter is divided, as far as it shows itself; None where it does not."""
    sharding = _sharding(leaf)
    if sharding is None:
        # What is placed nowhere goes to all devices alike.
        return None if isinstance(leaf, jax.core.Tracer) else PartitionSpec()
    is_explicit = all(t == AxisType.Explicit for t in sharding.mesh.axis_types)
    if isinstance(leaf, jax.core.Tracer) and not is_explicit:
        return None  # Auto axes do not show in the type.
    return sharding.spec if sharding.mesh.axis_names == mesh.axis_names else None


def _as_spec(spec: Any) -> PartitionSpec:
    if isinstance(spec, NamedSharding):
        return spec.spec
    if spec is None:
        return PartitionSpec()
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{CALL}(param_specs=...): {spec!r} is no jax.sharding.PartitionSpec or NamedSharding"
        )
    return spec


def _check_cut(label: str, leaf: Any, spec: Any, axes: tuple[str, ...], mesh: Any) -> None:
    if len(spec) > np.ndim(leaf):
        raise ValueError(
            f"{CALL}(param_specs=...): {spec} for {label} of shape {np.shape(leaf)} has more"
            " entries than it has dimensions"
        )
    entries = cut_rules.entries(spec, np.ndim(leaf), set().union(*map(_listed, spec)))
    for axis in (axis for names in entries for axis in names):
        if axis not in mesh.axis_names:
            raise ValueError(
                unknown(f"{CALL}: {spec} of {label}", "mesh axis", axis, mesh.axis_names)
            )
        if axis in axes and mesh.shape[axis] > 1:
            rest = tuple(a for a in axes if a != axis)
            fix = (
                f"leave the axis to the partitioner with axis_name={rest!r}, which shards the"
                " parameters and their gradients over it (FSDP)"
                if rest
                else "use jax.value_and_grad under jax.jit, where the partitioner does it"
            )
            raise ValueError(
                f"{CALL}(axis_name={axes!r}): {label} is divided over {axis!r} by {spec}, and"
                f" parameters are whole along the data-parallel axes; {fix}, or replicate it"
            )


def _listed(entry: Any) -> set[str]:
    return set(entry) if isinstance(entry, tuple) else set() if entry is None else {entry}
