"""Gradient accumulation: one update, and one reduction, for a window of steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from xcoll.calls import Axes, check_axes
from xcoll.gradients.leaves import Leaf, as_varying, check_varying, leaves_of, varying_axes
from xcoll.gradients.options import axis_names
from xcoll.gradients.per_rank import PerRank, rank_axes, zeros_for_all_ranks


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AccumulateState:
    """State of `accumulate`.

    Attributes:
      count: int32 scalar, steps taken in this window.
      sums: for each leaf the sum of its gradients so far, in float32 (integers and wider floats in
        their own dtype), of which every rank has its own.
      inner: state of the inner transformation.
      sizes: ``(axis, size)`` of the axes that accumulators have ranks over.
    """

    count: jax.Array
    sums: tuple[PerRank, ...]
    inner: Any
    sizes: tuple[tuple[str, int], ...] = field(metadata={"static": True})


def accumulate(
    every: int,
    inner: optax.GradientTransformation,
    *,
    axis_name: Axes,
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs ``inner`` once in a window of steps, on the mean of the window's gradients.

    With `sync` inside, ranks communicate once in a window. Between, updates are zero and ``inner``
    keeps its state. The accumulators hold each rank's own gradients, so they have an explicit
    dimension of ranks (see `PerRank`); `optax.MultiSteps` inside `jax.shard_map` would keep arrays
    that differ between ranks in one that is declared to be the same.

    Args:
      every: steps of a window.
      inner: what runs at the end of a window: usually a chain of `sync` and an optimizer.
      axis_name: the axes that `sync` sums over.
      mesh: as for `sync`.

    Returns:
      An `optax.GradientTransformation`, whose ``update`` is called inside `jax.shard_map`; further
      arguments of it go to ``inner``, as they are at the end of a window. See `state_specs` for the
      partition specs of its state.

    Raises:
      ValueError: ``every`` is not positive; in ``update``, a leaf has been summed already (see
        `sync`; use `optax.MultiSteps` for such), an integer leaf has no mean, or the state is of
        other gradients.
      TypeError: an argument is of a wrong type.

    Example:
      >>> import optax
      >>> from xcoll.gradients import state_specs, sync
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
      >>> optimizer = accumulate(
      ...     2, optax.chain(sync("data"), optax.sgd(1.0)), axis_name="data", mesh=mesh
      ... )
      >>> state = optimizer.init(jnp.zeros(1))
      >>> specs = state_specs(state)
      >>> update = jax.shard_map(
      ...     optimizer.update,
      ...     mesh=mesh,
      ...     in_specs=(jax.P("data"), specs),
      ...     out_specs=(jax.P(), specs),
      ... )
      >>> for _ in range(2):
      ...     updates, state = update(jnp.array([1.0, 3.0]), state)
      ...     print(updates)
      [0.]
      [-2.]
    """
    axes = axis_names("accumulate(axis_name", axis_name)
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"accumulate(every={every!r}): must be an integer")
    if every < 1:
        raise ValueError(f"accumulate(every={every}): must be positive, the steps of a window")
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"accumulate(inner={inner!r}): must be an optax.GradientTransformation, for example"
            " optax.chain(gradients.sync('data'), optax.adam(1e-3))"
        )

    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> AccumulateState:
        sizes, inside = rank_axes("accumulate", axes, mesh)
        sums = []
        found = dict(sizes)
        for leaf in leaves_of("accumulate", params):
            further = {a: jax.lax.axis_size(a) for a in sorted(leaf.varying - set(axes))}
            found.update(further)
            ranks = (*sizes, *further.items())
            dtype = _sum_dtype(leaf.dtype)
            sums.append(zeros_for_all_ranks(leaf.shape, ranks, inside, mesh, dtype))
        return AccumulateState(
            count=jnp.zeros((), jnp.int32),
            sums=tuple(sums),
            inner=inner.init(params),
            sizes=tuple(found.items()),
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AccumulateState]:
        check_axes("accumulate", axis_name)
        leaves = leaves_of("accumulate", updates)
        check_varying("accumulate", leaves, axes)
        for leaf in leaves:
            _check_mean(leaf, every)
        values, structure = jax.tree.flatten(updates)
        _check_state(state, leaves)
        sums = [
            total.own if leaf.is_nothing else total.own + jnp.asarray(value, total.value.dtype)
            for leaf, value, total in zip(leaves, values, state.sums, strict=True)
        ]

        def full(sums: list[jax.Array]) -> tuple[Any, Any, list[jax.Array]]:
            means = [
                value if leaf.is_nothing else _mean(total, every).astype(leaf.dtype)
                for leaf, value, total in zip(leaves, values, sums, strict=True)
            ]
            done, after = inner.update(
                jax.tree.unflatten(structure, means), state.inner, params, **extra_args
            )
            return done, after, [jnp.zeros_like(total) for total in sums]

        shapes = jax.eval_shape(full, sums)

        def open_(sums: list[jax.Array]) -> tuple[Any, Any, list[jax.Array]]:
            nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])
            return nothing, state.inner, sums

        # Both branches have one type only if both vary over the same axes.
        types = jax.eval_shape(open_, sums)
        done, after, sums = jax.lax.cond(
            state.count == every - 1, _typed(full, types), _typed(open_, shapes), sums
        )
        new = tuple(old.replaced(own) for old, own in zip(state.sums, sums, strict=True))
        count = (state.count + 1) % every
        return done, replace(state, count=count, sums=new, inner=after)

    return optax.GradientTransformationExtraArgs(init, update)


def _typed(branch: Any, other: Any) -> Any:
    """Returns the branch with results that vary over the axes of the other's too."""

    def typed(operand: Any) -> Any:
        return jax.tree.map(lambda x, o: as_varying(x, varying_axes(o)), branch(operand), other)

    return typed


def _sum_dtype(dtype: str) -> str:
    """Returns the dtype of an accumulator: float32 for narrower floats."""
    if dtype == "float0":
        return "float32"
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return str(jnp.promote_types(dtype, jnp.float32)) if is_float else dtype


def _mean(total: jax.Array, every: int) -> jax.Array:
    # Of a single step integers too: their quotient would pass through float32.
    return total if every == 1 else total / every


def _check_mean(leaf: Leaf, every: int) -> None:
    if every > 1 and not leaf.is_nothing and jnp.issubdtype(leaf.dtype, jnp.integer):
        raise ValueError(
            f"accumulate: {leaf.name} has dtype {leaf.dtype}, and a window's mean of integers is"
            " none; leave it out with optax.masked"
        )


def _check_state(state: Any, leaves: Any) -> None:
    if not isinstance(state, AccumulateState):
        raise TypeError(
            f"accumulate: the state is a {type(state).__name__}; make it with the same"
            " transformation's init"
        )
    sizes = {axis: jax.lax.axis_size(axis) for axis, _ in state.sizes}
    if sizes != dict(state.sizes):
        raise ValueError(
            f"accumulate: the state is of ranks {dict(state.sizes)}, the mesh has {sizes}; use"
            " gradients.reshard_residual"
        )
    shapes = [total.value.shape for total in state.sums]
    expected = [(1, *leaf.shape) for leaf in leaves]
    if shapes != expected:
        raise ValueError(
            f"accumulate: the state has accumulators of shapes {shapes}, the gradients need"
            f" {expected}, one rank's inside jax.shard_map; init with parameters of these shapes,"
            " and give the state the specs of gradients.state_specs"
        )
