"""Between arrays as users see them and payloads as stages take them.

A stage works on flat payloads (see `xcoll.lower.run_stage`). The sites of a group are
packed into one payload by rows, carried together, and unpacked bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xcoll.schedule import SCATTERED as SCATTERED
from xcoll.schedule import TO_SHARES

WHOLE = ("all_reduce", "broadcast", "reduce")
"""Collectives whose payload is one row, of the operand's size."""

_move: Any = np.moveaxis
"""By an array's own methods: jax's arrays and tracers stay what they are, and so do NumPy's."""

GATHERED = ("all_gather", "all_to_all", "gather")
"""Collectives whose result is one row a rank."""


def to_rows(collective: str, params: Mapping[str, Any], x: jax.Array, num_ranks: int) -> jax.Array:
    """Returns the operand as ``(rows, elements)``: one row a rank, or a single one."""
    if collective not in SCATTERED:
        return x.reshape(1, -1)
    dimension = params.get("split_axis" if collective == "all_to_all" else "scatter_dimension", 0)
    return _move(x, dimension, 0).reshape(num_ranks, -1)


def from_rows(
    collective: str,
    params: Mapping[str, Any],
    rows: jax.Array,
    shape: tuple[int, ...],
    num_ranks: int,
) -> jax.Array:
    """Returns the result that belongs to an operand of ``shape``; inverse of `to_rows`.

    Args:
      collective: the schedules' name.
      params: parameters of the equation, as jax.lax's primitives have them; xcoll's own gather and
        scatter have neither dimension nor ``tiled``: they stack along the first.
      rows: ``(num_ranks, elements)`` where the result is gathered, else ``(1, elements)``.
      shape: shape of the operand of the equation.
      num_ranks: number of ranks.
    """
    if collective in WHOLE or collective == "permute":
        return rows.reshape(shape)
    if collective in TO_SHARES:
        d = params.get("scatter_dimension", 0)
        rest = shape[:d] + shape[d + 1 :]
        if not params.get("tiled", False):
            return rows.reshape(rest)
        return _move(rows.reshape(shape[d] // num_ranks, *rest), 0, d)
    if collective == "all_to_all":
        # As in jax.lax's primitive the exchange is always tiled.
        split, concat = params["split_axis"], params["concat_axis"]
        rest = shape[:split] + shape[split + 1 :]
        part = _move(rows.reshape(num_ranks, shape[split] // num_ranks, *rest), 1, split + 1)
        return _merge(part, concat)
    d = params.get("all_gather_dimension", 0)
    stacked = rows.reshape(num_ranks, *shape)
    return _merge(stacked, d) if params.get("tiled", False) else _move(stacked, 0, d)


def _merge(x: jax.Array, dimension: int) -> jax.Array:
    """Merges the leading dimension into ``dimension`` of the rest, ranks outermost."""
    x = _move(x, 0, dimension)
    shape = x.shape
    merged = shape[dimension] * shape[dimension + 1]
    return x.reshape(*shape[:dimension], merged, *shape[dimension + 2 :])


def pack(rows: Sequence[jax.Array], block: int = 1) -> jax.Array:
    """Puts the sites of a group side by side: ``(rows, sum of elements)``.

    Each site is padded to whole blocks, so that no block of a codec holds values of two.
    """
    padded = [jnp.pad(r, ((0, 0), (0, -r.shape[1] % block))) for r in rows]
    return padded[0] if len(padded) == 1 else jnp.concatenate(padded, axis=1)


def unpack(rows: jax.Array, elements: Sequence[int], block: int = 1) -> list[jax.Array]:
    """Takes ``pack``'s result apart again: one ``(rows, elements[i])`` a site."""
    parts, start = [], 0
    for count in elements:
        parts.append(rows[:, start : start + count])
        start += count + -count % block
    return parts


def row_elements(collective: str, shape: tuple[int, ...], num_ranks: int) -> int:
    """Returns how many elements of a row belong to an operand of ``shape``."""
    size = math.prod(shape)
    return size // num_ranks if collective in SCATTERED else size
