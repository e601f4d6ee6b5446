"""How the arguments that are not differentiated are divided over ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xcoll import cut_rules

CALL = "value_and_grad"
ARRAYS = (jax.Array, np.ndarray, np.generic)


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
