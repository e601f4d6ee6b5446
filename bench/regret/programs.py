"""Programs that carry out a given plan, their operands, and the results that they must have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.regret.grid import AXES, REDUCING, Case
from xcoll.plan import Plan
from xcoll.stages import carry_out

_LARGEST = 8
"""Values are whole numbers up to this: sums of them are exact in any order."""

_PARAMS: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "reduce_scatter": {"scatter_dimension": 0, "tiled": True},
    "all_gather": {"all_gather_dimension": 0, "tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 0},
}
"""Parameters of the equations that plans replace."""

_NATIVE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: lax.psum(x, AXES),
    "reduce_scatter": lambda x: lax.psum_scatter(x, AXES, tiled=True),
    "all_gather": lambda x: lax.all_gather(x, AXES, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXES, 0, 0, tiled=True),
}


def values(rank: int, start: int, stop: int) -> np.ndarray:
    """Returns some elements of a rank's operand: whole numbers, no two ranks' alike."""
    numbers = np.arange(start, stop, dtype=np.int64)
    span = 2 * _LARGEST + 1
    return ((numbers * 5 + rank * 3) % span - _LARGEST).astype(np.float32)


def operand(case: Case, mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns the operands of all ranks, one after another along the only dimension."""
    elements = case.operand_elements

    def part(index: Any) -> np.ndarray:
        return values((index[0].start or 0) // elements, 0, elements)

    sharding = jax.sharding.NamedSharding(mesh, jax.P(AXES))
    return jax.make_array_from_callback((elements * case.setting.ranks,), sharding, part)


def expected(case: Case, rank: int) -> np.ndarray:
    """Returns what a rank has to hold afterwards, computed with NumPy alone."""
    elements, ranks = case.operand_elements, case.setting.ranks
    share = elements // ranks
    match case.collective:
        case "all_reduce":
            return np.sum([values(r, 0, elements) for r in range(ranks)], axis=0, dtype=np.float32)
        case "reduce_scatter":
            mine = [values(r, rank * share, (rank + 1) * share) for r in range(ranks)]
            return np.sum(mine, axis=0, dtype=np.float32)
        case "all_gather":
            return np.concatenate([values(r, 0, elements) for r in range(ranks)])
        case _:
            mine = [values(r, rank * share, (rank + 1) * share) for r in range(ranks)]
            return np.concatenate(mine)


def program(plan: Plan, mesh: jax.sharding.Mesh) -> Any:
    """Returns a jitted function of all ranks' operands that carries out a plan.

    A native plan is jax.lax's own collective: the program that a user would have had.
    """
    collective = plan.request.collective

    def run(x: jax.Array) -> jax.Array:
        if plan.is_native:
            return _NATIVE[collective](x)
        (result,) = carry_out(plan, [_PARAMS[collective]], mesh.axis_names, [x])
        return jnp.asarray(result)

    spec = jax.P(AXES)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def tolerance(plan: Plan) -> float:
    """Returns by how much a result may differ: nothing where no codec is used, else by its law."""
    if not plan.is_lossy:
        return 0.0
    sources = plan.request.num_ranks if plan.request.collective in REDUCING else 1
    return plan.max_error * sources * _LARGEST


def check(case: Case, plan: Plan, result: jax.Array, wanted: dict[int, np.ndarray]) -> None:
    """Stops where a result is not what it has to be.

    Args:
      case: what was done.
      plan: how.
      result: of all ranks, one after another.
      wanted: what the ranks of this process have to hold.

    Raises:
      SystemExit: a rank holds something else.
    """
    largest = tolerance(plan)
    for shard in result.addressable_shards:
        held = np.asarray(shard.data)
        rank = (shard.index[0].start or 0) // held.size
        difference = float(np.max(np.abs(held - wanted[rank]), initial=0.0))
        if not difference <= largest or math.isnan(difference):
            raise SystemExit(
                f"{case}: by {plan.name}, rank {rank} is off by {difference:g}; at most"
                f" {largest:g} is allowed. Nothing was timed"
            )
