"""Profiles, read back with all that was measured."""

from __future__ import annotations

import os
from typing import Any

import jax

from xcoll.calibration.result import Calibration, Sample, Term
from xcoll.hardware import profiles
from xcoll.records import read
from xcoll.topology import Topology


def read_calibration(path: str | os.PathLike[str], mesh: jax.sharding.Mesh) -> Calibration:
    """Returns what `tune` wrote.

    Args:
      path: of the profile.
      mesh: that it is of.

    Raises:
      FileNotFoundError, ValueError: as `Topology.load`.
    """
    topology = Topology.load(path, mesh)
    content, system = profiles.load("read_calibration", path)
    values: dict[str, Any] = {
        "made": read(str, content["made"], "made"),
        "took_s": read(float, content["took_s"], "took_s"),
        "samples": read(tuple[Sample, ...], content["samples"], "samples"),
        "terms": read(tuple[Term, ...], content["terms"], "terms"),
    }
    return Calibration(system=system, topology=topology, path=os.fspath(path), **values)
