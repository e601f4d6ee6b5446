"""What the collectives that jax.lax lacks mean, in terms of those it has.

This is also how they are lowered where the plan is ``native``. Data movement is exact bit for
bit: a broadcast by summing masked values would lose the sign of zero and the payload of NaN, so
it sums masked bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from xcoll import _compat
from xcoll.composite_types import (
    Axes,
    pbroadcast_p,
    pgather_p,
    pprod_p,
    preduce_p,
    pscatter_p,
)

ALL_REDUCE: dict[str, Callable[[Any, Axes], Any]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    "prod": lambda x, axes: pprod_p.bind(x, axes=axes),
}
"""The all-reduce of each op that a reduction to one rank can have."""


def on_root(x: Any, axes: Axes, root: int) -> Any:
    """Returns ``x`` on rank ``root`` and zeros elsewhere."""
    return jnp.where(lax.axis_index(axes) == root, x, jnp.zeros_like(x))


def native_preduce(x: Any, *, axes: Axes, root: int, op: str) -> Any:
    """Reduces on every rank, and keeps the result of the root."""
    return on_root(ALL_REDUCE[op](x, axes), axes, root)


def native_pgather(x: Any, *, axes: Axes, root: int) -> Any:
    """Gathers on every rank, and keeps the result of the root."""
    return on_root(lax.all_gather(x, axes), axes, root)


def native_pscatter(x: Any, *, axes: Axes, root: int) -> Any:
    """Exchanges slices among all ranks, and keeps the one that the root sent."""
    return lax.all_to_all(x, axes, 0, 0)[root]


def native_pbroadcast(x: Any, *, axes: Axes, root: int) -> Any:
    """Sums bit patterns, which are zero on all ranks but the root."""
    bits, restore = _to_bits(x)
    return restore(lax.psum(on_root(bits, axes, root), axes))


def _to_bits(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns ``x`` as unsigned integers of at least a byte, and the way back."""
    dtype = x.dtype
    if dtype == jnp.bool_:
        return x.astype(jnp.uint8), lambda bits: bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        bits, restore = _to_bits(jnp.stack([lax.real(x), lax.imag(x)]))
        return bits, lambda b: lax.complex(*restore(b))
    width = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
    word = np.dtype(f"uint{max(width, 8)}")
    if width >= 8:
        return lax.bitcast_convert_type(x, word), partial(lax.bitcast_convert_type, new_dtype=dtype)
    narrow = jnp.dtype(f"uint{width}")
    return lax.bitcast_convert_type(x, narrow).astype(word), lambda bits: lax.bitcast_convert_type(
        bits.astype(narrow), dtype
    )


def _gpu_pbroadcast(x: Any, *, axes: Axes, root: int) -> Any:
    return lax.pbroadcast(x, axes, root)


def _lower_pprod(ctx: mlir.LoweringRuleContext, x: Any, *, axes: Axes) -> Any:
    return _compat.lower_all_reduce(ctx, x, lax.mul_p, axes=axes)


mlir.register_lowering(pprod_p, _lower_pprod)
for _p, _meaning in (
    (preduce_p, native_preduce),
    (pgather_p, native_pgather),
    (pscatter_p, native_pscatter),
    (pbroadcast_p, native_pbroadcast),
):
    mlir.register_lowering(_p, _compat.lower_unchecked(_meaning))
# XLA has a collective broadcast on GPUs alone.
mlir.register_lowering(pbroadcast_p, _compat.lower_unchecked(_gpu_pbroadcast), platform="gpu")
