"""A barrier among ranks, as a function of data.

XLA runs what results depend on and nothing else, so a barrier holds for the arrays that pass
through it: they come out once all ranks have theirs. ``lax.optimization_barrier`` alone does not
do that: compilers remove it before they schedule, and XLA:CPU drops an all-reduce that only an
optimization barrier ties to the result. The dependences are therefore of data: the operand of the
all-reduce is computed from every element, and every element is chosen by its result, in a test
that always succeeds and that no compiler can know to succeed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from xcoll import _compat
from xcoll.composite_native import from_bits, to_bits
from xcoll.composite_types import Axes, check_axes

barrier_p = core.Primitive("xcoll_barrier")
"""The identity on any number of arrays, once all ranks over ``axes`` have theirs."""
barrier_p.multiple_results = True
barrier_p.def_impl(lambda *args, axes: jax.jit(lambda *a: barrier_p.bind(*a, axes=axes))(*args))


def bind_barrier(x: Any, axes: Axes) -> Any:
    """Returns ``x`` once all ranks have computed theirs.

    One all-reduce of four bytes for the whole pytree, and a pass over the data.
    The derivative is that of the identity, and waits for nobody.

    Args:
      x: pytree of per-shard arrays, of any types.
      axes: axis names, each once.

    Returns:
      ``x``, bit for bit and of the same types. What does not come from the returned arrays does
      not wait.

    Raises:
      UnknownAxisError: an axis is not bound.
    """
    check_axes("barrier", axes)
    leaves, tree = jax.tree.flatten(x)
    return jax.tree.unflatten(tree, barrier_p.bind(*leaves, axes=axes)) if leaves else x


def _native(*arrays: Any, axes: Axes) -> list[Any]:
    full = [a for a in arrays if a.size]  # an empty array has nothing to wait with
    waited = iter(_wait(full, axes) if full and lax.axis_size(axes) > 1 else full)
    return [next(waited) if a.size else a for a in arrays]


def _wait(arrays: list[Any], axes: Axes) -> list[Any]:
    *arrays, first = lax.optimization_barrier((*arrays, lax.axis_index(axes) == 0))
    # On each rank at most one for each array, and one on the first rank: never a constant.
    flags = [jnp.any(a != jnp.zeros((), a.dtype)).astype(jnp.int32) for a in arrays]
    count = lax.psum(sum(flags, first.astype(jnp.int32)), axes)
    reached = count <= lax.axis_size(axes) * len(arrays) + 1
    out = []
    for a in arrays:
        # Of bit patterns, since some backends compute with narrow floats in wider ones.
        bits = to_bits(a)
        out.append(from_bits(jnp.where(reached, bits, jnp.zeros_like(bits)), a.dtype))
    return list(lax.optimization_barrier(tuple(out)))


def _types(*avals: Any, axes: Axes) -> tuple[list[Any], set[Any]]:
    check_axes("barrier", axes)
    return list(avals), _compat.named_axis_effects(axes)


def _jvp(primals: Any, tangents: Any, *, axes: Axes) -> tuple[list[Any], list[Any]]:
    return barrier_p.bind(*primals, axes=axes), list(tangents)


def _batch(axis: Any, args: Any, dims: Any, *, axes: Axes) -> tuple[list[Any], Any]:
    # The ranks of a vmapped axis are elements of one array: they have arrived together.
    axes = tuple(a for a in axes if a != axis.name)
    return (barrier_p.bind(*args, axes=axes) if axes else list(args)), dims


barrier_p.def_effectful_abstract_eval(_types)
ad.primitive_jvps[barrier_p] = _jvp
batching.fancy_primitive_batchers[barrier_p] = _batch
mlir.register_lowering(barrier_p, _compat.lower_unchecked(_native, multiple_results=True))
