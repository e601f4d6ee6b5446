"""What is planned from: a profile of the cluster that the run is on."""

from __future__ import annotations

from pathlib import Path

import jax

from bench.regret.grid import Setting
from bench.timing import Meeting
from xcoll.topology import Topology


def topology(
    path: Path | None, setting: Setting, mesh: jax.sharding.Mesh, meeting: Meeting, budget_s: float
) -> Topology:
    """Returns the topology of a cluster.

    Args:
      path: the profile; made where there is none. None: the hardware table's figures.
      setting: the cluster.
      mesh: its devices.
      meeting: of all processes.
      budget_s: seconds that measuring a profile may take.
    """
    rate = setting.rate.replace("mbit", "Mbit").replace("gbit", "Gbit")
    return Topology.parse(f"{setting.hosts}*cpu:{setting.devices}@{rate}", setting.axis_sizes)
