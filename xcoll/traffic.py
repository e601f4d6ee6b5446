"""What each rank of a mesh sends: exact, so that the plans of a program can be added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np

from xcoll.accounting import traffic
from xcoll.plan import Plan
from xcoll.topology import Topology

MAX_RANKS = 4096
"""Meshes up to this size are counted rank by rank."""

Sent = Mapping[str, tuple[Fraction, ...]]
"""For each mesh axis the bytes that each rank of the mesh (row-major) sends over it."""


def sent_by_plan(
    plan: Plan, topology: Topology | None, mesh_sizes: Mapping[str, int]
) -> Sent | None:
    """Returns what one execution of a plan sends, or None where it is too large to count.

    Args:
      plan: the plan.
      topology: what it was planned for.
      mesh_sizes: the axes of the mesh around it, in the mesh's order.
    """
    request = plan.request
    places = _places(mesh_sizes, request.axes)
    counted = None if places is None else traffic(request, plan.stages, topology)
    if places is None or counted is None:
        return None
    return {
        axis: tuple(Fraction(int(row[place]), request.num_ranks) for place in places)
        for axis, row in zip(request.axes, counted, strict=True)
    }


def sent_evenly(plan: Plan, mesh_sizes: Mapping[str, int]) -> Sent | None:
    """Returns what a plan sends that each of several groups of ranks carries out, alike on all."""
    request, counted = plan.request, traffic(plan.request, plan.stages)
    total = int(np.prod(list(mesh_sizes.values())))
    if counted is None or total > MAX_RANKS:
        return None
    return {
        axis: (Fraction(int(row.max()), request.num_ranks),) * total
        for axis, row in zip(request.axes, counted, strict=True)
    }


def sent_by_permutation(
    pairs: Iterable[tuple[int, int]],
    axes: tuple[str, ...],
    num_bytes: int,
    mesh_sizes: Mapping[str, int],
) -> Sent | None:
    """Returns what a permutation of ranks over ``axes`` sends, or None where that is too large."""
    places = _places(mesh_sizes, axes)
    if places is None:
        return None
    sizes = [mesh_sizes[a] for a in axes]
    sent = {axis: np.zeros(int(np.prod(sizes)), np.int64) for axis in axes}
    for source, destination in pairs:
        ends = np.unravel_index([source, destination], sizes)
        for axis, (one, other) in zip(axes, ends, strict=True):
            if one != other:
                sent[axis][source] += num_bytes
    return {axis: tuple(Fraction(int(row[p])) for p in places) for axis, row in sent.items()}


def busiest(total: Mapping[str, list[Fraction]]) -> dict[str, int]:
    """Returns the bytes of the busiest rank over each axis; a fraction of a byte is dropped."""
    return {axis: int(max(ranks)) for axis, ranks in total.items()}


def _places(mesh_sizes: Mapping[str, int], axes: tuple[str, ...]) -> np.ndarray | None:
    """Returns for each rank of the mesh its rank over ``axes``."""
    if np.prod(list(mesh_sizes.values())) > MAX_RANKS:
        return None
    grid = np.indices(tuple(mesh_sizes.values())).reshape(len(mesh_sizes), -1)
    coordinates = dict(zip(mesh_sizes, grid, strict=True))
    sizes = tuple(mesh_sizes[a] for a in axes)
    return np.ravel_multi_index([coordinates[a] for a in axes], sizes)
