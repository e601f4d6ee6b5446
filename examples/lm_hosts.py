"""Trains plain, exact, int8 and int4 with error feedback on several hosts, against the clock."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import lm_compare
import lm_data
import lm_figures
import numpy as np
from lm_job import Job, batches
from lm_options import settings
from lm_processes import Processes, step_times_s
from lm_replicas import check_replicas
from lm_variants import ALONE, Variant, compressions, make_variants
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import xcoll
from xcoll.files import write_text

Tree = Any

CHECKED_EVERY = 10
"""Steps after which all replicas are compared."""


def run(
    job: Job,
    args: argparse.Namespace,
    corpus: lm_data.Corpus,
    *,
    make_step: Callable[..., Any],
    make_probe: Callable[[Job], Any],
    held_out: Callable[[Tree], float],
    console: Console,
) -> int:
    """Trains all variants, prints and writes what was measured; returns the exit code.

    Raises:
      RuntimeError: devices do not hold the same parameters; on every process.
    """
    processes = Processes()
    one_clock = processes.share_a_clock()
    text = batches(corpus.train, job, args, args.seed)
    first = next(text)
    variants = make_variants(
        job, make_step, first, topology=args.hardware, seed=args.seed,
        told=lambda name: console.log(f"compiling {name}", highlight=False),
    )  # fmt: skip
    starts = {
        name: check_replicas(f"{name}, at the start", variant.params, processes)
        for name, variant in variants.items()
    }
    probe = make_probe(job)
    gradient, _ = lm_compare.check_gradients(
        probe, xcoll.optimize(probe, topology=args.hardware), variants["plain"].params, first
    )
    num_checks = train(variants, itertools.chain([first], text), args.steps, processes, console)
    figures = measured(variants, processes, one_clock, args.target_loss)
    compared = {name: row["losses"] for name, row in figures["variants"].items()}
    figures["checks"] = {
        "all_start_alike": len(set(starts.values())) == 1,
        "gradient_within_bound": gradient["max_ratio"] <= 1.0,
        "exact_losses_as_plain": differ(compared["exact"], compared["plain"])
        <= lm_compare.LOSS_TOLERANCE,
        "losses_finite": bool(np.all(np.isfinite([*compared.values()]))),
        "bytes_as_predicted": all(
            v.report.wire_bytes() == figures["variants"][name]["busiest_device_bytes"]
            for name, v in variants.items()
            if v.report is not None
        ),
        "codecs_on_the_wire": all(
            codec.wire_dtype in figures["variants"][name]["wire_dtypes"]
            for name, codec in compressions(job.mesh).items()
        )
        or job.mesh.devices.shape[0] == 1,
        "replicas_identical": True,  # else it would not have come here
    }
    for name, row in figures["variants"].items():
        row["held_out"] = held_out(variants[name].params)
    report = variants["exact"].report
    assert report is not None
    figures |= {
        "settings": settings(args, job.mesh),
        "machine": lm_figures.machine(),
        "topology": report.topology,
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(job.params)),
        "tokens_a_step": args.batch * args.seq_len,
        "steps": args.steps,
        "smoothed": min(lm_figures.SMOOTHED, args.steps),
        "replica_checks": num_checks,
        "gradient": gradient,
        "loss_difference": differ(compared["exact"], compared["plain"]),
    }
    if processes.here == 0:
        write(figures, args.out, console, as_json=args.json)
    return 0 if all(figures["checks"].values()) else 1


def differ(losses: list[float], others: list[float]) -> float:
    """Returns the largest difference between losses of the same step."""
    return float(np.max(np.abs(np.subtract(losses, others))))


def train(
    variants: dict[str, Variant],
    text: Any,
    num_steps: int,
    processes: Processes,
    console: Console,
) -> int:
    """Takes each step with every variant, which begins in turn; returns how often all were checked.

    All processes begin a step together: what one has still to do for the last one, another is not
    timed for. Replicas are compared every `CHECKED_EVERY` steps and after the last.

    Raises:
      RuntimeError: replicas differ; on every process.
    """
    columns = (
        TextColumn("step"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[losses]}"),
        TimeRemainingColumn(),
    )
    order = list(variants.values())
    num_checks = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=num_steps, losses="")
        for index, tokens in enumerate(itertools.islice(text, num_steps)):
            for variant in order[index % len(order) :] + order[: index % len(order)]:
                processes.barrier()
                variant.step(tokens)
            trained = [variant for variant in order if variant.name != ALONE]
            shown = "  ".join(f"{v.name} {v.losses[-1]:.3f}" for v in trained)
            progress.update(task, advance=1, losses=shown)
            if (index + 1) % CHECKED_EVERY == 0 or index + 1 == num_steps:
                for variant in trained:
                    held = (variant.params, variant.opt_state)
                    check_replicas(f"{variant.name}, after step {index + 1}", held, processes)
                num_checks += 1
    return num_checks


def measured(
    variants: dict[str, Variant],
    processes: Processes,
    one_clock: bool,
    target_loss: float | None,
) -> dict[str, Any]:
    """Returns the figures of each variant; all processes have to call it.

    Raises:
      RuntimeError: a loss is not the same on all processes; on every process.
    """
    spans = processes.gather({name: variant.spans for name, variant in variants.items()})
    for name, variant in variants.items():
        if name != ALONE and any(own != variant.losses for own in processes.gather(variant.losses)):
            raise RuntimeError(f"{name}: processes do not have the same losses")
    timed = {
        name: lm_figures.times(step_times_s([own[name] for own in spans], one_clock))
        for name in variants
    }
    compute = timed.pop(ALONE)
    exact = variants["exact"].report
    final = {name: float(lm_figures.smoothed(variants[name].losses)[-1]) for name in timed}
    target = max(final.values()) if target_loss is None else target_loss
    rows = {}
    for name, row in timed.items():
        variant = variants[name]
        report = exact if variant.report is None else variant.report
        rows[name] = {
            **row,
            **variant.sent(),
            "losses": variant.losses,
            "final_loss": final[name],
            "time_to_target_s": lm_figures.time_to_loss_s(variant.losses, row["times_s"], target),
            "communication_s": row["median_s"] - compute["median_s"],
            "predicted_communication_s": predicted_s(report, native=variant.report is None),
            "compile_s": variant.compile_s,
        }
    over = "all processes, earliest start to latest end"
    return {
        "timed": over if one_clock else "the slowest process's own: no clock is common to all",
        "target_loss": target,
        "compute": compute,
        "variants": rows,
    }


def predicted_s(report: xcoll.Report | None, *, native: bool) -> float | None:
    """Returns the predicted time of a step's collectives, as planned or by XLA; None if unknown."""
    total = 0.0
    for site, *_ in report.groups() if report is not None else ():
        time_s = site.native_time_s if native else site.predicted_time_s
        if time_s is None:
            return None
        total += time_s * (site.count or 1)
    return total


def write(figures: dict[str, Any], out: Path, console: Console, *, as_json: bool) -> None:
    """Prints the table and the checks, and writes ``summary.json`` and ``loss.png``."""
    console.print(lm_figures.table(figures))
    for check, passed in figures["checks"].items():
        console.print(f"{'ok  ' if passed else 'FAIL'} {check.replace('_', ' ')}")
    console.print(
        f"largest loss difference of exact to plain: {figures['loss_difference']:.1e} (allowed"
        f" {lm_compare.LOSS_TOLERANCE}); replicas compared {figures['replica_checks']} times"
    )
    figures["plot"] = None
    if importlib.util.find_spec("matplotlib") is not None:
        lm_figures.plot(figures, out / "loss.png")
        figures["plot"] = str(out / "loss.png")
    else:
        console.print(
            "no curves: matplotlib is not installed; pip install 'jax-xcoll[bench]'", markup=False
        )
    path = out / "summary.json"
    write_text(path, json.dumps(figures, indent=1) + "\n")
    plot = f" and {figures['plot']}" if figures["plot"] else ""
    console.print(f"wrote {path}{plot}", markup=False)
    if as_json:
        print(json.dumps(figures))
