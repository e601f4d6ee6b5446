"""Collectives with codecs: what runs, what it should give, and how far off it may be.

Values of all ranks are one NumPy array with a leading dimension of ranks, row-major over the axes.
Expectations and bounds are computed in float64, from the words of the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

import xcoll

SUMS = ("psum", "pmean", "psum_scatter")
FLOOR = 2.0**-126

# Half the distance between subnormal numbers: what rounding to the dtype may add besides.
HALF_SUBNORMAL = {"float32": 0.0, "bfloat16": 2.0**-134, "float16": 2.0**-25}
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Call:
    """One collective over all ranks.

    Attributes:
      name: jax.lax's name.
      split: the dimension that is cut (psum_scatter, all_to_all).
      concat: the dimension along which pieces are put together (all_gather, all_to_all).
      tiled: as in jax.lax.
      shift: of a ppermute: rank r sends to r + shift, and where ``partial`` the last one does not.
    """

    name: str
    split: int = 0
    concat: int = 0
    tiled: bool = True
    shift: int = 1
    partial: bool = field(default=False)

    def __str__(self) -> str:
        return f"{self.name}-{self.split}{self.concat}{'-tiled' if self.tiled else ''}"

    def arguments(self, num_ranks: int) -> tuple[Any, ...]:
        """Positional arguments behind the axes."""
        if self.name == "all_to_all":
            return self.split, self.concat
        return (self.pairs(num_ranks),) if self.name == "ppermute" else ()

    def options(self) -> dict[str, Any]:
        if self.name == "psum_scatter":
            return {"scatter_dimension": self.split, "tiled": self.tiled}
        if self.name == "all_gather":
            return {"axis": self.concat, "tiled": self.tiled}
        return {"tiled": self.tiled} if self.name == "all_to_all" else {}

    def pairs(self, num_ranks: int) -> list[tuple[int, int]]:
        all_pairs = [(r, (r + self.shift) % num_ranks) for r in range(num_ranks)]
        return all_pairs[:-1] if self.partial and num_ranks > 1 else all_pairs

    def run(self, axes: tuple[str, ...], num_ranks: int, **more: Any) -> Callable[[Any], Any]:
        """The call as a function of one rank's values, by xcoll."""
        fn = getattr(xcoll, self.name)
        return lambda x: fn(x, axes, *self.arguments(num_ranks), **self.options(), **more)

    def run_lax(self, axes: tuple[str, ...], num_ranks: int) -> Callable[[Any], Any]:
        """The same by jax.lax."""
        fn = getattr(lax, self.name)
        return lambda x: fn(x, axes, *self.arguments(num_ranks), **self.options())

    def exact(self, x: np.ndarray) -> np.ndarray:
        """The results of all ranks, from the values of all ranks; in float64."""
        n, x = len(x), x.astype(np.float64)
        if self.name in ("psum", "pmean"):
            total = x.sum(0) / (n if self.name == "pmean" else 1)
            return np.stack([total] * n)
        if self.name == "psum_scatter":
            return self._cut(x.sum(0), n)
        if self.name == "all_gather":
            join = np.concatenate if self.tiled else np.stack
            return np.stack([join(list(x), self.concat)] * n)
        if self.name == "all_to_all":
            pieces = [self._cut(row, n) for row in x]
            join = np.concatenate if self.tiled else np.stack
            return np.stack([join([p[r] for p in pieces], self.concat) for r in range(n)])
        out = np.zeros_like(x)
        for source, destination in self.pairs(n):
            out[destination] = x[source]
        return out

    def _cut(self, row: np.ndarray, n: int) -> np.ndarray:
        if not self.tiled:
            return np.moveaxis(row, self.split, 0)
        return np.stack(np.split(row, n, self.split))

    def block_magnitudes(self, x: np.ndarray, block: int) -> np.ndarray:
        """The largest magnitude of each element's block, on the rank that sends it.

        Blocks are of contiguous elements of what is sent to one rank, in row-major order once the
        dimension that is cut is in front. A block of 0 elements is the whole payload.
        """
        sizes = np.abs(x.astype(np.float64))
        return np.stack([self._spread(row, len(x), block) for row in sizes])

    def _spread(self, row: np.ndarray, n: int, block: int) -> np.ndarray:
        if block == 0:
            return np.full(row.shape, row.max(initial=0))
        is_cut = self.name in ("psum_scatter", "all_to_all")
        first = np.moveaxis(row, self.split, 0) if is_cut else row
        rows = first.reshape(n if is_cut else 1, -1)
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
        largest = padded.reshape(rows.shape[0], -1, block).max(2, initial=0)
        spread = np.repeat(largest, block, 1)[:, : rows.shape[1]].reshape(first.shape)
        return np.moveaxis(spread, 0, self.split) if is_cut else spread

    def bound(self, x: np.ndarray, block: int, max_error: float, roundings: int = 1) -> np.ndarray:
        """How far off each result may be: ``max_error`` times the sum of the blocks, and floors.

        Beside that law, a magnitude under 2**-126 may count as zero wherever a rank rounds or adds,
        and a result that leaves a codec is rounded to the dtype of the payload, at most thrice: by
        half the distance of its subnormal numbers where it is one.
        """
        dtype = x.dtype.name
        bound = max_error * self.exact(self.block_magnitudes(x, block))
        if self.name == "pmean":
            # The sum, divided by the number of ranks in the dtype of the payload.
            bound = bound + ROUNDOFF[dtype] * (np.abs(self.exact(x)) + bound)
        return bound + 2 * len(x) * roundings * FLOOR + 3 * HALF_SUBNORMAL[dtype]

    @property
    def is_replicated(self) -> bool:
        return self.name in ("psum", "pmean", "all_gather")


def roundings(algorithm: str, collective: str, num_ranks: int) -> int:
    """How often a value is encoded at most, as the algorithms' descriptions have it."""
    if collective not in SUMS:
        return 1
    scatter = {
        "direct": 1,
        "direct(shots=1)": 1,
        "ring": num_ranks - 1,
        "bidirectional_ring": num_ranks - 1,
        # A number of ranks that is no power of two folds the rest in first.
        "halving_doubling": math.ceil(math.log2(num_ranks)) + 1,
        "recursive_doubling": math.ceil(math.log2(num_ranks)) + 2,
    }[algorithm]
    if collective == "psum_scatter" or algorithm in ("direct(shots=1)", "recursive_doubling"):
        return scatter
    return scatter + 1


def telescoped(delta: float, count: int) -> float:
    """The error of ``count`` roundings in a row: each of what is off already."""
    return (1 + delta) ** count - 1


def same_replicas(out: np.ndarray) -> bool:
    """Whether all ranks hold the same bits."""
    raw = np.ascontiguousarray(out).reshape(len(out), -1).view(np.uint8).reshape(len(out), -1)
    return bool((raw == raw[:1]).all())
