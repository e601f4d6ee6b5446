"""One collective at one payload on one cluster: checked, then timed variant by variant in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from bench.peers.control import Peer
from bench.timing import NOBODY, Elsewhere, Meeting, Span, Times, interleaved
from bench.wire.bounds import bound_s, crossing, encoded_bytes, goodput_bound_s
from bench.wire.breakdown import breakdown
from bench.wire.checking import Checked, check
from bench.wire.expected import Expected, payload_of
from bench.wire.jobs import Job
from bench.wire.programs import Program, codec_of, place, program
from bench.wire.targets import target
from xcoll import Topology
from xcoll.units import readable_bytes

FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Cell:
    """What is measured, and where.

    Attributes:
      job: of the cluster.
      mesh: of its devices.
      topology: what is planned for.
      meeting: of its processes.
      collective: jax.lax's name.
      payload_bytes: of each device: the operand, or what an all-gather ends with; as
        `shared_bytes` has it.
    """

    job: Job
    mesh: jax.sharding.Mesh
    topology: Topology
    meeting: Meeting
    collective: str
    payload_bytes: int

    @property
    def num_elements(self) -> int:
        """Elements of each rank's operand."""
        shares = self.job.num_ranks if self.collective == "all_gather" else 1
        return self.payload_bytes // 4 // shares

    def __str__(self) -> str:
        return f"{self.collective} {readable_bytes(self.payload_bytes)}"


@dataclass(frozen=True)
class _Turn(Elsewhere):
    """A peer's turn: on the first host the peer's ranks run, elsewhere nothing does."""

    peer: Peer | None

    def timed(self, calls: int) -> Span:
        return NOBODY if self.peer is None else self.peer.timed(calls)


def measure(
    cell: Cell, peers: Mapping[str, Peer | None], on_turn: Callable[[str], None]
) -> dict[str, Any]:
    """Checks and times all variants of a cell.

    Args:
      cell: what to measure.
      peers: other libraries' ranks; None for each on all hosts but the first.
      on_turn: told what runs.

    Returns:
      The figures, the same on every process.

    Raises:
      WrongResultError: a variant returns something wrong.
      PeerError: a peer does.
    """
    job, meeting = cell.job, cell.meeting
    inputs = [payload_of(rank, cell.num_elements) for rank in range(job.num_ranks)]
    x = place(cell.mesh, inputs)
    expected = Expected(cell.collective, inputs)
    programs: dict[str, Program] = {}
    checked: dict[str, Checked] = {}
    for variant in job.variants:
        on_turn(f"{cell}: {variant}, checked")
        made = program(variant, cell.collective, cell.mesh, cell.topology, x)
        programs[variant] = made
        name = f"{cell}, {variant}"
        checked[variant] = check(name, made, x, expected, meeting, cell.mesh)
    del expected, inputs
    turns: dict[str, Any] = {
        variant: (lambda made=made: made.run(x)) for variant, made in programs.items()
    }
    notes = []
    for name, peer in peers.items():
        on_turn(f"{cell}: {name}, checked")
        missing = peer.prepare(cell.collective, cell.num_elements) if peer is not None else None
        if missing := meeting.first_says(missing):
            notes.append(f"{name} has no {cell.collective}: {missing}")
        else:
            turns[name] = _Turn(peer)
    mean_s = statistics.mean(found.first_s for found in checked.values())
    affordable = int(job.cell_s / (mean_s * job.calls * len(turns)))
    rounds = max(min(job.rounds, affordable), min(FEWEST_ROUNDS, job.rounds))
    times = interleaved(
        turns,
        rounds,
        meeting,
        calls=job.calls,
        warm_ups=1 if job.calls > 1 else 0,
        on_turn=lambda name: on_turn(f"{cell}: {name}"),
    )
    rows = [_row(cell, name, times, programs.get(name), checked.get(name)) for name in times]
    figures = {
        "collective": cell.collective,
        "payload_bytes": cell.payload_bytes,
        "rounds": rounds,
        "calls": job.calls,
        "notes": notes,
        "rows": rows,
    }
    missed = [row["variant"] for row in rows if row["met"] is False]
    shown = list(programs) if job.breakdown else missed
    figures["breakdowns"] = [
        breakdown(cell, name, plan, times[name], on_turn)
        for name in shown
        if (plan := programs[name].plan) is not None
    ]
    return figures


def _row(
    cell: Cell,
    name: str,
    times: Mapping[str, Times],
    made: Program | None,
    checked: Checked | None,
) -> dict[str, Any]:
    """Returns the figures of one variant."""
    job = cell.job
    plan = made.plan if made else None
    codec = codec_of(plan) if plan else None
    share = crossing(cell.collective, job.hosts, job.devices)
    wire_bytes = share * encoded_bytes(cell.payload_bytes, codec)
    bound = bound_s(wire_bytes, job.rate_bits_per_s)
    mine, lax = times[name], times.get("lax")
    over_bound = mine.median_s / bound
    speedup = 1 / mine.over(lax) if lax else None
    goal = target(cell.collective, cell.payload_bytes, name, job.cluster)
    predicted_s = made.predicted_s if made else None
    return {
        "variant": name,
        "plan": plan.name if plan else None,
        "wire_bytes": round(wire_bytes),
        "bound_s": bound,
        "goodput_bound_s": goodput_bound_s(wire_bytes, job.rate_bits_per_s),
        **mine.to_dict(),
        "times_lax": speedup,
        "over_bound": over_bound,
        "predicted_s": predicted_s,
        "native_predicted_s": made.native_s if made else None,
        "deviation": checked.deviation if checked else None,
        "largest_deviation_allowed": checked.limit if checked else None,
        "target": str(goal) if goal else None,
        "met": goal.is_met(over_bound, speedup) if goal and speedup is not None else None,
    }
