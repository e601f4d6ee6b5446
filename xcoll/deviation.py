"""How far a collective's results are from the exact ones, computed in NumPy in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xcoll import payload
from xcoll.costmodel import block_of
from xcoll.plan import Plan, Request
from xcoll.schedule import FROM_SHARES

_FLOOR = 2.0**-126
"""What a rounding may add to a law of relative error: smaller magnitudes count as zero."""

_REDUCE: Mapping[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "prod": np.multiply.reduce,
}


def deviation(
    plan: Plan,
    params: Mapping[str, Any],
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
) -> float:
    """Returns the largest error of one site over the magnitude of what its ranks put in.

    ``max over blocks |result - exact| / sum over ranks of the block's largest magnitude``; a block
    is that of the plan's codecs, or the whole operand where they have none. Of moved data the one
    rank counts that it comes from. Errors below 2**-126 a rounding are none, and blocks are left
    out into which a rank puts what is not finite.

    Args:
      plan: what was done.
      params: parameters of the equation that it was.
      operands: each rank's, in order.
      results: each rank's.

    Returns:
      The error, 0 where nothing was rounded.
    """
    request = plan.request
    shape, num_ranks = operands[0].shape, request.num_ranks
    block = block_of(plan.stages)
    is_whole = all(stage.codec is None or not stage.codec.block for stage in plan.stages)

    def rows_of(x: Any) -> np.ndarray:
        return np.asarray(payload.to_rows(request.collective, params, x, num_ranks))

    def result_of(rows: Any) -> np.ndarray:
        made = payload.from_rows(request.collective, params, rows, shape, num_ranks)
        return np.asarray(made)

    values = [rows_of(_wide(x)) for x in operands]
    sizes = [_largest(np.abs(v.astype(_double(v))), 0 if is_whole else block) for v in values]
    worst = 0.0
    for rank, result in enumerate(results):
        with np.errstate(all="ignore"):
            exact = result_of(_combine(request, request.op, values, rank))
            size = result_of(_combine(request, "sum", sizes, rank)).real
            error = np.abs(result.astype(_double(result)) - exact.astype(_double(exact)))
            error = np.where(error <= _FLOOR * (num_ranks + 1), 0, error)
            ratio = np.where(error == 0, 0, error / size)[np.isfinite(size)]
        worst = max(worst, float(ratio.max(initial=0.0)))
    return worst


def _wide(x: np.ndarray) -> np.ndarray:
    """Returns floats in double precision; integers as they are, since their sums wrap around."""
    return x if x.dtype.kind in "biu" else x.astype(_double(x))


def _double(x: np.ndarray) -> Any:
    return np.complex128 if x.dtype.kind == "c" else np.float64


def _largest(rows: np.ndarray, block: int) -> np.ndarray:
    """Returns for each element the largest magnitude of its block; of everything for block 0."""
    if block == 0:
        return np.full(rows.shape, rows.max(initial=0.0))
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
    largest = padded.reshape(len(rows), -1, block).max(axis=2)
    return np.repeat(largest, block, axis=1)[:, : rows.shape[1]]


def _combine(request: Request, op: str, rows: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """Returns what a rank gets of all ranks' rows: what the collective means."""
    collective, own = request.collective, slice(rank, rank + 1)
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        parts = [r[own] for r in rows] if collective == "reduce_scatter" else rows
        out = _REDUCE[op](np.stack(parts), axis=0, dtype=rows[0].dtype)
        return out if collective != "reduce" or rank == request.root else np.zeros_like(out)
    if collective == "all_to_all":
        return np.concatenate([r[own] for r in rows])
    if collective in FROM_SHARES:
        out = np.concatenate(rows)
        return out if collective == "all_gather" or rank == request.root else np.zeros_like(out)
    if collective == "permute":
        sources = [source for source, destination in request.pairs if destination == rank]
        return rows[sources[0]] if sources else np.zeros_like(rows[0])
    return rows[request.root] if collective == "broadcast" else rows[request.root][own]
