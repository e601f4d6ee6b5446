"""Arrays of which every rank has its own, and the partition specs of states that hold some."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xcoll import _compat
from xcoll.gradients.leaves import as_varying


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerRank:
    """An array of which every rank has its own.

    An array that differs from rank to rank must not be declared replicated: it would be saved,
    restored and donated as if all ranks had the first one's.

    Attributes:
      value: ``(num_ranks, ...)`` outside of `jax.shard_map`, of partition spec ``P(axes)``, and
        ``(1, ...)`` inside. Ranks are row-major over ``axes``.
      axes: the mesh axes.
    """

    value: Any
    axes: tuple[str, ...] = field(metadata={"static": True})

    @property
    def own(self) -> jax.Array:
        """This rank's array, inside `jax.shard_map`."""
        return self.value[0]

    def replaced(self, own: jax.Array) -> PerRank:
        """Returns it with another array for this rank."""
        return PerRank(as_varying(own, self.axes)[None], self.axes)


def state_specs(
    state: Any, params: Any = None, param_specs: Any = None, *, default: Any = None
) -> Any:
    """Returns the partition specs of an optimizer state, for ``in_specs`` and ``out_specs``.

    Args:
      state: an optimizer state as it is outside of `jax.shard_map`, or its shapes:
        ``jax.eval_shape(optimizer.init, params)``; or what holds one, such as Linen's
        ``TrainState``. Of an ``nnx.Optimizer``, ``nnx.as_pure(optimizer.opt_state)``, since
        ``nnx.split`` does not keep which arrays are per rank.
      params: the parameters (or their shapes). Parts of the state that have their structure, such
        as Adam's moments, get ``param_specs``.
      param_specs: partition specs of the parameters, or a prefix of them; ``P()`` for None.
      default: spec of everything else; ``P()`` for None.

    Returns:
      The state's structure with a `jax.sharding.PartitionSpec` for each array: ``P(axes)`` for what
      every rank has its own of.

    Example:
      >>> import optax
      >>> from xcoll.gradients import error_feedback, sync
      >>> from xcoll import codecs
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> optimizer = optax.chain(
      ...     sync("data", compressor=error_feedback(codecs.int8()), mesh=mesh), optax.sgd(0.1)
      ... )
      >>> state = jax.eval_shape(optimizer.init, {"w": jnp.zeros(1000)})
      >>> feedback, = state_specs(state)[0].buckets
      >>> feedback.contributed.value == jax.P("data")
      True
    """
    default = PartitionSpec() if default is None else default
    param_specs = PartitionSpec() if param_specs is None else param_specs

    def outline(tree: Any) -> Any:
        return jax.tree.structure(tree), [
            getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)
        ]

    wanted = None if params is None else outline(params)

    def is_param_like(node: Any) -> bool:
        return wanted is not None and outline(node) == wanted

    def spec(node: Any) -> Any:
        if isinstance(node, PerRank):
            return PerRank(PartitionSpec(node.axes or None), node.axes)
        return param_specs if is_param_like(node) else default

    return jax.tree.map(spec, state, is_leaf=lambda n: isinstance(n, PerRank) or is_param_like(n))


def rank_axes(
    call: str, axes: tuple[str, ...], mesh: Mesh | AbstractMesh | None
) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Returns ``(axis, size)`` of the axes, and whether this is inside `jax.shard_map`.

    Raises:
      ValueError: the sizes are not known here, or the mesh has no such axis.
    """
    if set(axes) <= set(_compat.bound_axes()):
        return tuple((axis, jax.lax.axis_size(axis)) for axis in axes), True
    known: Any = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    if known is None or known.empty:
        raise ValueError(
            f"{call}: init was called outside jax.shard_map, where the number of ranks over {axes}"
            " is not known, and every rank needs a state of its own; pass mesh=, or call it under"
            " jax.set_mesh(mesh), or inside jax.shard_map"
        )
    missing = [axis for axis in axes if axis not in known.shape]
    if missing:
        raise ValueError(
            f"{call}: the mesh has no axis {missing[0]!r}; it has {tuple(known.axis_names)}"
        )
    return tuple((axis, known.shape[axis]) for axis in axes), False


def zeros_for_all_ranks(
    shape: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
    inside: bool,
    mesh: Any = None,
    dtype: Any = jnp.float32,
) -> PerRank:
    """Returns zeros of ``shape`` for every rank.

    Args:
      shape: of one rank's array.
      axes: ``(axis, size)`` of the ranks.
      inside: whether this is inside `jax.shard_map`, where only this rank's is made.
      mesh: outside, the mesh to place the arrays on, each where its rank is.
      dtype: dtype of the array.
    """
    names = tuple(axis for axis, _ in axes)
    if inside:
        return PerRank(as_varying(jnp.zeros((1, *shape), dtype), names), names)
    num_ranks = math.prod(size for _, size in axes)
    return PerRank(_placed_zeros((num_ranks, *shape), dtype, names, mesh), names)


def for_all_ranks(
    own: jax.Array, axes: tuple[tuple[str, int], ...], inside: bool, mesh: Any = None
) -> PerRank:
    """Returns the same array for every rank; arguments as for `zeros_for_all_ranks`."""
    zeros = zeros_for_all_ranks(own.shape, axes, inside, mesh, own.dtype)
    return PerRank(zeros.value + own, zeros.axes)


def _placed_zeros(shape: tuple[int, ...], dtype: Any, names: tuple[str, ...], mesh: Any) -> Any:
    """Returns zeros whose leading dimension is cut over the axes, each rank's where it belongs.

    All ranks' residuals on one device may not fit, so nothing is made there first.
    """
    spec = PartitionSpec(names or None)
    zeros = partial(jnp.zeros, shape, dtype)
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        concrete = jax.sharding.get_mesh() if mesh is None else mesh
        is_known = isinstance(concrete, Mesh) and not concrete.empty
        return zeros(device=NamedSharding(concrete, spec) if is_known else None)
    context = jax.sharding.get_abstract_mesh()
    is_in_context = not context.empty and set(names) <= set(context.axis_names)
    target = context if is_in_context else mesh
    if target is None or (isinstance(target, AbstractMesh) and not is_in_context):
        return zeros()
    kinds = dict(zip(target.axis_names, target.axis_types, strict=True))
    if any(kinds[name] == AxisType.Auto for name in names):
        return jax.lax.with_sharding_constraint(zeros(), NamedSharding(target, spec))
    # An explicit sharding can only be of the mesh that is set.
    return zeros(device=NamedSharding(target, spec)) if is_in_context else zeros()
