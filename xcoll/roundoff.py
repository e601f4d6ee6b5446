"""Bounds on what a plan's sums and products are off by."""

from __future__ import annotations

from collections.abc import Sequence

from xcoll.plan import Request, Stage

_BITS = {
    "float64": 53,
    "complex128": 53,
    "float32": 24,
    "complex64": 24,
    "float16": 11,
    "bfloat16": 8,
}
"""Bits of the significand: the unit roundoff is ``2 ** -bits``. Others are taken to have one."""


def error_bound(request: Request, stages: Sequence[Stage]) -> int:
    """Returns the bound on the error of a sum, in units of the dtype's unit roundoff.

    With ``u`` the unit roundoff and ``h`` the longest chain of additions that a term passes,
    ``|computed - exact| <= bound * u * sum |x|``, where the bound is the smaller of ``n - 1``,
    which holds for every order of summation, and ``h / (1 - h u)``, rounded up. XLA's own
    collectives give ``n - 1``: their order is not known.

    For a product, ``|computed - exact| <= bound * u * |exact|``, unless it underflows.

    Returns:
      0 where nothing is rounded: data movement, integers, max and min.

    References:
      Jeannerod and Rump, "Improved error bounds for inner products in floating-point arithmetic",
      SIAM J. Matrix Anal. Appl. 34(2), 2013 (``n - 1``). Higham, "Accuracy and Stability of
      Numerical Algorithms", 2nd ed., section 4.2 (``h``).
    """
    if request.op not in ("sum", "prod") or not is_inexact(request.dtype):
        return 0
    worst = request.num_ranks - 1
    height = sum(_height(stage) for stage in stages)
    unit = 1 << _BITS.get(request.dtype, 1)
    if request.op == "sum" and height < unit:
        return min(worst, -(-height * unit // (unit - height)))
    if request.op == "prod":
        # A product of n factors is rounded n - 1 times, whatever the order; a complex one, by up to
        # sqrt(5) units each time (Brent, Percival and Zimmermann 2007).
        worst *= 3 if request.dtype.startswith("complex") else 1
        return -(-worst * unit // (unit - worst)) if worst < unit else worst * unit
    return worst


def unit_roundoff(dtype: str) -> float:
    """Returns the unit roundoff of a floating or complex dtype.

    >>> unit_roundoff("bfloat16")
    0.00390625
    """
    return 2.0 ** -_BITS.get(dtype, 1)


def is_inexact(dtype: str) -> bool:
    """Whether arithmetic in ``dtype`` rounds."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _height(stage: Stage) -> int:
    """Longest chain of additions that a term of a stage's result passes."""
    n = stage.span.num_ranks
    if stage.collective not in ("all_reduce", "reduce_scatter", "reduce"):
        return 0
    options = dict(stage.choice.options)
    log = (n - 1).bit_length()
    if stage.choice.name in ("recursive_doubling", "halving_doubling"):
        # Ranks beyond a power of two are added to a partner first: one level of the tree.
        return log
    if stage.choice.name == "tree":
        radix = options.get("radix", 2)
        levels = 0
        while radix**levels < n:
            levels += 1
        return min(n - 1, levels * (radix - 1))
    if stage.choice.name == "double_tree":
        return min(n - 1, 2 * log)
    return n - 1
