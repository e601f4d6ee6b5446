"""Dtypes by name, as jax knows them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def number(text: str) -> np.dtype[Any] | None:
    """Returns jax's dtype of numbers or bools of that name; None where it has none.

    >>> number("bfloat16").itemsize, number("f4").name, number("object"), number("float128")
    (2, 'float32', None, None)
    """
    try:
        dtype = jnp.dtype(text)
    except (TypeError, ValueError, SyntaxError, DeprecationWarning):
        return None
    # Numpy has dtypes that jax has not, such as strings, objects and long doubles.
    known = getattr(jnp, dtype.name, None) is not None
    is_number = dtype == jnp.bool or jnp.issubdtype(dtype, jnp.number)
    return dtype if known and is_number else None
