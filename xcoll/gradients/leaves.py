"""The leaves of a tree of gradients: what they are, and whether they are still to be summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xcoll import _compat

COMPRESSED_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that a compressor takes; other leaves are reduced exactly."""


@dataclass(frozen=True)
class Leaf:
    """One array of a tree, without its values.

    Attributes:
      name: where it is in the tree, as Python writes it.
      shape: its shape, per shard inside `jax.shard_map`.
      dtype: name of its dtype.
      varying: manual axes it varies over; always empty under ``check_vma=False``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    varying: frozenset[str]

    @property
    def is_nothing(self) -> bool:
        """Whether it is the gradient of an integer (``float0``), which carries nothing."""
        return self.dtype == "float0"


def leaves_of(call: str, tree: Any) -> list[Leaf]:
    """Returns the leaves in the order of `jax.tree.leaves`; None and masked nodes are none.

    Raises:
      TypeError: a leaf is no array of numbers.
    """
    found = []
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the gradient"
        if not hasattr(value, "dtype"):
            if not isinstance(value, int | float | complex):
                raise TypeError(
                    f"{call}: {name} is a {type(value).__name__}, not an array; leave it out with"
                    " optax.masked"
                )
            value = np.asarray(value, jnp.result_type(value))
        if value.dtype != jax.dtypes.float0 and not jnp.issubdtype(value.dtype, np.number):
            raise TypeError(
                f"{call}: {name} has dtype {value.dtype}, which cannot be summed; leave it out with"
                " optax.masked"
            )
        # NumPy's float64 is float32 to jax unless 64-bit types are on.
        is_nothing = value.dtype == jax.dtypes.float0
        dtype = "float0" if is_nothing else str(jax.dtypes.canonicalize_dtype(value.dtype))
        found.append(Leaf(name, tuple(value.shape), dtype, varying_axes(value)))
    return found


def check_varying(call: str, leaves: list[Leaf], axes: tuple[str, ...]) -> None:
    """Checks that every leaf is a rank's own, where the type says so.

    Raises:
      ValueError: a leaf does not vary over one of ``axes``.
    """
    if not _compat.checks_vma():
        return
    for leaf in leaves:
        missing = tuple(axis for axis in axes if axis not in leaf.varying)
        if missing and not leaf.is_nothing:
            raise ValueError(
                f"{call}: {leaf.name} does not vary over {missing}: it has been summed already, as"
                " the gradient of parameters that are the same on all ranks is, and would be"
                " counted again; differentiate with respect to"
                f" jax.lax.pcast(params, {axes}, to='varying'), so that the gradient is this"
                " rank's own"
            )


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the manual axes a value varies over, as far as its type says."""
    if isinstance(value, jax.Array):
        return _compat.varying_axes(jax.typeof(value))
    manual = getattr(value, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def as_varying(value: Any, axes: Any) -> jax.Array:
    """Returns ``value`` typed as varying over at least these axes."""
    value = jnp.asarray(value)
    missing = tuple(sorted(set(axes) - varying_axes(value)))
    if not missing or not _compat.checks_vma():
        return value
    return jax.lax.pcast(value, missing, to="varying")
