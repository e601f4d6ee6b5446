"""How the ranks' gradients become the whole batch's: averaged by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from xcoll import collectives, cut_rules
from xcoll.primitives import Region, bind, is_disabled


def mean(
    grads: Any, cuts: Sequence[PartitionSpec | None], ranks: tuple[str, ...], region: Region
) -> Any:
    """Averages gradients over ranks, inside `jax.shard_map`.

    Args:
      grads: pytree of one rank's gradients.
      cuts: how each is divided over the partitioner's axes; None where it is not known.
      ranks: the mesh axes of the ranks.
      region: what xcoll may do, and where it reports.

    Returns:
      The means, of the gradients' dtypes.
    """
    leaves, structure = jax.tree.flatten(grads)

    def means(grads: list[Any]) -> list[Any]:
        wide = [g.astype(_carried(g.dtype)) for g in grads]
        cut = [_constrained(g, cut) for g, cut in zip(wide, cuts, strict=True)]
        out = collectives.pmean(cut, ranks)
        return [m.astype(g.dtype) for m, g in zip(out, grads, strict=True)]

    leaves = bind(means, region, leaves) if leaves and not is_disabled() else means(leaves)
    return jax.tree.unflatten(structure, leaves)


def _carried(dtype: Any) -> Any:
    """Returns the dtype that a gradient is averaged in, inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    # Beside axes of the partitioner XLA:CPU aborts on a bfloat16 all-reduce, "Invalid binary
    # instruction opcode copy"; elsewhere it carries one as float32 anyway.
    is_beside = len(mesh.manual_axes) < len(mesh.axis_names)
    return jnp.float32 if dtype == jnp.bfloat16 and is_beside and platform == "cpu" else dtype


def _constrained(x: Any, cut: PartitionSpec | None) -> Any:
    """Returns a gradient, cut over the partitioner's axes as its parameter is known to be."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if cut is None or not auto:
        return x
    entries = cut_rules.entries(cut, jnp.ndim(x), auto)
    return lax.with_sharding_constraint(x, cut_rules.partition_spec(entries))
