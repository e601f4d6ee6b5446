"""What collectives have to return, in NumPy, and how far from it a result is."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

REDUCTIONS = ("psum", "psum_scatter")
REPLICATED = ("psum", "all_gather")
"""Collectives whose result all ranks share."""

_UNIT_ROUNDOFF = 2.0**-24


def payload_of(rank: int, num_elements: int) -> np.ndarray:
    """Returns what a rank puts in: float32, normally distributed, of the rank's own seed."""
    return np.random.default_rng(rank).standard_normal(num_elements, dtype=np.float32)


class Expected:
    """Exact results of one collective.

    Args:
      collective: ``"psum"``, ``"psum_scatter"``, ``"all_gather"`` or ``"all_to_all"``.
      inputs: what each rank puts in, float32 ``(elements,)``.
    """

    def __init__(self, collective: str, inputs: Sequence[np.ndarray]):
        self.collective = collective
        self.inputs = inputs

    def deviation(self, rank: int, result: np.ndarray, block: int = 1) -> float:
        """Returns a result's largest error, as a fraction of what ranks put into its block.

        ``max |result - exact| / sum over ranks of the largest magnitude in the block``; of what is
        only moved the one rank counts that it comes from. Where ranks' shares are no whole blocks,
        a block holds parts of several, which ones the plan decides: all that there is counts.

        Args:
          rank: whose result.
          result: float32 ``(elements,)``.
          block: elements of a block.

        Raises:
          ValueError: the result has another size, or is not finite.
        """
        exact = self._combine(rank, None)
        if result.shape != exact.shape:
            raise ValueError(f"a result of shape {result.shape}, not {exact.shape}")
        if not np.isfinite(result).all():
            raise ValueError("a result with values that are not finite")
        error = np.abs(result - exact)
        moved = error > 0
        return float((error[moved] / self._largest(rank, block)[moved]).max(initial=0.0))

    @property
    def roundoff(self) -> float:
        """The largest deviation of an exact result, whatever the order of its sums."""
        return len(self.inputs) * _UNIT_ROUNDOFF if self.collective in REDUCTIONS else 0.0

    def _largest(self, rank: int, block: int) -> np.ndarray:
        """Returns for each element of a result what its error is a fraction of."""
        by_block = self._combine(rank, block)
        shares = 1 if self.collective == "all_gather" else len(self.inputs)
        if block == 1 or self.inputs[0].size % (shares * block) == 0:
            return by_block
        largest = [float(np.abs(x).max()) for x in self.inputs]
        is_sum = self.collective in REDUCTIONS
        return np.full(by_block.shape, sum(largest) if is_sum else max(largest))

    def _combine(self, rank: int, block: int | None) -> np.ndarray:
        """Combines the ranks' values, or with ``block`` the largest magnitudes in their blocks."""
        n = len(self.inputs)
        if self.collective == "psum":
            return self._total(block)
        if self.collective == "psum_scatter":
            return np.split(self._total(block), n)[rank]
        parts = (_largest(x, block).astype(np.float64) for x in self.inputs)
        if self.collective == "all_to_all":
            parts = (np.split(part, n)[rank] for part in parts)
        return np.concatenate(list(parts))

    @functools.lru_cache(maxsize=4)  # noqa: B019 - as long-lived as the object's inputs
    def _total(self, block: int | None) -> np.ndarray:
        total = np.zeros(self.inputs[0].shape)
        for x in self.inputs:
            total += _largest(x, block)
        return total


def _largest(x: np.ndarray, block: int | None) -> np.ndarray:
    """Returns for each element the largest magnitude of its block; without blocks ``x``."""
    if block is None:
        return x
    if block == 1:
        return np.abs(x)
    padded = np.pad(np.abs(x), (0, -x.size % block)).reshape(-1, block)
    return np.repeat(padded.max(axis=1), block)[: x.size]
