"""What runs on each host: the cases of one cluster, until the time is over.

Started by ``python -m bench.regret``, inside of `bench.cluster`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.regret import planned_from, results
from bench.regret.considered import considered
from bench.regret.grid import AXES, COLLECTIVES, SIZES, Setting, cases
from bench.regret.measuring import estimate_s, measure
from bench.timing import Meeting, machine
from xcoll.streams import python_alone


def main() -> int:
    """Measures what there is time for, and adds it to the file of results."""
    started_s = time.monotonic()
    args = _arguments()
    jax.distributed.initialize()
    meeting = Meeting("regret")
    facts = machine(meeting)
    setting = Setting(
        hosts=jax.process_count(),
        devices=jax.local_device_count(),
        rate_bits_per_s=args.rate_bits_per_s,
    )
    shape = (setting.hosts, setting.devices)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), AXES)
    kept = results.read(args.results) if meeting.is_first else []
    done = meeting.first_says([str(result.case) for result in kept])
    every = cases(setting, args.collectives, args.sizes)
    wanted = [case for case in every if str(case) not in done]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=not meeting.is_first)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tuning = progress.add_task("profile", total=100)

        def tell(share: float, what: str) -> None:
            progress.update(tuning, completed=round(100 * share), description=what)

        try:
            topology, launch_s = planned_from.profile(
                args.profile, mesh, meeting, args.tune_budget, tell
            )
        except ValueError as err:  # the same on every host
            sys.exit(f"bench.regret: --profile: {err}")
        progress.remove_task(tuning)
        task = progress.add_task(str(setting), total=len(wanted))
        for case in wanted:
            plans = considered(case.request(), topology)
            left_s = args.budget - (time.monotonic() - started_s)
            if meeting.first_says(estimate_s(plans) <= left_s):
                progress.update(task, description=str(case))
                result = measure(case, plans, topology.name, launch_s, mesh, meeting, facts)
                if meeting.is_first:
                    kept.append(result)
                    results.write(args.results, kept)
            progress.advance(task)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="started by python -m bench.regret")
    add = parser.add_argument
    add("--results", type=Path, required=True)
    add("--rate-bits-per-s", type=int, required=True)
    add("--budget", type=float, required=True, help="seconds, from the start of this")
    add("--profile", type=Path, required=True, help="is measured where there is none")
    add("--tune-budget", type=float, default=60.0, help="seconds")
    add("--collectives", nargs="+", default=COLLECTIVES)
    add("--sizes", nargs="+", type=int, default=SIZES)
    return parser.parse_args()


if __name__ == "__main__":
    with python_alone():
        sys.exit(main())
