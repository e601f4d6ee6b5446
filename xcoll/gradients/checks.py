"""Whether options are right, and a state and the gradients it meets belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xcoll.gradients.compressor import Compressor, Feedback
from xcoll.gradients.leaves import Leaf
from xcoll.gradients.per_rank import PerRank


def check_feedback_of(state: Feedback, leaves: Sequence[Leaf], sizes: Mapping[str, int]) -> None:
    """Checks that a bucket's state is of these gradients, on these ranks.

    Args:
      state: the state, inside `jax.shard_map`.
      leaves: the leaves of the gradients.
      sizes: size of each axis that is summed over.

    Raises:
      ValueError: it is not; both shapes are shown.
    """
    layout = state.layout
    for position, name, shape in zip(layout.leaves, layout.names, layout.shapes, strict=True):
        if position >= len(leaves):
            raise ValueError(
                f"sync: the feedback state has {name} of shape {shape}, the gradients have"
                f" {len(leaves)} leaves and not that one; init with parameters of the gradients'"
                " structure"
            )
        leaf = leaves[position]
        if leaf.shape != shape:
            raise ValueError(
                f"sync: the feedback state of {name} has shape {shape}, the gradient {leaf.name}"
                f" has shape {leaf.shape}; init with parameters of the gradients' shapes (inside"
                " jax.shard_map, where they are cut over mesh axes)"
            )
        other = sorted(leaf.varying - set(layout.axis_names))
        if other:
            raise ValueError(
                f"sync: the gradient {leaf.name} varies over {other}, but the feedback state has"
                f" ranks over {layout.axis_names} only; call init inside jax.shard_map, with the"
                " parameters as they are there"
            )
    if len(leaves) != layout.num_leaves:
        raise ValueError(
            f"sync: the feedback state is of {layout.num_leaves} leaves, the gradients have"
            f" {len(leaves)}: {', '.join(leaf.name for leaf in leaves)}; init with parameters of"
            " the gradients' structure"
        )
    of_state = {axis: size for axis, size in layout.axes if axis in sizes}
    if of_state != dict(sizes):
        raise ValueError(
            f"sync: the feedback state is of ranks {of_state}, the mesh has {dict(sizes)}; use"
            " gradients.reshard_residual"
        )
    expected = {"contributed": layout.padded, "reduced": layout.block and layout.share}
    for name, elements in expected.items():
        array: PerRank | None = getattr(state, name)
        if array is not None:
            _check_own(name, array, (elements,))
    for factor in state.factors:
        _check_own("factors", factor, factor.value.shape[1:])


def check_compressor_of(
    state: Feedback, compressor: Compressor, axes: Sequence[str], compressed: Sequence[str]
) -> None:
    """Checks that a bucket's state was made by this compressor, over these axes.

    Args:
      state: the state, inside `jax.shard_map`.
      compressor: the compressor that is to go on with it.
      axes: all axes of the reduction.
      compressed: those that are compressed over.

    Raises:
      ValueError: it was not.
    """
    layout = state.layout
    found = (tuple(a for a in layout.axis_names if a in axes), layout.compressed)
    if found != (tuple(axes), tuple(compressed)):
        raise ValueError(
            f"sync: the feedback state is of axis_name={found[0]}, compress_axis={found[1]}, this"
            f" sync has {tuple(axes)} and {tuple(compressed)}; init anew, or keep the axes"
        )

    is_alike = (layout.by_rows, layout.block) == (compressor.by_rows, compressor.block)
    is_alike = is_alike and (state.contributed is not None) == compressor.feedback
    if is_alike:
        factors = jax.eval_shape(lambda: compressor.initial_factors(layout, jax.random.key(0)))
        shapes = [factor.value.shape[1:] for factor in state.factors]
        is_alike = shapes == [factor.shape for factor in factors]
    if not is_alike:
        raise ValueError(
            f"sync: the feedback state was made by another compressor than {compressor}; go on with"
            " the one it was made by (of the same block, rank and feedback), or init anew, which"
            " drops what was not sent yet"
        )


def _check_own(name: str, array: PerRank, shape: tuple[int, ...]) -> None:
    if array.value.shape != (1, *shape):
        raise ValueError(
            f"sync: {name} of the feedback state has shape {array.value.shape} inside"
            f" jax.shard_map, where a rank's own has {(1, *shape)}; give the state the specs of"
            " gradients.state_specs in in_specs and out_specs (of an nnx.Optimizer, those of"
            " nnx.as_pure(optimizer.opt_state): nnx.split does not keep which arrays are per rank)"
        )


def check_feedback(call: str, feedback: Any) -> None:
    """Raises TypeError unless ``feedback`` is a boolean."""
    if not isinstance(feedback, bool):
        raise TypeError(f"{call}(feedback={feedback!r}): must be True or False")
