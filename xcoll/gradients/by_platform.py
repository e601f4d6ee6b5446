"""Codecs inside a traced update: kernels where the program is lowered for TPU or GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType


def by_platform(call: Callable[..., jax.Array], x: jax.Array, **options: Any) -> jax.Array:
    """Calls a codec's method with the platform that the program is lowered for.

    Args:
      call: ``encode`` or ``decode`` of a codec, or one with the same ``platform`` and ``kernels``.
      x: its first argument.
      **options: its other arguments.

    Returns:
      What it returns; the same bits on every platform. Kernels run where every mesh axis is manual:
      elsewhere the partitioner would have to cut them.
    """
    reference = partial(call, kernels=False, **options)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if mesh.empty or any(kinds[a] != AxisType.Manual and n > 1 for a, n in mesh.shape.items()):
        return reference(x)
    kernels = {
        name: partial(call, platform=platform, **options)
        for name, platform in (("tpu", "tpu"), ("cuda", "gpu"))
    }
    return lax.platform_dependent(x, default=reference, **kernels)
