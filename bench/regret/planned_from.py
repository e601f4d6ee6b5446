"""What is planned from: a profile of the cluster that the run is on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

import xcoll
from bench.timing import Meeting
from xcoll.calibration.reading import read_calibration
from xcoll.topology import Topology


def profile(
    path: Path,
    mesh: jax.sharding.Mesh,
    meeting: Meeting,
    budget_s: float,
    progress: Callable[[float, str], None] | None = None,
) -> tuple[Topology, float]:
    """Returns the topology of a profile, and the seconds that starting a program takes by it.

    A profile is measured where there is none. What it predicts is a collective's part of a program;
    a program that is nothing but one takes as long as starting it besides.

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
    found = read_calibration(path, mesh)
    launch_s = next((term.value for term in found.terms if term.name == "launch"), 0.0)
    return found.topology, launch_s
