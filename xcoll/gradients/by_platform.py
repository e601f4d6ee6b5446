"""Codecs inside a traced update: in the form of the platform that the program is lowered for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType


def by_platform(
    call: Callable[..., jax.Array], x: jax.Array, *, kernels: bool = True, **options: Any
) -> jax.Array:
    """Calls a codec's method with the platform that the program is lowered for.

    Args:
      call: ``encode`` or ``decode`` of a codec, or one with the same ``platform`` and ``kernels``.
      x: its first argument.
      kernels: whether Pallas kernels may be used.
      **options: its other arguments.

    Returns:
      What it returns; the same bits on every platform. Kernels run where every mesh axis is manual:
      elsewhere the partitioner would have to cut them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    cut = any(kinds[a] != AxisType.Manual and n > 1 for a, n in mesh.shape.items())
    kernels = kernels and not mesh.empty and not cut
    forms = {
        name: partial(call, platform=platform, kernels=kernels, **options)
        for name, platform in (("cpu", "cpu"), ("tpu", "tpu"), ("cuda", "gpu"))
    }
    other = partial(call, platform="gpu", kernels=False, **options)
    return lax.platform_dependent(x, default=other, **forms)
