"""The part of a gradient that a sparse compressor sends."""

from __future__ import annotations

import math
from typing import Any


def check_fraction(call: str, fraction: Any) -> float:
    """Returns the fraction as a float.

    Raises:
      TypeError: it is no number.
      ValueError: it is outside (0, 1].
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"{call}(fraction={fraction!r}): must be a number, for example 0.01")
    if not 0 < fraction <= 1:
        raise ValueError(
            f"{call}(fraction={fraction!r}): must be in (0, 1], the part of the elements that is"
            " sent; 0.01 sends one in a hundred"
        )
    return float(fraction)


def num_chosen(fraction: float, elements: int) -> int:
    """Returns how many elements are sent, rounded up.

    >>> num_chosen(0.1, 30), num_chosen(0.01, 7), num_chosen(1.0, 5)
    (3, 1, 5)
    >>> num_chosen(1e-12, 7)  # Never none: nothing would ever be sent.
    1
    """
    return min(elements, max(1, math.ceil(round(fraction * elements, 6))))
