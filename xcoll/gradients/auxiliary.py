"""What ranks return beside the loss: how theirs become the whole batch's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xcoll import collectives
from xcoll.errors import unknown
from xcoll.gradients.batches import per_leaf

REDUCTIONS = {
    "mean": collectives.pmean,
    "sum": collectives.psum,
    "max": collectives.pmax,
    "min": collectives.pmin,
}
OPS = (*REDUCTIONS, "concatenate")


def combine(
    call: str, aux: Any, aux_op: Any, axes: tuple[str, ...]
) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
    """Combines the ranks' auxiliary outputs, inside `jax.shard_map`.

    Args:
      call: the public function, for messages.
      aux: pytree of one rank's arrays.
      aux_op: a name of `OPS` for each leaf, or a pytree prefix of them; None takes the mean of
        float scalars and nothing else.
      axes: the mesh axes of the ranks.

    Returns:
      For each leaf what is the same on all ranks, or None; and what is to be concatenated along its
      first dimension, or None. See `merge`.

    Raises:
      TypeError: a leaf is no array.
      ValueError: what to do with a leaf is not said, or not possible.
    """
    try:
        ops = per_leaf(aux_op, aux)
    except ValueError as error:
        raise ValueError(
            f"{call}(aux_op={aux_op!r}): must be one of {', '.join(OPS)}, or a pytree of them that"
            f" is a prefix of aux, {jax.tree.structure(aux)}: {error}"
        ) from None
    same: list[jax.Array | None] = []
    rows: list[jax.Array | None] = []
    for (path, leaf), op in zip(jax.tree_util.tree_leaves_with_path(aux), ops, strict=True):
        value = _as_array(call, f"aux{jax.tree_util.keystr(path)}", leaf)
        _check(call, f"aux{jax.tree_util.keystr(path)}", value, op)
        if op == "concatenate":
            same.append(None)
            rows.append(value)
        else:
            if op == "sum" and value.dtype == jnp.bool_:
                value = value.astype(jnp.int32)  # A count, as jnp.sum's.
            same.append(reduce(op or "mean", value, axes))
            rows.append(None)
    return same, rows


def reduce(op: str, x: jax.Array, ranks: tuple[str, ...]) -> jax.Array:
    """Reduces over ranks, floats narrower than float32 in float32; returns the dtype of ``x``."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    wide = x.astype(jnp.float32) if is_narrow else x
    return REDUCTIONS[op](wide, ranks).astype(x.dtype)


def merge(same: list[Any], rows: list[Any]) -> list[Any]:
    """Returns the leaves in their order, from the two lists of `combine`."""
    return [b if a is None else a for a, b in zip(same, rows, strict=True)]


def _as_array(call: str, name: str, leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise TypeError(
            f"{call}(has_aux=True): {name} is a {type(leaf).__name__}, not an array; return what"
            " is no array some other way"
        ) from None


def _check(call: str, name: str, value: jax.Array, op: Any) -> None:
    dtype, shape = value.dtype, value.shape
    where = f"{name} of dtype {dtype} and shape {shape} on each rank"
    if op is None:
        if jnp.issubdtype(dtype, jnp.inexact) and shape == ():
            return
        raise ValueError(
            f"{call}(has_aux=True): {where}: only float scalars are averaged unasked; say what it"
            " is of the whole batch: aux_op='concatenate' (a row an example), 'sum' (a count),"
            " 'mean' (a statistic), 'max' or 'min', or a pytree of these such as"
            " {'correct': 'sum', 'logits': 'concatenate'}"
        )
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(unknown(f"{call}(aux_op={op!r})", "op", op, OPS))
    if op == "concatenate":
        if shape == ():
            raise ValueError(
                f"{call}(aux_op='concatenate'): {where} has no dimension to concatenate along; use"
                " 'mean', 'sum', 'max' or 'min', or return it with a dimension: value[None]"
            )
        return
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
    if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"{call}(aux_op='mean'): {where}: a mean of {dtype} is none; use 'sum', which counts"
            " exactly, or return it as a float"
        )
    if not is_number or (op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating)):
        fix = "use 'concatenate', or leave it out" if shape else "leave it out"
        raise ValueError(f"{call}(aux_op={op!r}): {where} has no {op}; {fix}")
