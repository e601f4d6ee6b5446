"""What xcoll costs: the example's step plain against optimised, native plans and a forced ring.

Correctness first: the optimised step's loss and parameters are compared with the plain ones.
Then each program is traced, lowered, compiled and run in turn, round after round in one process,
so that whatever else the machine does falls on all alike. Medians, with the spread between the
quartiles.

    python bench/overhead.py [--rounds 7] [--json]
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import lm_data
import lm_devices
import lm_job
import numpy as np
import optax
import train_lm
from lm_model import Config
from rich.markup import escape
from rich.table import Table

import xcoll
from bench.options import converted, parser, whole
from bench.printing import show
from xcoll import hlo

AXES = {"host": 2, "device": 4}
MEASURES = ("trace_s", "lower_s", "compile_s", "step_s")
LIMITS = {"native": 1.15, "ring": 1.5}
"""Compile time relative to plain that each variant may take."""


def variants(job: lm_job.Job, topology: str) -> dict[str, Callable[[], Callable[..., Any]]]:
    """Returns makers of the step: plain, with native plans, with a ring forced.

    Makers, so that every round starts with a function that jax has not traced.
    """

    def optimised(algorithm: str) -> Callable[[], Callable[..., Any]]:
        policy = xcoll.Policy(algorithm=algorithm)
        return lambda: xcoll.optimize(train_lm.make_step(job), policy=policy, topology=topology)

    return {
        "plain": lambda: train_lm.make_step(job),
        "native": optimised("native"),
        "ring": optimised("ring"),
    }


def measure(make: Callable[[], Callable[..., Any]], args: tuple[Any, ...], steps: int) -> Any:
    """Traces, lowers, compiles and runs a step; returns times, the program and its results."""
    gc.collect()
    clock = [time.perf_counter()]
    traced = jax.jit(make()).trace(*args)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    program = lowered.compile()
    clock.append(time.perf_counter())
    result = jax.block_until_ready(program(*args))  # not timed: the first run allocates
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    stages = [after - before for before, after in itertools.pairwise(clock)]
    return dict(zip(MEASURES, [*stages, statistics.median(times)], strict=True)), program, result


def check(name: str, result: Any, plain: Any) -> None:
    """Stops where a variant computes something else than the plain step.

    AdamW's first step moves a parameter by lr * g / (|g| + eps), so a gradient near eps turns
    rounding into up to 2 lr; the loss has no such amplification.
    """
    (params, _, loss), (plain_params, _, plain_loss) = result, plain
    if abs(float(loss) - float(plain_loss)) > 1e-5 * abs(float(plain_loss)):
        raise SystemExit(f"{name}: loss {loss}, plain {plain_loss}")
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(plain_params), strict=True):
        if np.max(np.abs(np.asarray(got) - np.asarray(want))) > 2.1e-3:
            raise SystemExit(f"{name}: parameters differ from the plain step's")


def run(rounds: int, steps: int, topology: str) -> dict[str, Any]:
    """Measures every variant in every round, in turn; returns the figures."""
    try:
        mesh = lm_devices.make_mesh(AXES)
    except ValueError as err:
        raise SystemExit(str(err)) from None
    job = lm_job.Job(Config(), optax.adamw(1e-3), mesh)
    state = lm_job.initial_state(job, seed=0)
    text = lm_data.windows(lm_data.stdlib_corpus().train, 16, 64, (0,))
    args = (*state, lm_data.place(text, mesh))

    makers = variants(job, topology)
    samples: dict[str, dict[str, list[float]]] = {n: {m: [] for m in MEASURES} for n in makers}
    texts: dict[str, str] = {}
    sizes: dict[str, int] = {}
    plain_result = None
    for index in range(rounds + 1):  # the first round warms caches of jax and is not counted
        for name, make in makers.items():
            times, program, result = measure(make, args, steps)
            if index == 0:
                plain_result = result if name == "plain" else plain_result
                check(name, result, plain_result)
                texts[name] = hlo.canonical(program)
                sizes[name] = sum(" = " in line for line in program.as_text().splitlines())
                continue
            for measure_name, value in times.items():
                samples[name][measure_name].append(value)

    ratio = {
        name: {
            m: statistics.median(
                [a / b for a, b in zip(samples[name][m], samples["plain"][m], strict=True)]
            )
            for m in MEASURES
        }
        for name in makers
    }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "topology": topology,
        "rounds": rounds,
        "seconds": {n: {m: spread(v) for m, v in row.items()} for n, row in samples.items()},
        "relative_to_plain": ratio,
        "instructions": sizes,
        "native_program_is_the_plain_one": texts["native"] == texts["plain"],
        "within_limits": {n: ratio[n]["compile_s"] <= limit for n, limit in LIMITS.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def table(figures: dict[str, Any]) -> Table:
    """Lays the figures out for people."""
    title = (
        f"{figures['device']}; {figures['machine']}; jax {figures['jax']};"
        f" {figures['rounds']} rounds, median [quartiles]"
    )
    # Escaped: rich would take what stands in brackets for a style.
    out = Table(title=escape(title), title_justify="left")
    out.add_column("")
    for name in figures["seconds"]:
        out.add_column(name, justify="right")
    for m in MEASURES:
        cells = []
        for name, row in figures["seconds"].items():
            s = row[m]
            cell = f"{s['median'] * 1e3:.1f} [{s['low'] * 1e3:.1f}, {s['high'] * 1e3:.1f}]"
            ratio = figures["relative_to_plain"][name][m]
            cell = escape(cell)
            cells.append(cell if name == "plain" else f"{cell}  x {ratio:.2f}")
        out.add_row(f"{m.removesuffix('_s')}, ms", *cells)
    out.add_row("instructions", *(f"{n:,}" for n in figures["instructions"].values()))
    return out


def _topology(text: str) -> str:
    xcoll.Topology.parse(text, axes=AXES)
    return text


def main() -> int:
    """Runs the benchmark; returns 1 where native plans are not the same program."""
    words = parser(__doc__, rounds=7, fewest=2)
    add = words.add_argument
    add("--steps", type=whole(1), default=5, metavar="N", help="timed steps a round")
    add("--topology", type=converted(_topology), default="2*cpu:4@200Mbit", help="to plan for")
    add("--virtual-devices", type=whole(0), default=8, metavar="N", help="0: the machine's own")
    args = words.parse_args()
    if args.virtual_devices:
        lm_devices.use_virtual_devices(args.virtual_devices)
    figures = run(args.rounds, args.steps, args.topology)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(table(figures))
        same = figures["native_program_is_the_plain_one"]
        show(f"{'ok  ' if same else 'FAIL'} native plans compile to the plain program")
        for name, limit in LIMITS.items():
            ok = figures["within_limits"][name]
            show(f"{'ok  ' if ok else 'over'} {name}: compile time within x {limit}")
    return 0 if figures["native_program_is_the_plain_one"] else 1


if __name__ == "__main__":
    sys.exit(main())
