"""Functional collectives: jax.lax's names, arguments and results, and a ``policy=``.

Each call is a region of its own (`xcoll.primitives`): planned by itself when it is lowered,
differentiated and batched as jax.lax's collective is. Beyond jax.lax there are `pprod`,
`all_reduce`, `preduce`, `pgather`, `pscatter` and `barrier`, in the same style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xcoll import composites
from xcoll.algorithms import check_choice, supports
from xcoll.errors import UnknownAxisError, unknown
from xcoll.policy import COLLECTIVE_OF, Policy, check_policy
from xcoll.primitives import Region, bind

Axes = str | tuple[str, ...] | list[str]
OPS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""The operations of `all_reduce` and `preduce`."""


def psum(x: Any, axis_name: Axes, *, axis_index_groups: Any = None, policy: Policy | None = None):
    """Sums ``x`` over mesh axes, as `jax.lax.psum`.

    Args:
      x: pytree of arrays, per shard; booleans are summed as int32.
      axis_name: mesh axis, or a tuple of them.
      axis_index_groups: as in jax.lax; the sum is then XLA's own.
      policy: what xcoll may do; None lets it choose. A forced algorithm that cannot do it is an
        error.

    Returns:
      The sums, same shapes, in the dtype of ``x``; replicated over the axes. Partial sums are
      rounded in that dtype too.

    Raises:
      NameError: there is no such axis, or the call is outside `jax.shard_map`.
      TypeError: a leaf is no array, or no number.

    Example:
      >>> import jax, jax.numpy as jnp, xcoll
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> total = jax.shard_map(lambda x: xcoll.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> print(total(jnp.arange(4.0)))
      [6.]
    """
    call = _Call("psum", axis_name, policy)
    call.check_numbers(x)
    return call.run(lambda x: lax.psum(x, call.axes, axis_index_groups=axis_index_groups), x)
