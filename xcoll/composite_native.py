"""What the collectives that jax.lax lacks mean, in terms of those it has.

This is also how they are lowered where the plan is ``native``. Data movement is exact bit for
bit: a broadcast by summing masked values would lose the sign of zero and the payload of NaN, so
it sums masked bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
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
    return moved(lambda x: on_root(lax.all_gather(x, axes), axes, root), x)


def native_pscatter(x: Any, *, axes: Axes, root: int) -> Any:
    """Exchanges slices among all ranks, and keeps the one that the root sent."""
    return moved(lambda x: lax.all_to_all(x, axes, 0, 0)[root], x)


def native_pbroadcast(x: Any, *, axes: Axes, root: int) -> Any:
    """Sums bit patterns, which are zero on all ranks but the root."""
    return from_bits(lax.psum(on_root(to_bits(x), axes, root), axes), x.dtype)


def moved(move: Callable[[Any], Any], x: Any) -> Any:
    """Applies a movement of data, as bit patterns where the dtype is a narrow float.

    XLA:CPU carries bfloat16 in float32, twice the bytes, and loses the payload of NaN on the way.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or _bit_width(x.dtype) >= 32:
        return move(x)
    return from_bits(move(to_bits(x)), x.dtype)


def to_bits(x: Any) -> Any:
    """Returns the bit pattern of ``x``, as unsigned integers of at least a byte.

    Complex numbers get a new leading dimension, of their real and imaginary parts.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([to_bits(lax.real(x)), to_bits(lax.imag(x))])
    width = _bit_width(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
    return bits.astype(jnp.uint8) if width < 8 else bits


def from_bits(bits: Any, dtype: Any) -> Any:
    """Returns the array of ``dtype`` that `to_bits` was given."""
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        return lax.complex(from_bits(bits[0], part), from_bits(bits[1], part))
    width = _bit_width(dtype)
    return lax.bitcast_convert_type(
        bits.astype(jnp.dtype(f"uint{width}")) if width < 8 else bits, dtype
    )


def _bit_width(dtype: Any) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def _lower_pprod(ctx: mlir.LoweringRuleContext, x: Any, *, axes: Axes) -> Any:
    return _compat.lower_all_reduce(ctx, x, lax.mul_p, axes=axes)


def _lower_pbroadcast(ctx: mlir.LoweringRuleContext, x: Any, **params: Any) -> Any:
    # XLA has a collective broadcast on GPUs alone. A program for several platforms gets the general
    # form: XLA:CPU refuses the other one even in a branch that it never takes.
    on_gpu = set(ctx.platforms or ctx.module_context.platforms) <= {"cuda", "rocm"}
    return (_lower_gpu_pbroadcast if on_gpu else _lower_any_pbroadcast)(ctx, x, **params)


_lower_any_pbroadcast = _compat.lower_unchecked(native_pbroadcast)
_lower_gpu_pbroadcast = _compat.lower_unchecked(
    lambda x, *, axes, root: lax.pbroadcast(x, axes, root)
)


def _unless_empty(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Moves nothing for an empty result: it has no values that could depend on other ranks."""

    def lower(ctx: mlir.LoweringRuleContext, x: Any, **params: Any) -> Any:
        (out,) = ctx.avals_out
        if out.size:
            return rule(ctx, x, **params)
        return _compat.lower_unchecked(lambda x: jnp.zeros(out.shape, out.dtype))(ctx, x)

    return lower


for _p, _lowering in (
    (pprod_p, _lower_pprod),
    (pbroadcast_p, _lower_pbroadcast),
    (preduce_p, _compat.lower_unchecked(native_preduce)),
    (pgather_p, _compat.lower_unchecked(native_pgather)),
    (pscatter_p, _compat.lower_unchecked(native_pscatter)),
):
    mlir.register_lowering(_p, _unless_empty(_lowering))
