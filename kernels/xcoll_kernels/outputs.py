"""Types of what a kernel returns."""

from __future__ import annotations

from typing import Any

import jax


def like(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's output, varying over the mesh axes its operands vary over.

    Inside `jax.shard_map` with ``check_vma=True`` a kernel has to say so itself. Its operands vary
    alike: a payload and the codes of it that a collective brought.
    """
    manual = jax.typeof(operands[0]).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)
