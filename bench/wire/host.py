"""The script on each host of a cluster: ``python -m bench.wire.host JOB OUT``.

The first host writes what all of them measured.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import xcoll
from bench.peers.control import Peer, PeerError, Place, started
from bench.timing import Meeting, machine, write_json
from bench.wire.bounds import shared_bytes
from bench.wire.cells import Cell, measure
from bench.wire.jobs import Job, read_job
from bench.wire.programs import mesh_of
from xcoll.streams import python_alone
from xcoll.topology import Topology

CHECKS = 1
"""Turns of each variant that are not timed."""


def main() -> int:
    """Measures a job."""
    job, out = read_job(Path(sys.argv[1])), Path(sys.argv[2])
    jax.distributed.initialize()
    meeting = Meeting("wire", timeout_s=3600)
    mesh = mesh_of(job.hosts, job.devices)
    try:
        topology = topology_of(job, mesh, out.parent)
    except ValueError as err:  # the same on every host
        sys.exit(f"bench.wire: --profile: {err}")
    facts = machine(meeting)
    with contextlib.ExitStack() as stack:
        peers, notes = stack.enter_context(peers_of(job, meeting))
        on_turn = stack.enter_context(turns_shown(job, len(peers), meeting))
        cells: list[dict[str, Any]] = []
        for collective in job.collectives:
            for asked_bytes in job.payloads_bytes:
                payload_bytes = shared_bytes(collective, asked_bytes, job.num_ranks)
                cell = Cell(job, mesh, topology, meeting, collective, payload_bytes)
                cells.append(measure(cell, peers, on_turn))
    if meeting.is_first:
        about = {name: peer.about for name, peer in peers.items() if peer is not None}
        figures = {
            "hosts": job.hosts,
            "devices": job.devices,
            "rate_bits_per_s": job.rate_bits_per_s,
            "topology": topology.name,
            "machine": facts.to_dict(),
            "header": str(facts),
            "peers": about,
            "notes": notes,
            "cells": cells,
        }
        write_json(out, figures)
    meeting.wait()
    return 0


def topology_of(job: Job, mesh: jax.sharding.Mesh, directory: Path) -> Topology:
    """Returns what to plan for: the rate, what was measured before, or what is measured here."""
    if job.tune_s:
        profile = directory / "profile.json"
        return xcoll.tune(mesh, budget_s=job.tune_s, out=profile).topology
    if job.profile:
        return Topology.load(job.profile, mesh)
    return Topology.parse(job.topology, axes=dict(mesh.shape))


@contextlib.contextmanager
def peers_of(job: Job, meeting: Meeting) -> Iterator[tuple[dict[str, Peer | None], list[str]]]:
    """Starts the other libraries' ranks; on all hosts but the first there is None for each."""
    peers: dict[str, Peer | None] = {}
    notes = []
    asked = {"torch": job.torch_python, "mpi": job.mpi_python}
    place = Place(
        hosts=job.hosts,
        devices=job.devices,
        address=os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[0],
        loopback=job.loopback,
    )
    with contextlib.ExitStack() as stack:
        for name, python in asked.items():
            if not python:
                continue
            peer, why = None, ""
            if meeting.is_first:
                try:
                    peer = stack.enter_context(started(name, python, place))
                except (PeerError, OSError) as err:
                    why = str(err)
            why = meeting.first_says(why)
            if why:
                notes.append(f"{name} is left out: {why}")
            else:
                peers[name] = peer
        yield peers, notes


@contextlib.contextmanager
def turns_shown(job: Job, num_peers: int, meeting: Meeting) -> Iterator[Callable[[str], None]]:
    """Shows on stderr whose turn it is and how many there are, on the first host."""
    if not meeting.is_first:
        yield lambda text: None
        return
    cells = len(job.collectives) * len(job.payloads_bytes)
    total = cells * (len(job.variants) + num_peers) * (job.rounds + CHECKS)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("turns", total=total)

        def on_turn(text: str) -> None:
            progress.update(task, description=text, advance=1)

        yield on_turn


if __name__ == "__main__":
    with python_alone():
        sys.exit(main())
