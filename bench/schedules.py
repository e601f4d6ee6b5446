"""Schedules against their bounds: steps, bytes, proof time, and predicted against simulated time.

Every schedule is proved before anything is counted or timed. Bytes are those that the busiest
rank sends, over the fewest that any algorithm could (XLA's own collectives, which some schedules
hold, count as sending the fewest). Proof times are medians over rounds, with the quartiles. The
predicted time is that of the closed form, which never sees the schedule; the simulated one is
counted message by message on the same links.

    python bench/schedules.py [--ranks 2,3,8,64] [--algorithm ring] [--json]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.options import parser, several, whole
from bench.printing import show
from xcoll.algorithms import ALGORITHMS, build, direct, hierarchical, tree
from xcoll.costmodel import Pricer, operands
from xcoll.plan import Span, Stage
from xcoll.policy import Choice
from xcoll.printing import plain_table
from xcoll.proof import prove
from xcoll.schedule import FROM_SHARES, NativeStep, PermuteStep, Schedule
from xcoll.simulate import simulate
from xcoll.topology import Topology

RANKS = "2,3,4,7,8,16,32,64"
PAYLOAD_BYTES = 1 << 20
"""Bytes of the full payload: of an all-reduce's operand, of what an all-gather ends with."""

Row = dict[str, Any]


def choices() -> Iterator[tuple[Choice, str]]:
    """Yields every algorithm with its collectives, and some with other options."""
    for name, algorithm in ALGORITHMS.items():
        variants = [Choice(name)]
        if name == "hierarchical":
            variants = [hierarchical(num_segments=4)]
        elif name == "tree":
            variants.append(tree(radix=4))
        for choice in variants:
            for collective in algorithm.collectives:
                yield choice, collective
        if name == "direct":
            yield direct(shots=1), "all_reduce"


def topology_of(num_ranks: int) -> tuple[Topology, tuple[int, int]]:
    """Returns hosts at 1 Gbit/s, and how many hosts and devices: two hosts where that divides."""
    hosts = 2 if num_ranks % 2 == 0 else num_ranks
    levels = (hosts, num_ranks // hosts)
    axes = dict(zip(("host", "device"), levels, strict=True))
    return Topology.parse(f"{hosts}*cpu:{levels[1]}@1Gbit", axes), levels


def fewest(collective: str, num_ranks: int) -> Fraction:
    """Returns the payloads that the busiest rank cannot do without sending."""
    n = num_ranks
    return {
        "all_reduce": Fraction(2 * (n - 1), n),
        "broadcast": Fraction(1),  # the root sends everything once
        "gather": Fraction(1, n),  # every other rank sends its own share
    }.get(collective, Fraction(n - 1, n))


def sent(schedule: Schedule) -> Fraction:
    """Returns the payloads that the busiest rank sends."""
    slots: Counter[int] = Counter()
    whole = Fraction(0)
    for step, _ in schedule.flat():
        if isinstance(step, NativeStep):
            whole += fewest(step.collective, schedule.num_ranks)
        elif isinstance(step, PermuteStep):
            for lane in step.lanes:
                for source, _ in lane.pairs:
                    slots[source] += lane.send.count
    # One shot: the payload is one slot of as many as there are ranks.
    one_share = schedule.collective == "all_reduce" and schedule.enter == "own"
    whole *= schedule.num_ranks if one_share else 1
    return whole + Fraction(max(slots.values(), default=0), schedule.num_slots)


def measure(choice: Choice, collective: str, num_ranks: int, rounds: int) -> Row:
    """Proves one schedule, then counts and times it."""
    topology, levels = topology_of(num_ranks)
    dims = levels if ALGORITHMS[choice.name].needs_dims else ()
    schedule = build(choice, collective, num_ranks, dims=dims)
    prove(schedule)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        prove(schedule)
        times.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")

    span = Span(("host", "device"), num_ranks)
    stage = Stage(collective, span, choice, dims)
    elements = PAYLOAD_BYTES // 4
    if collective in FROM_SHARES:
        elements //= num_ranks
    (operand,) = operands(collective, (stage,), elements)
    start = time.perf_counter()
    predicted_ps = Pricer(topology, itemsize=4).stage_ps(stage, operand)
    pricing_s = time.perf_counter() - start
    simulated_ps = simulate(schedule, topology, span, 4 * operand.slot_elements).time_ps
    return {
        "algorithm": str(choice),
        "collective": collective,
        "ranks": num_ranks,
        "steps": sum(1 for _ in schedule.flat()),
        "bytes_over_fewest": float(sent(schedule) / fewest(collective, num_ranks)),
        "proof_s": {"median": middle, "low": low, "high": high},
        "pricing_s": pricing_s,
        "predicted_s": predicted_ps / 1e12,
        "simulated_s": simulated_ps / 1e12,
        "predicted_over_simulated": predicted_ps / simulated_ps,
    }


def run(ranks: Sequence[int], name: str | None, rounds: int, console: Console) -> Row:
    """Measures everything; returns the figures, with the machine they are from."""
    todo = [
        (choice, collective, n)
        for choice, collective in choices()
        if name in (None, choice.name)
        for n in ranks
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    rows = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("schedules", total=len(todo))
        for choice, collective, n in todo:
            progress.update(bar, description=f"{choice} {collective}, {n} ranks")
            rows.append(measure(choice, collective, n, rounds))
            progress.advance(bar)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rounds": rounds,
        "payload_bytes": PAYLOAD_BYTES,
        "schedules": rows,
    }


def table(figures: Row) -> Table:
    """Lays the figures out for people."""
    out = plain_table(
        f"{figures['machine']}; Python {figures['python']}; numpy {figures['numpy']};"
        f" payload {figures['payload_bytes'] >> 20} MiB, hosts at 1 Gbit/s;"
        f" {figures['rounds']} rounds, times in ms, median \\[quartiles]"
    )
    for name in ("algorithm", "collective"):
        out.add_column(name)
    for name in ("ranks", "steps", "bytes / fewest", "proof", "predicted", "simulated", "ratio"):
        out.add_column(name, justify="right")
    before = None
    for row in figures["schedules"]:
        key = (row["algorithm"], row["collective"])
        if before is not None and key != before:
            out.add_section()
        proof = row["proof_s"]
        out.add_row(
            *(key if key != before else ("", "")),
            str(row["ranks"]),
            str(row["steps"]),
            f"{row['bytes_over_fewest']:.3f}",
            f"{proof['median'] * 1e3:.2f} [{proof['low'] * 1e3:.2f}, {proof['high'] * 1e3:.2f}]",
            f"{row['predicted_s'] * 1e3:.3f}",
            f"{row['simulated_s'] * 1e3:.3f}",
            f"{row['predicted_over_simulated']:.3f}",
        )
        before = key
    return out


def main() -> int:
    """Runs the benchmark."""
    words = parser(__doc__, rounds=5, fewest=2)
    add = words.add_argument
    add("--ranks", type=several(whole(2)), default=RANKS, metavar="N,...", help="of a schedule")
    add("--algorithm", choices=tuple(ALGORITHMS), metavar="NAME",
        help=f"only this one of {', '.join(ALGORITHMS)}")  # fmt: skip
    args = words.parse_args()
    figures = run(args.ranks, args.algorithm, args.rounds, Console(stderr=True))
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(table(figures), width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
