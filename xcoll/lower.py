"""The one lowering of schedules: from data to `jax.lax` operations.

`run_stage` runs inside a manual computation (the body of a shard_map) with checks of
varying axes off; `xcoll.primitives` gives the results their types back.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from xcoll.algorithms import build
from xcoll.compress import MOVES
from xcoll.execute import Run
from xcoll.plan import Stage
from xcoll.ranks import Ranks
from xcoll.schedule import FROM_SHARES, slot_elements
from xcoll.wire import Wire


def run_stage(
    x: jax.Array,
    stage: Stage,
    axis_sizes: Mapping[str, int],
    op: str,
    root: int,
    *,
    block: int = 1,
    wire: Wire | None = None,
    in_place: bool = False,
) -> jax.Array:
    """Carries out one stage on a rank's payload.

    Args:
      x: the payload of this rank. ``(N,)`` for all_reduce, broadcast and reduce; ``(n, m)``, one
        row a rank, for reduce_scatter, all_to_all and scatter; ``(m,)`` for all_gather and
        gather. For an all_reduce cut into stages, the reduce_scatter takes ``(N,)`` too.
      stage: what to do.
      axis_sizes: size of each mesh axis.
      op: how values combine.
      root: position of the root in the span, for rooted collectives.
      block: slots are whole blocks of so many elements.
      wire: how slots travel, if a codec encodes them; ``x`` is then float32.
      in_place: as for `xcoll.execute.Run`.

    Returns:
      ``(N,)``; ``(m,)`` after reduce_scatter and scatter; ``(n, m)`` after the others.
    """
    ranks = Ranks(stage.span, axis_sizes, stage.beside)
    n = ranks.num_ranks
    schedule = build(stage.choice, stage.collective, n, dims=stage.dims, root=root)
    share = schedule.share

    def run(slots: jax.Array) -> jax.Array:
        if stage.num_chunks == 1:
            return carry(slots)
        # No chunk needs another, so that what computes need not wait for what is on the wire.
        chunks = jnp.split(slots, stage.num_chunks, axis=1)
        return jnp.concatenate([carry(chunk) for chunk in chunks], axis=1)

    def carry(slots: jax.Array) -> jax.Array:
        if wire is None or stage.collective not in MOVES:
            return Run(schedule, ranks, op, wire, in_place=in_place)(slots)
        # What only moves is encoded once, by its owner.
        moved = Run(schedule, ranks, op, in_place=in_place)(wire.encode(slots))
        return wire.decode(moved, slots.shape[1])

    def cut(rows: jax.Array, slots_per_row: int) -> jax.Array:
        elements = slot_elements(rows.shape[1], slots_per_row, block)
        return cut_rows(rows, slots_per_row, elements, is_flat=wire is not None)

    if stage.collective in ("all_reduce", "broadcast", "reduce"):
        num_slots = share if schedule.enter == "own" else schedule.num_slots
        return run(cut(x[None], num_slots)).reshape(-1)[: x.size]
    if stage.collective in FROM_SHARES:
        return run(cut(x[None], share)).reshape(n, -1)[:, : x.size]
    if x.ndim == 1:
        return run(cut(x[None], schedule.num_slots)).reshape(-1)
    m = x.shape[1]
    slots = run(cut(x, share))
    if stage.collective == "all_to_all":
        return slots.reshape(n, -1)[:, :m]
    return slots.reshape(-1)[:m]


def cut_rows(
    rows: jax.Array, slots_per_row: int, elements: int, *, is_flat: bool = False
) -> jax.Array:
    """Pads each row and cuts it into slots: ``(rows * slots_per_row, ...)``.

    Slots of whole tiles are kept two-dimensional, unless they are to be flat: a TPU turns the
    reduce-scatter of flat operands into an all-reduce.
    """
    rows = jnp.pad(rows, ((0, 0), (0, slots_per_row * elements - rows.shape[1])))
    is_tiled = elements % 1024 == 0 and not is_flat
    slot = (elements // 128, 128) if is_tiled else (elements,)
    return rows.reshape(-1, *slot)
