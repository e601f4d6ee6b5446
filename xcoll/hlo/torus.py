"""The part of a torus that the groups of a collective use, and what an all-to-all puts on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from xcoll.routes import Dimension, Ints

Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def is_torus(dimension: Dimension) -> bool:
    """Whether neighbours along a dimension are wired to each other."""
    return dimension.level.link.network == "torus"


def worst(units: Ints, capacity: Ints, num_ranks: int) -> Fraction:
    """Returns the largest quotient, of n-ths of the operand and bytes a second."""
    pairs = np.unique(np.stack([units, capacity], axis=1)[units > 0], axis=0).tolist()
    return max((Fraction(a, num_ranks * b) for a, b in pairs), default=Fraction(0))


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a torus dimension that each group uses.

    Attributes:
      place: array [group, rank]: position along it, from where the group's part begins.
      ring: array [group]: the whole dimension, closed; else a line.
      low: array [group, rank]: links lead out of the rank's chip downwards.
      high: the same upwards.
      rows: array [group]: parallel rows between its ranks.
      links: array [group]: links in all of them, both ways.
      apart: array [group]: links between its nearest chips.
      rows_together: rows of all groups.
      links_together: links in those, whole.
    """

    place: Ints
    ring: Bools
    low: Bools
    high: Bools
    rows: Ints
    links: Ints
    apart: Ints
    rows_together: int
    links_together: int

    @classmethod
    def of(cls, dimension: Dimension, groups: Ints, used: Sequence[Dimension]) -> Part:
        """Finds it.

        Args:
          dimension: of a torus.
          groups: array [group, rank] of devices.
          used: the dimension, the others of the torus, and those outside it.
        """
        extent, wrap = dimension.level.extent, dimension.level.wrap
        at = dimension.position[groups]
        ordered = np.sort(at, axis=1)
        # The way from each rank to the next one along the dimension; the last goes round.
        gaps = np.diff(ordered, axis=1, append=ordered[:, :1] + extent)
        widest = gaps.argmax(axis=1) if wrap else np.full(len(at), at.shape[1] - 1)
        index = np.arange(len(at))
        length = extent - gaps[index, widest]
        start = ordered[index, (widest + 1) % at.shape[1]]
        place = (at - start[:, None]) % extent
        # Up to half of a ring the shorter way never leaves the part.
        ring = (2 * length >= extent) & wrap & (length > 0)
        between = gaps if wrap else gaps[:, :-1]
        apart = np.where(between > 0, between, extent).min(axis=1, initial=extent)
        # Ways turn only at positions of ranks, the same in every row.
        others = [d for d in used if d is not dimension and not _is_inside(d, used)]
        rows = np.ones(len(at), np.int64)
        rows_together = 1
        for other in others:
            place_in = np.sort(other.position[groups], axis=1)
            rows *= (np.diff(place_in, axis=1) > 0).sum(axis=1) + 1
            rows_together *= len(np.unique(place_in))
        spread = (ring | (length > 0))[:, None]
        return cls(
            place=place,
            ring=ring,
            low=spread & (ring[:, None] | (place > 0)),
            high=spread & (ring[:, None] | (place < length[:, None])),
            rows=rows,
            links=rows * 2 * np.where(ring, extent, length),
            apart=apart,
            rows_together=rows_together,
            links_together=rows_together * 2 * (extent if wrap else extent - 1),
        )


def _is_inside(dimension: Dimension, used: Sequence[Dimension]) -> bool:
    """Whether a dimension lies inside the torus: its devices share the torus's links."""
    last = max(i for i, d in enumerate(used) if is_torus(d))
    return any(dimension is d for d in used[last + 1 :])


def through_torus(groups: Ints, wired: Sequence[Dimension]) -> Iterator[Fraction]:
    """Yields what an all-to-all puts on the links of each torus dimension."""
    torus = [d for d in wired if is_torus(d)]
    outside = wired[: wired.index(torus[0])] if torus else []
    # Where a group has other ways out of the torus, part of its traffic may take them.
    for dimension in outside:
        at = dimension.position[groups]
        groups = groups[(at == at[:, :1]).all(axis=1)]
    if not len(groups):
        return
    num_ranks = groups.shape[1]
    for dimension in torus:
        extent, rate = dimension.level.extent, dimension.level.bandwidth_bytes_per_s
        part = Part.of(dimension, groups, [*outside, *torus])
        cell = np.arange(len(groups))[:, None] * extent + part.place
        count = np.bincount(cell.ravel(), minlength=len(groups) * extent).reshape(-1, extent)
        steps = np.abs(np.arange(extent)[:, None] - np.arange(extent))
        way = np.einsum("gi,ij,gj->g", count, np.minimum(steps, extent - steps), count)
        way, links = way[part.ring], part.links[part.ring]
        if len(way):
            yield worst(way, links * rate, num_ranks)
            together = min(int(links.sum()), part.links_together)
            yield Fraction(int(way.sum()), num_ranks * together * rate)
        line = ~part.ring
        below = np.cumsum(count[line], axis=1)
        over = below * (num_ranks - below)
        if over.any():
            yield worst(over.max(axis=1), part.rows[line] * rate, num_ranks)
            # The cut above each position of a group, as one of the whole dimension.
            begin = (dimension.position[groups] - part.place)[line, :1] % extent
            crossing = np.zeros(extent, np.int64)
            np.add.at(crossing, (begin + np.arange(extent)) % extent, over)
            yield Fraction(int(crossing.max()), num_ranks * part.rows_together * rate)
