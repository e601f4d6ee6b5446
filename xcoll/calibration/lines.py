"""Robust fits: a line through times that are off by a share of themselves, and rising times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDS = 20
_FAR = 1.5


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns intercept and slope, neither negative, of ``time = intercept + slope * size``.

    Least squares of relative residuals, those beyond 1.5 times their median weighted down (Huber),
    so that neither large sizes nor an outlier decide.

    Args:
      points: sizes and times, at least one; times are positive.

    References:
      Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 35(1),
      1964.

    Example:
      >>> a, b = line([(0, 2.0), (10, 4.0), (100, 22.0), (1000, 2020.0)])
      >>> round(a, 1), round(b, 2)
      (2.0, 0.2)
    """
    sizes, times = (np.array(column, float) for column in zip(*points, strict=True))
    if len(set(sizes.tolist())) < 2:
        return 0.0, float(np.median(times / np.maximum(sizes, 1)))
    weights = np.ones_like(times)
    intercept, slope = 0.0, 0.0
    for _ in range(_ROUNDS):
        intercept, slope = _weighted(sizes, times, weights / times)
        off = np.abs(intercept + slope * sizes - times) / times
        far = _FAR * max(float(np.median(off)), 1e-9)
        weights = np.minimum(1.0, np.sqrt(far / np.maximum(off, far)))
    return intercept, slope


def _weighted(sizes: np.ndarray, times: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    columns = np.stack([np.ones_like(sizes), sizes], 1) * weights[:, None]
    wanted = times * weights
    (intercept, slope), *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    if slope < 0:
        return float(wanted @ columns[:, 0] / (columns[:, 0] @ columns[:, 0])), 0.0
    if intercept < 0:
        return 0.0, float(wanted @ columns[:, 1] / (columns[:, 1] @ columns[:, 1]))
    return float(intercept), float(slope)


def rising(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Returns the closest times, weighted by counts, that do not fall (pool adjacent violators).

    References:
      Ayer et al., "An Empirical Distribution Function for Sampling with Incomplete Information",
      Annals of Mathematical Statistics 26(4), 1955.

    Example:
      >>> rising([1.0, 4.0, 2.0, 8.0], [1, 1, 1, 1])
      [1.0, 3.0, 3.0, 8.0]
    """
    pools: list[tuple[float, int, int]] = []
    for time, count in zip(times, counts, strict=True):
        value, weight, length = time, count, 1
        while pools and pools[-1][0] > value:
            before, its_weight, its_length = pools.pop()
            value = (before * its_weight + value * weight) / (its_weight + weight)
            weight, length = weight + its_weight, length + its_length
        pools.append((value, weight, length))
    return [value for value, _, length in pools for _ in range(length)]
