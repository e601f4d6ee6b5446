"""Planning: time and memory for 1, 10 and 100 groups on 8 to 131,072 devices.

Correctness first: every plan's stages cover the ranks exactly once, its price is at most nine
tenths of native's or it is native, and it survives JSON. Each round plans payloads that no round
before had, so that no plan comes from the cache; what stays cached between rounds (closed forms)
is what stays cached between the groups of a program. The first plan of each system, with nothing
cached, is shown by itself. Memory is counted in rounds of its own, not timed.

    python bench/planner.py [--rounds 5] [--groups 1,10,100] [--json]
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.options import parser, several, whole
from bench.printing import show
from xcoll.plan import Plan, Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.topology import Topology

SYSTEMS: dict[str, dict[str, int]] = {
    "2*cpu:4@200Mbit": {"host": 2, "device": 4},
    "8*cpu:8@1Gbit": {"host": 8, "device": 8},
    "v5p:8x8x8": {"data": 64, "model": 8},
    "16*v5e:16x16": {"data": 256, "model": 16},
    "16384*h100:8": {"data": 16384, "model": 8},
    "512*v5e:16x16": {"data": 8192, "model": 16},
}
"""Systems by their text, with mesh axes."""

LIMIT_S = 0.050
"""Seconds a group may take on the largest system."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def requests(axes: dict[str, int], count: int, start: int) -> Iterator[Request]:
    """Yields ``count`` requests, all different, of 4 KiB to 1 GiB; no two starts share any."""
    ranks = math.prod(axes.values())
    for index in range(start, start + count):
        collective = COLLECTIVES[index % len(COLLECTIVES)]
        elements = ranks * (1 + (index * 2_654_435_761) % 4099) + ranks * 4099 * index
        yield Request(
            collective=collective,
            op="sum" if collective in ("all_reduce", "reduce_scatter") else "none",
            axes=tuple(axes),
            axis_sizes=tuple(axes.values()),
            dtype="float32",
            itemsize=4,
            shapes=((elements,),),
        )


def check(made: Plan) -> None:
    """Stops where a plan is no plan for its request."""
    request = made.request
    if Plan.from_json(made.to_json()) != made:
        raise SystemExit(f"{made.name}: changed by JSON")
    down = [s for s in made.stages if s.collective != "all_gather" or len(made.stages) == 1]
    covered = made.stages if request.collective != "all_reduce" else down
    if math.prod(stage.span.num_ranks for stage in covered) != request.num_ranks:
        raise SystemExit(f"{made.name}: its stages do not cover {request.num_ranks} ranks")
    predicted, native = made.predicted_time_ps, made.native_time_ps
    if predicted is None or native is None or not made.candidates:
        raise SystemExit(f"{made.name}: was not priced, or has beaten nothing")
    if not made.is_native and predicted * 10 > native * 9:
        raise SystemExit(f"{made.name}: chosen for less than a tenth")


def run(rounds: int, groups: Sequence[int], console: Console) -> dict[str, Any]:
    """Plans all group counts on all systems; returns the figures."""
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("planning", total=len(SYSTEMS) * len(groups))
        for text, axes in SYSTEMS.items():
            topology = Topology.parse(text, axes=axes)
            used = 0
            start = time.perf_counter()
            plans = [plan(r, topology, Policy()) for r in requests(axes, 1, used)]
            first_s = time.perf_counter() - start
            used += 1
            plans += [plan(r, topology, Policy()) for r in requests(axes, 11, used)]
            used += 11
            for made in plans:
                check(made)
            for count in groups:
                per_group = []
                for _ in range(rounds):
                    wanted = list(requests(axes, count, used))
                    used += count
                    start = time.perf_counter()
                    for request in wanted:
                        plan(request, topology, Policy())
                    per_group.append((time.perf_counter() - start) / count)
                tracemalloc.start()
                kept = [plan(r, topology, Policy()) for r in requests(axes, count, used)]
                used += count
                size, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                rows.append(
                    {
                        "system": text,
                        "devices": math.prod(axes.values()),
                        "groups": count,
                        "first_plan_s": first_s,
                        "seconds_per_group": spread(per_group),
                        "candidates": max(len(made.candidates) for made in kept),
                        "kept_bytes": size,
                        "peak_bytes": peak,
                    }
                )
                progress.advance(task)
    largest = max(row["devices"] for row in rows)
    worst = max(r["seconds_per_group"]["median"] for r in rows if r["devices"] == largest)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "rounds": rounds,
        "limit_s": LIMIT_S,
        "worst_median_at_largest_s": worst,
        "within_limit": worst <= LIMIT_S,
        "rows": rows,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median and the quartiles."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def table(figures: dict[str, Any]) -> Table:
    """Lays the figures out for people."""
    out = Table(
        title=f"{figures['machine']}; python {figures['python']}; jax {figures['jax']};"
        f" {figures['rounds']} rounds, median \\[quartiles]; every plan checked",
        title_justify="left",
    )
    for name in ("system", "devices", "groups", "ms a group", "first plan, ms", "candidates"):
        out.add_column(name, justify="left" if name == "system" else "right")
    out.add_column("memory kept / peak, MiB", justify="right")
    for row in figures["rows"]:
        s = row["seconds_per_group"]
        out.add_row(
            row["system"],
            f"{row['devices']:,}",
            str(row["groups"]),
            f"{s['median'] * 1e3:.1f} [{s['low'] * 1e3:.1f}, {s['high'] * 1e3:.1f}]",
            f"{row['first_plan_s'] * 1e3:.1f}",
            str(row["candidates"]),
            f"{row['kept_bytes'] / 2**20:.2f} / {row['peak_bytes'] / 2**20:.2f}",
        )
    return out


def main() -> int:
    """Runs the benchmark; returns 1 where planning takes longer than the limit."""
    words = parser(__doc__, rounds=5)
    words.add_argument(
        "--groups", type=several(whole(1)), default="1,10,100", metavar="N,...", help="so many"
    )
    args = words.parse_args()
    figures = run(args.rounds, args.groups, Console(stderr=True))
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(table(figures))
        word = "ok  " if figures["within_limit"] else "over"
        worst = figures["worst_median_at_largest_s"] * 1e3
        show(f"{word} {worst:.1f} ms a group at most on the largest system (limit 50)")
    return 0 if figures["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
