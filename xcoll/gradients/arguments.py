"""The arguments of a data-parallel function: what is divided over ranks, and how parameters lie."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xcoll import cut_rules
from xcoll.errors import UnknownAxisError, unknown

CALL = "value_and_grad"
ARRAYS = (jax.Array, np.ndarray, np.generic)


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
            f"{CALL}: there is no mesh: none is given or set, and no argument is placed on one"
            f" (inside jax.jit only Explicit axes show); pass {CALL}(..., mesh=mesh), or call it"
            " under jax.set_mesh(mesh)"
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


def batch_specs(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    differentiated: Sequence[int],
    in_axes: Any,
    axes: tuple[str, ...],
    mesh: Any,
) -> list[PartitionSpec | None]:
    """Returns how each leaf of the other arguments is divided over ranks.

    Args:
      fun: the function, whose parameters' names are for messages.
      args: positional arguments.
      kwargs: keyword arguments.
      differentiated: positions of the arguments to leave out.
      in_axes: as `value_and_grad` takes it.
      axes: the mesh axes of the ranks.
      mesh: with their sizes.

    Returns:
      A spec over ``axes`` for each leaf of ``(others, kwargs)``; None for what is no array.

    Raises:
      ValueError: a dimension does not divide, or ``in_axes`` does not fit the arguments.
      TypeError: ``in_axes`` is of a wrong type.
    """
    by_argument = _in_axes(in_axes, len(args), differentiated)
    names = _names(fun, len(args))
    found: list[PartitionSpec | None] = []
    named = [(names[i], args[i], by_argument[i]) for i in range(len(args))]
    named = [entry for i, entry in enumerate(named) if i not in differentiated]
    named += [(name, kwargs[name], 0) for name in sorted(kwargs)]
    for name, value, prefix in named:
        try:
            dimensions = per_leaf(prefix, value)
        except ValueError as error:
            raise ValueError(
                f"{CALL}(in_axes={in_axes!r}): {prefix!r} is no pytree prefix of argument"
                f" {name!r}: {error}"
            ) from None
        leaves = jax.tree_util.tree_leaves_with_path(value)
        for (path, leaf), dimension in zip(leaves, dimensions, strict=True):
            if not isinstance(leaf, ARRAYS):
                found.append(None)
                continue
            is_key = leaf.dtype == jnp.uint32 and leaf.shape == (2,) and isinstance(in_axes, int)
            if dimension is None or np.ndim(leaf) == 0 or is_key:
                found.append(PartitionSpec())
                continue
            label = f"{name}{jax.tree_util.keystr(path)}"
            found.append(_spec(label, leaf, dimension, axes, mesh))
    return found


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


def placed(leaf: Any, spec: PartitionSpec, axes: tuple[str, ...], mesh: Any) -> Any:
    """Returns an array divided as ``spec`` says over ``axes``, where its type has to say it.

    Over Auto axes `jax.shard_map` divides by itself; over Explicit ones a type that says otherwise
    is an error of jax.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in kinds.items() if kind == AxisType.Explicit}
    ndim, typed = np.ndim(leaf), jax.typeof(leaf).sharding.spec
    kept = cut_rules.entries(typed, ndim, explicit - set(axes))
    wanted = cut_rules.entries(spec, ndim, explicit & set(axes))
    full = tuple(a + b for a, b in zip(wanted, kept, strict=True))
    if full == cut_rules.entries(typed, ndim, explicit):
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(mesh, cut_rules.partition_spec(full)))


def per_leaf(prefix: Any, tree: Any) -> list[Any]:
    """Returns a pytree prefix's entry for each leaf of a tree; None is an entry.

    Raises:
      ValueError: it is no prefix.

    Example:
      >>> per_leaf((0, None), ({"a": 1.0, "b": 2.0}, 3.0))
      [0, 0, None]
    """
    values, structure = jax.tree.flatten(tree)
    numbered = jax.tree.unflatten(structure, range(len(values)))
    entries: list[Any] = [None] * len(values)

    def note(entry: Any, part: Any) -> None:
        for number in jax.tree.leaves(part):
            entries[number] = entry

    jax.tree.map(note, prefix, numbered, is_leaf=lambda v: v is None)
    return entries


def _in_axes(in_axes: Any, num_args: int, differentiated: Sequence[int]) -> list[Any]:
    if in_axes is None or (isinstance(in_axes, int) and not isinstance(in_axes, bool)):
        return [None if i in differentiated else in_axes for i in range(num_args)]
    if not isinstance(in_axes, tuple | list):
        raise TypeError(
            f"{CALL}(in_axes={in_axes!r}): must be an integer, None, or a tuple with one entry an"
            " argument, as jax.vmap's"
        )
    if len(in_axes) != num_args:
        raise ValueError(
            f"{CALL}(in_axes={in_axes!r}): {len(in_axes)} entries for {num_args} positional"
            " arguments; give one each"
        )
    for i in differentiated:
        if in_axes[i] is not None:
            raise ValueError(
                f"{CALL}(in_axes={in_axes!r}): argument {i} is differentiated (argnums), and so the"
                " same on every rank; its entry must be None"
            )
    return list(in_axes)


def _spec(label: str, leaf: Any, dimension: Any, axes: tuple[str, ...], mesh: Any) -> PartitionSpec:
    ndim, shape = np.ndim(leaf), np.shape(leaf)
    if isinstance(dimension, bool) or not isinstance(dimension, int):
        raise TypeError(f"{CALL}(in_axes=...): {dimension!r} for {label!r}: must be an integer")
    if not -ndim <= dimension < ndim:
        raise ValueError(
            f"{CALL}(in_axes={dimension}): out of range for argument {label!r} of shape {shape};"
            f" valid: {-ndim} to {ndim - 1}"
        )
    num_ranks = math.prod(mesh.shape[axis] for axis in axes)
    if shape[dimension] % num_ranks:
        raise ValueError(
            f"{CALL}: dimension {dimension} of argument {label!r} of shape {shape} has"
            f" {shape[dimension]} elements; it is divided over the {num_ranks} ranks of {axes} and"
            " must be a multiple of them: pad the batch (and leave the padding out of the loss), or"
            " give the argument in_axes of None if it is no part of the batch"
        )
    return PartitionSpec(*(None,) * (dimension % ndim), axes)


def _names(fun: Callable[..., Any], num_args: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(num_args)]


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
