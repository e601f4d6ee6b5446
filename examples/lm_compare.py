"""Runs a training step, and sets two runs side by side: numbers, bytes, collectives, speed."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import xcoll
from xcoll import hlo

Tree = Any

LOSS_TOLERANCE = 0.02
"""Nats a byte by which held-out losses may differ: rounding alone, grown over the steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run measured.

    Attributes:
      name: plain or optimised.
      losses: training loss of each step, nats a byte.
      held_out: loss on files that were not trained on.
      tokens_per_s: from the median time of the steps after the first.
      compile_s: time to trace, lower and compile.
      counted: bytes that the busiest device sends a step, by mesh axis, counted in the compiled
        program.
      collectives: how often each collective runs in a step of the compiled program.
    """

    name: str
    losses: list[float] = field(repr=False)
    held_out: float
    tokens_per_s: float
    compile_s: float
    counted: dict[str, int]
    collectives: dict[str, int]


def train(
    name: str,
    step: Any,
    state: tuple[Tree, Tree],
    batches: Iterator[jax.Array],
    *,
    num_steps: int,
    held_out: Callable[[Tree], float],
    mesh: jax.sharding.Mesh,
    console: Console,
) -> Run:
    """Compiles and runs ``step(params, opt_state, tokens)`` for a number of steps.

    Args:
      name: shown beside the progress bar.
      step: jitted; may donate the state.
      state: parameters and optimizer state.
      batches: one sharded array of tokens a step.
      num_steps: how many.
      held_out: maps parameters to the held-out loss.
      mesh: what the step runs on.
      console: where progress is shown.
    """
    params, opt_state = state
    tokens = next(batches)
    start = time.perf_counter()
    program = step.lower(params, opt_state, tokens).compile()
    compile_s = time.perf_counter() - start

    losses, times = [], []
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=num_steps, loss=math.nan, rate=0.0)
        for index in range(num_steps):
            start = time.perf_counter()
            params, opt_state, loss = program(params, opt_state, tokens)
            losses.append(float(loss))
            times.append(time.perf_counter() - start)
            rate = tokens.shape[0] * (tokens.shape[1] - 1) / statistics.median(times[1:] or times)
            progress.update(task, advance=1, loss=losses[-1], rate=rate)
            if index + 1 < num_steps:
                tokens = next(batches)

    collectives: Counter[str] = Counter()
    for collective in hlo.collectives(program):
        collectives[collective.kind] += collective.executions or 1
    return Run(
        name=name,
        losses=losses,
        held_out=held_out(params),
        tokens_per_s=rate,
        compile_s=compile_s,
        counted=hlo.wire_bytes(program, mesh),
        collectives=dict(collectives),
    )


def gradient_difference(
    plain: tuple[Tree, Tree], optimised: tuple[Tree, Tree], roundings: int
) -> dict[str, float]:
    """Compares averaged gradients with the bound that rounding allows.

    With ``u`` the unit roundoff and ``g_r`` the gradient of device ``r``, a sum whose plan rounds
    each term at most ``k`` times errs by at most ``k u sum_r |g_r|``; dividing by the number of
    devices ``n`` rounds once more. So the two averages differ by at most::

        (k_plain + k_optimised + 2) u sum_r |g_r| / n  +  sum_r |g_r - h_r| / n

    where ``h_r`` are the second program's own gradients before they are summed: equal to
    ``g_r``, unless the compiler fused the backward pass in another way.

    Args:
      plain: averaged gradients, and those of each device (leading dimension), of one program.
      optimised: the same of the other.
      roundings: ``k_plain + k_optimised``.

    Returns:
      The largest difference, the bound there, and the largest ratio of the two anywhere.
    """

    @jax.jit
    def worst(a: jax.Array, b: jax.Array, g: jax.Array, h: jax.Array) -> tuple[jax.Array, ...]:
        info = jnp.finfo(a.dtype)
        num_devices = g.shape[0]
        # A 1 % margin for the terms in u^2 and for computing the bound itself in this precision;
        # the smallest normal number, for flushed subnormals.
        unit = 1.01 * (roundings + 2) * info.eps / 2
        bound = unit * jnp.sum(jnp.abs(g), 0) + 1.01 * jnp.sum(jnp.abs(g - h), 0)
        bound = bound / num_devices + info.smallest_normal
        difference = jnp.abs(a - b)
        at = jnp.argmax(difference)
        return difference.ravel()[at], bound.ravel()[at], jnp.max(difference / bound)

    leaves = zip(*(jax.tree.leaves(t) for t in (*plain, *optimised)), strict=True)
    rows = [tuple(map(float, worst(a, b, g, h))) for a, g, b, h in leaves]
    difference, bound, _ = max(rows)
    return {
        "max_difference": difference,
        "bound_there": bound,
        "max_ratio": max(ratio for *_, ratio in rows),
    }


def roundings(report: xcoll.Report, native: int) -> int:
    """Returns how often a term of a sum is rounded at most, in any group of a program."""
    return max((s.plan.error_bound if s.plan else native for s in report.sites), default=0)


def compare(
    plain: Run,
    optimised: Run,
    *,
    predicted: tuple[dict[str, int], dict[str, int]],
    gradient: dict[str, float],
    report: xcoll.Report,
    rewrite_expected: bool,
    settings: dict[str, Any],
    out: Path,
    console: Console,
) -> int:
    """Prints both tables, writes ``summary.json``, and returns the exit code."""
    checks = {
        "gradient_within_bound": gradient["max_ratio"] <= 1.0,
        "held_out_agrees": abs(plain.held_out - optimised.held_out) <= LOSS_TOLERANCE,
        "bytes_as_predicted": predicted == (plain.counted, optimised.counted),
        "rewritten": bool(report.rewritten) or not rewrite_expected,
    }
    console.print(report)
    console.print(_table(plain, optimised, predicted, gradient))
    for check, passed in checks.items():
        console.print(f"{'ok  ' if passed else 'FAIL'} {check.replace('_', ' ')}")
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        summary = {
            "settings": settings,
            "runs": {
                run.name: vars(run) | {"predicted": by_axis}
                for run, by_axis in zip((plain, optimised), predicted, strict=True)
            },
            "gradient": gradient,
            "checks": checks,
            "report": json.loads(report.to_json()),
        }
        path = out / "summary.json"
        path.write_text(json.dumps(summary, indent=1) + "\n")
        console.print(f"wrote {path}")
    return 0 if all(checks.values()) else 1


def _table(
    plain: Run,
    optimised: Run,
    predicted: tuple[dict[str, int], dict[str, int]],
    gradient: dict[str, float],
) -> Table:
    table = Table(
        title="plain against optimised; bytes a step that the busiest device sends",
        title_justify="left",
    )
    table.add_column("")
    for run in (plain, optimised):
        table.add_column(run.name, justify="right")
    table.add_column("difference", justify="right")
    largest, bound = gradient["max_difference"], gradient["bound_there"]
    table.add_row("gradient of one step", "", "", f"{largest:.1e}, bound {bound:.1e}")
    for label, a, b in (
        ("loss, first step", plain.losses[0], optimised.losses[0]),
        ("loss, last step", plain.losses[-1], optimised.losses[-1]),
        ("loss, held-out files", plain.held_out, optimised.held_out),
    ):
        table.add_row(label, f"{a:.4f}", f"{b:.4f}", f"{b - a:+.1e}")
    for axis in sorted({*plain.counted, *optimised.counted}):
        for label, runs in (
            ("predicted", predicted),
            ("counted", (plain.counted, optimised.counted)),
        ):
            a, b = (by_axis.get(axis, 0) for by_axis in runs)
            ratio = f"x {b / a:.3f}" if a else ""
            table.add_row(f"bytes over {axis}, {label}", f"{a:,}", f"{b:,}", ratio)
    for kind in sorted({*plain.collectives, *optimised.collectives}):
        a, b = (run.collectives.get(kind, 0) for run in (plain, optimised))
        table.add_row(f"{kind} operations", str(a), str(b))
    for label, a, b in (
        ("tokens/s", plain.tokens_per_s, optimised.tokens_per_s),
        ("compile time, s", plain.compile_s, optimised.compile_s),
    ):
        table.add_row(label, f"{a:,.1f}", f"{b:,.1f}", f"x {b / a:.2f}")
    return table
