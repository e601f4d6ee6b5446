"""What is planned from: a profile of the cluster that the run is on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

import xcoll
from bench.timing import Meeting
from xcoll.topology import Topology


def topology(
    path: Path,
    mesh: jax.sharding.Mesh,
    meeting: Meeting,
    budget_s: float,
    progress: Callable[[float, str], None] | None = None,
) -> Topology:
    """Returns the topology of a profile, which is measured where there is none.

    Args:
      path: the profile.
      mesh: the devices it is of.
      meeting: of all processes, which have to call this alike.
      budget_s: seconds that measuring one may take.
      progress: of `xcoll.tune`.

    Raises:
      ValueError: it is no profile, or one of something else.
    """
    if not meeting.first_says(path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        xcoll.tune(mesh, budget_s=budget_s, out=path, progress=progress)
    return Topology.load(path, mesh)
