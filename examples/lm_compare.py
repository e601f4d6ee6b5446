"""Sets two runs side by side: numbers, bytes, collectives, speed; and says whether they agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_runs import Run
from rich.console import Console
from rich.table import Table

import xcoll
from xcoll import hlo

Tree = Any

LOSS_TOLERANCE = 0.02
"""Nats a byte by which held-out losses may differ: rounding alone, grown over the steps."""


@dataclass(frozen=True, kw_only=True)
class Further:
    """What a third run adds to the comparison.

    Attributes:
      run: its measurements.
      predicted: bytes that the busiest device was to send, by axis.
      report: of its collectives.
      figures: what else it measured.
      checks: what has to hold.
      table: it beside the optimised run.
    """

    run: Run
    predicted: dict[str, int]
    report: xcoll.Report
    figures: dict[str, Any]
    checks: dict[str, bool]
    table: Table = field(repr=False)


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
      The largest difference, the bound there, and the largest ratio of the two anywhere. NaN
      where a gradient of either program is not finite.
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
        # An infinite bound would allow anything.
        ratio = jnp.where(
            jnp.isfinite(difference) & jnp.isfinite(bound), difference / bound, jnp.nan
        )
        at = jnp.argmax(difference)
        return difference.ravel()[at], bound.ravel()[at], jnp.max(ratio)

    leaves = zip(*(jax.tree.leaves(t) for t in (*plain, *optimised)), strict=True)
    rows = np.array([tuple(map(float, worst(a, b, g, h))) for a, g, b, h in leaves])
    # Maxima of numpy: Python's own pass over a NaN that does not come first.
    difference, bound, _ = map(float, rows[np.argmax(rows[:, 0])])
    return {
        "max_difference": difference,
        "bound_there": bound,
        "max_ratio": float(np.max(rows[:, 2])),
    }


def roundings(report: xcoll.Report, native: int) -> int:
    """Returns how often a term of a sum is rounded at most, in any group of a program."""
    return max((s.plan.error_bound if s.plan else native for s in report.sites), default=0)


def check_gradients(
    probe: Callable[..., Any], optimised: Any, params: Tree, tokens: jax.Array
) -> tuple[dict[str, float], tuple[Tree, Tree]]:
    """Runs two programs of the same gradients, and compares them as `gradient_difference` does.

    Args:
      probe: maps (parameters, tokens) to averaged gradients and those of each device.
      optimised: the same through `xcoll.optimize`.
      params: the parameters.
      tokens: a batch.

    Returns:
      What `gradient_difference` returns, and what the second program computed.
    """
    found = jax.jit(optimised)(params, tokens)
    plain = jax.jit(probe)(params, tokens)
    native = jax.tree.leaves(plain[1])[0].shape[0] - 1
    total = native + roundings(optimised.reports[-1], native)
    return gradient_difference(plain, found, roundings=total), found


def rewrites_gradients(report: xcoll.Report) -> bool:
    """Returns whether a sum of gradients was rewritten, not just that of the scalar loss."""
    return any(
        site.collective in ("psum", "psum_scatter")
        and site.num_bytes > jnp.dtype(site.dtype).itemsize
        for site in report.rewritten
    )


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
    further: Further | None = None,
) -> int:
    """Prints the tables, writes ``summary.json``, and returns the exit code."""
    checks = {
        "gradient_within_bound": gradient["max_ratio"] <= 1.0,
        "held_out_agrees": abs(plain.held_out - optimised.held_out) <= LOSS_TOLERANCE,
        "bytes_as_predicted": predicted == (plain.busiest, optimised.busiest),
        "gradients_rewritten": rewrites_gradients(report) or not rewrite_expected,
    }
    console.print(report)
    console.print(table(plain, optimised, predicted, gradient))
    console.print(
        "Counted in the compiled programs. Whole link: what all devices together send over that"
        " axis. XLA's own collective counts as one flat ring over its devices.\n"
    )
    if plain.audit is not None and optimised.audit is not None:
        console.print(hlo.compare(plain.audit, optimised.audit), "")
    if further is not None:
        console.print(further.report)
        console.print(further.table)
        checks |= further.checks
    for check, passed in checks.items():
        console.print(f"{'ok  ' if passed else 'FAIL'} {check.replace('_', ' ')}")
    if jax.process_index() == 0:
        summary: dict[str, Any] = {
            "settings": settings,
            "runs": {
                run.name: run.figures | {"predicted": by_axis}
                for run, by_axis in zip((plain, optimised), predicted, strict=True)
            },
            "gradient": gradient,
            "checks": checks,
            "report": json.loads(report.to_json()),
        }
        if further is not None:
            summary["runs"][further.run.name] = further.run.figures | {
                "predicted": further.predicted
            }
            summary["compressed"] = further.figures | {
                "report": json.loads(further.report.to_json())
            }
        for run in (plain, optimised, *([further.run] if further else [])):
            if run.audit is not None:
                (out / f"{run.name}.audit.json").write_text(run.audit.to_json() + "\n")
        path = out / "summary.json"
        path.write_text(json.dumps(summary, indent=1) + "\n")
        console.print(f"wrote {path}", markup=False)
    return 0 if all(checks.values()) else 1


def table(
    plain: Run,
    optimised: Run,
    predicted: tuple[dict[str, int], dict[str, int]],
    gradient: dict[str, float] | None,
    allows: str = "rounding allows there",
) -> Table:
    """Lays out two runs; narrow enough for 80 columns."""
    out = Table(
        title=f"{plain.name} against {optimised.name}; bytes and operations of one step",
        title_justify="left",
    )
    out.add_column("", no_wrap=True)
    for heading in (plain.name, optimised.name, "difference"):
        out.add_column(heading, justify="right", no_wrap=len(heading) <= 12, overflow="fold")
    if gradient is not None:
        out.add_row("gradient, largest difference", "", "", f"{gradient['max_difference']:.1e}")
        out.add_row(f"  {allows}", "", "", f"{gradient['bound_there']:.1e}")
    for label, a, b in (
        ("loss, first step", plain.losses[0], optimised.losses[0]),
        ("loss, last step", plain.losses[-1], optimised.losses[-1]),
        ("loss, held-out files", plain.held_out, optimised.held_out),
    ):
        out.add_row(label, f"{a:.4f}", f"{b:.4f}", f"{b - a:+.1e}")
    for axis in plain.busiest:
        out.add_row(f"bytes sent over {axis}")
        for label, by_axis in (
            ("busiest device, predicted", predicted),
            ("busiest device, counted", (plain.busiest, optimised.busiest)),
            ("whole link, counted", (plain.total, optimised.total)),
        ):
            before, after = (sent.get(axis, 0) for sent in by_axis)
            ratio = f"x {after / before:.2f}" if before else ""
            out.add_row(f"  {label}", f"{before:,}", f"{after:,}", ratio)
    for kind in sorted({*plain.collectives, *optimised.collectives}):
        a, b = (run.collectives.get(kind, 0) for run in (plain, optimised))
        out.add_row(f"{kind} operations", str(a), str(b))
    a, b = plain.tokens_per_s, optimised.tokens_per_s
    out.add_row("tokens/s, median of steps", f"{a:,.0f}", f"{b:,.0f}", f"x {b / a:.2f}")
    out.add_row("compile time, s", f"{plain.compile_s:.1f}", f"{optimised.compile_s:.1f}")
    return out
