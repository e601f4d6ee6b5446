"""Measures a mesh and fits the cost model to it."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import jax

from xcoll import agreement
from xcoll.calibration.agenda import Agenda, Case
from xcoll.calibration.families import SHARED, families
from xcoll.calibration.fitting import fit
from xcoll.calibration.group import Group
from xcoll.calibration.programs import Programs
from xcoll.calibration.reading import read_calibration
from xcoll.calibration.result import Calibration, Sample
from xcoll.calibration.skeletons import skeleton
from xcoll.hardware.profiles import System, default_path, prepare, write
from xcoll.units import readable_bytes

Progress = Callable[[float, str], None]
"""Is told the share of the budget that is over, and what is being measured."""

_FINISH_S = 0.5
"""Seconds kept for the fit."""


def tune(
    mesh: jax.sharding.Mesh,
    *,
    budget_s: float = 60.0,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measures a mesh, fits the terms of the cost model, and writes the profile.

    Measured are permutes along each level of each mesh axis, one way and both; XLA's own
    all-reduce, reduce-scatter, all-gather and all-to-all over each axis and over all, on operands
    of 1 KiB to 64 MiB; and what a device does by itself: copies, sums, encoding and decoding.
    Sizes and operations take turns, round by round, and medians are kept. The time given decides
    how many sizes and rounds; larger sizes than were measured are extrapolated.

    In a program of several processes all of them call this, with the same mesh, and measure
    together; the first one's budget and fit hold for all. Times are those of the process that took
    longest. On CPU every process is taken for a host.

    Args:
      mesh: what is measured; its devices should do nothing else meanwhile.
      budget_s: seconds for everything, compilation included. A few operations are measured however
        little it is.
      out: where the profile is written; None keeps it in the user's directory for caches.
      progress: called on the first process with the share of the budget that is over and with what
        is measured, before each measurement.

    Returns:
      What was found. Its ``topology`` is to plan with, as is what
      ``Topology.load(path, mesh)`` reads from the profile later on.

    Raises:
      TypeError: no mesh of devices.
      ValueError: a mesh of one device, of compile-only devices, or one whose devices are of unknown
        kind or in an irregular order; a budget that is no positive number.
      RuntimeError: several processes without `jax.distributed`.
      PlanMismatchError: the processes called it with different meshes.
      HostLostError: a process is lost (`xcoll.initialize`).
      TimeoutError: a process did not come.
      OSError: the profile can't be written; found before anything is measured.

    Example:
      >>> import jax, tempfile
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("device",))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     tuned = tune(mesh, budget_s=1, out=f"{folder}/two.json")
      >>> tuned.topology.device.platform, [axis.name for axis in tuned.topology.axes]
      ('cpu', ['device'])
    """
    started = time.monotonic()
    _check(mesh, budget_s)
    base = skeleton(mesh)
    system = System.of(mesh)
    path = default_path(system) if out is None else out
    prepare("tune", path)
    processes = agreement.participants(mesh)
    agreement.agree("xcoll.tune", system.fingerprint, str(system), processes)
    group = Group(processes, timeout_s=budget_s + 60)
    found = families(base)
    clock = _Clock(started)
    agenda = Agenda(
        found,
        lambda family, num_bytes: family.operand_bytes(num_bytes, base),
        clock,
        budget_s - min(_FINISH_S, budget_s / 10),
    )
    times = _measure(Programs(mesh), agenda, group, progress)
    samples = _samples(times, group)
    text = ""
    if group.is_first:
        topology, terms = fit(base, found, samples)
        made = Calibration(
            system=system,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            took_s=round(clock(), 3),
            samples=samples,
            terms=terms,
            topology=topology,
        )
        text = made.to_json()
    text = group.first_says(text)
    write(path, text)
    calibration = read_calibration(path, mesh)
    topology = calibration.topology
    agreement.agree("xcoll.tune/profile", topology.fingerprint, str(topology), processes)
    return calibration


def _check(mesh: jax.sharding.Mesh, budget_s: float) -> None:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"tune({mesh!r}): must be a jax.sharding.Mesh, with devices")
    if mesh.size < 2:
        raise ValueError(
            f"tune: a mesh of {mesh.size} device has no links to measure; give it more"
        )
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float):
        raise TypeError(f"tune(budget_s={budget_s!r}): must be a number of seconds")
    if not 0 < budget_s < math.inf:
        raise ValueError(f"tune(budget_s={budget_s!r}): must be a positive number of seconds")
    platform = mesh.devices.flat[0].platform
    try:
        present = set(jax.devices(platform))
    except RuntimeError:
        present = set()
    if not set(mesh.devices.flat) <= present:
        raise ValueError(
            "tune: the mesh is of compile-only devices; measure on devices that are there"
        )


@dataclass
class _Clock:
    """Seconds since a point in time."""

    started: float

    def __call__(self) -> float:
        return time.monotonic() - self.started


def _measure(
    programs: Programs, agenda: Agenda, group: Group, progress: Progress | None
) -> dict[Case, list[float]]:
    """Measures what the first process decides; returns seconds of one call, on this process."""
    times: dict[Case, list[float]] = {}
    has_gc = gc.isenabled()
    gc.disable()
    try:
        while True:
            step = agenda.next() if group.is_first else None
            said = group.first_says(json.dumps(step and agenda.numbers(*step)))
            numbers = json.loads(said)
            if numbers is None:
                return times
            case, calls = agenda.case(*numbers)
            if progress is not None and group.is_first:
                progress(agenda.share_done, f"{case.family}, {readable_bytes(case.num_bytes)}")
            begun = time.monotonic()
            call = programs.call(case.family, case.num_bytes)
            if case not in times:
                jax.block_until_ready(call())
            group.wait()
            start = time.monotonic()
            taken = [_call_s(call) for _ in range(calls)]
            # Processes that are done early leave the cores to the others: a call of what each does
            # by itself takes its share of the whole.
            own_s = (time.monotonic() - start) / calls
            is_shared = case.family.kind in SHARED
            times.setdefault(case, []).append(own_s if is_shared else median(taken))
            group.wait()
            now = time.monotonic()
            # Who only sends is done early; the time that counts is that of all.
            agenda.record(case, (now - start) / calls, calls, now - begun)
    finally:
        if has_gc:
            gc.enable()


def _call_s(call: Callable[[], Any]) -> float:
    start = time.monotonic()
    jax.block_until_ready(call())
    return time.monotonic() - start


def _samples(times: dict[Case, list[float]], group: Group) -> tuple[Sample, ...]:
    """Returns what was measured, each time that of the process that took longest."""
    everyones = [json.loads(text) for text in group.all_say(json.dumps(list(times.values())))]
    found = []
    for number, case in enumerate(times):
        slowest = [max(own) for own in zip(*(each[number] for each in everyones), strict=True)]
        middle = median(slowest)
        family = case.family
        found.append(
            Sample(
                kind=family.kind,
                axes=family.axes,
                of=family.of,
                num_bytes=case.num_bytes,
                median_s=middle,
                spread_s=1.4826 * median(abs(t - middle) for t in slowest),
                count=len(slowest),
            )
        )
    return tuple(found)
