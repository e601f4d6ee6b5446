"""Convergence: the demo model trained through each codec and compressor, beside the exact run.

Real text; all that share a seed see the same batches and start from the same parameters. Gradients
are averaged over a mesh of 2 hosts x 4 devices: exactly inside a host, and between hosts as the
variant says. Each variant is compiled once; the bytes that it sends over the slow axis, and the
dtype that they travel in, are read from the very program that then trains. Held-out losses are of
files that were not trained on.

    python bench/convergence.py [--steps 300] [--seeds 3] [--out runs/convergence] [--json]
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import lm_codecs
import lm_data
import lm_devices
import lm_job
import lm_runs
import numpy as np
import optax
import train_lm
from flax import nnx
from lm_model import Config, next_byte_loss
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import xcoll
from bench.convergence_output import plot, table, targets
from bench.options import output_directory, parser, whole
from bench.printing import show
from xcoll import hlo


def _codec(text: str, *, feedback: bool = False) -> lm_codecs.Compression | None:
    return lm_codecs.compression(lm_codecs.parse_codec(text), None, feedback)


VARIANTS: dict[str, lm_codecs.Compression | None] = {
    "exact": None,
    "bfloat16": _codec("bfloat16@host"),
    "int8": _codec("int8@host"),
    "int4 with feedback": _codec("int4@host", feedback=True),
    "int4 without feedback": _codec("int4@host"),
    "top 1 % with feedback": lm_codecs.parse_compressor("top_k:0.01@host"),
    "PowerSGD rank 4": lm_codecs.parse_compressor("powersgd:4@host"),
    "sign with feedback": lm_codecs.parse_compressor("sign@host"),
}

AXES, TOPOLOGY, SLOW_AXIS = {"host": 2, "device": 4}, "2*cpu:4@200Mbit", "host"
CONFIG = Config(seq_len=64, dim=128, layers=1)
BATCH, LEARNING_RATE = 8, 1e-3
HELD_OUT_SEQUENCES = 1024


class Variant:
    """A compiled step, its state to start from, and what its program sends."""

    def __init__(self, name: str, job: lm_job.Job) -> None:
        optimizer, policy = job.optimizer, xcoll.Policy()
        compression = VARIANTS[name]
        if compression is not None:
            optimizer, policy = compression.apply(optimizer, policy, job.mesh)
        self.name = name
        self.job = replace(job, optimizer=optimizer, syncs=optimizer is not job.optimizer)
        step = xcoll.optimize(train_lm.make_step(self.job), policy=policy, topology=TOPOLOGY)
        tokens = lm_data.place(np.zeros((BATCH, CONFIG.seq_len + 1), np.int32), job.mesh)
        args = (*lm_job.initial_state(self.job, 0), tokens)
        self.program = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
        self.sent = hlo.wire_bytes(self.program, job.mesh)
        self.dtypes = lm_runs.wire_dtypes(self.program, job.mesh, SLOW_AXIS)
        predicted = step.reports[-1].wire_bytes()
        if predicted != self.sent:
            raise SystemExit(f"{name}: predicted {predicted}, the program sends {self.sent}")
        wanted = None if compression is None else compression.wire_dtype
        if wanted is not None and wanted not in self.dtypes:
            raise SystemExit(f"{name}: no {wanted} on the wire, only {self.dtypes}")


def run(steps: int, seeds: int, console: Console) -> dict[str, Any]:
    """Trains all variants from all seeds; returns the figures."""
    mesh = lm_devices.make_mesh(AXES)
    job = lm_job.Job(CONFIG, optax.adamw(LEARNING_RATE), mesh)
    corpus = lm_data.stdlib_corpus()
    graph = nnx.graphdef(job.model)
    evaluate = jax.jit(lambda params, tokens: next_byte_loss(nnx.merge(graph, params), tokens))
    windows = lm_data.windows(corpus.held_out, HELD_OUT_SEQUENCES, CONFIG.seq_len, (0,))
    held_out = lm_data.place(windows, mesh)
    rows: dict[str, dict[str, Any]] = {}
    columns = (
        TextColumn("{task.description:>22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(VARIANTS) * seeds * steps, loss=math.nan)
        for name in VARIANTS:
            progress.update(task, description=name)
            variant = Variant(name, job)
            losses: list[list[float]] = []
            ends: list[float] = []
            for seed in range(seeds):
                params, state = lm_job.initial_state(variant.job, seed)
                losses.append([])
                for index in range(steps):
                    text = lm_data.windows(corpus.train, BATCH, CONFIG.seq_len, (seed, index))
                    params, state, loss = variant.program(params, state, lm_data.place(text, mesh))
                    losses[-1].append(float(loss))
                    progress.update(task, advance=1, loss=losses[-1][-1])
                ends.append(float(evaluate(params, held_out)))
            rows[name] = {
                "losses": losses,
                "held_out": ends,
                "slow_axis_bytes": variant.sent[SLOW_AXIS],
                "wire_dtypes": variant.dtypes,
            }
            check(name, rows)
            console.print(f"{name}: held-out losses {', '.join(f'{loss:.4f}' for loss in ends)}")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(job.params)),
        "tokens_a_step": BATCH * CONFIG.seq_len,
        "steps": steps,
        "seeds": seeds,
        "seconds": time.perf_counter() - start,
        "variants": rows,
    }


def check(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Stops where runs do not start alike.

    The first loss is taken before any update, of the same parameters and text: only the compiler's
    order of float32 operations may differ.
    """
    first = np.array([losses[0] for losses in rows[name]["losses"]])
    expected = np.array([losses[0] for losses in rows["exact"]["losses"]])
    if not np.all(np.abs(first - expected) <= 1e-4 * expected):
        raise SystemExit(f"{name}: its first losses are {first}, not {expected}")


def main() -> int:
    """Runs the benchmark; returns 1 where a target is missed."""
    words = parser(__doc__)
    add = words.add_argument
    add("--steps", type=whole(1), default=300, metavar="N", help="of each run")
    add("--seeds", type=whole(1), default=3, metavar="N", help="runs of each variant")
    add("--out", type=output_directory, default="runs/convergence", metavar="DIR",
        help="for convergence.json and convergence.png")  # fmt: skip
    args = words.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        words.error("matplotlib draws the curves; pip install -e '.[bench]', or make convergence")
    lm_devices.use_virtual_devices(math.prod(AXES.values()))
    figures = run(args.steps, args.seeds, Console(stderr=True))
    figures["targets"] = found = targets(figures["variants"])
    (args.out / "convergence.json").write_text(json.dumps(figures) + "\n")
    plot(figures, args.out / "convergence.png")
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(table(figures))
        for name, target in found.items():
            show(
                f"{'met   ' if target['met'] else 'missed'} {name}: held-out loss"
                f" {target['difference']:+.2%} of the exact one's (target {target['target']:.1%})"
            )
        show(f"wrote {args.out}/convergence.json and convergence.png")
    diverged = [
        n for n, row in figures["variants"].items() if not np.all(np.isfinite(row["held_out"]))
    ]
    if diverged:
        print(f"diverged: {', '.join(diverged)}", file=sys.stderr)
    return 1 if diverged or not all(target["met"] for target in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
