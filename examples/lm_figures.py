"""What the variants' training measured: figures, a table for people, and the curves."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

SMOOTHED = 5
"""Steps whose mean a loss is shown as: each step has other text."""

_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def machine() -> dict[str, Any]:
    """Returns what the run depends on and does not choose."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device_kind": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "congestion_control": _CONGESTION.read_text().strip() if _CONGESTION.exists() else None,
    }


def times(times_s: list[float]) -> dict[str, Any]:
    """Returns the median of step times, and between what eight of ten of them lie."""
    low, median, high = np.quantile(times_s, [0.1, 0.5, 0.9]).tolist()
    return {"median_s": median, "low_s": low, "high_s": high, "times_s": times_s}


def smoothed(losses: list[float]) -> np.ndarray:
    """Returns for each step from the `SMOOTHED`-th on the mean of the last ones.

    >>> smoothed([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]).tolist()
    [4.0, 3.0]
    """
    window = min(SMOOTHED, len(losses))
    means: np.ndarray = np.lib.stride_tricks.sliding_window_view(losses, window).mean(-1)
    return means


def time_to_loss_s(losses: list[float], times_s: list[float], target: float) -> float | None:
    """Returns how long the steps took until the mean loss of the last ones was ``target``.

    >>> time_to_loss_s([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [0.5] * 6, 3.5)
    3.0
    """
    reached = np.flatnonzero(smoothed(losses) <= target)
    if not reached.size:
        return None
    num_steps = int(reached[0]) + min(SMOOTHED, len(losses))
    return float(np.sum(times_s[:num_steps]))


def table(figures: dict[str, Any]) -> Table:
    """Lays the figures out, a column a variant; narrow enough for 80 columns."""
    machine, settings, compute = figures["machine"], figures["settings"], figures["compute"]
    mesh = ", ".join(f"{axis}={size}" for axis, size in settings["mesh"].items())
    out = Table(
        title=f"{figures['parameters']:,} parameters, {figures['tokens_a_step']} bytes of text and"
        f" {figures['steps']} steps; {mesh}; {figures['topology']}\n{machine['machine']};"
        f" {machine['device_kind']}; jax {machine['jax']}; TCP"
        f" {machine['congestion_control'] or 'unknown'}; times: {figures['timed']}",
        title_justify="left",
        caption=f"compute: the same step without its collectives, timed in turn with the others,"
        f" {_ms(compute['low_s'])} to {_ms(compute['high_s'])} ms; communication: the rest of the"
        " median step: collectives, what packs and encodes for them, less what is hidden. MB of all"
        f" hosts together. The loss is the mean of {figures['smoothed']} steps.",
        caption_justify="left",
    )
    variants = figures["variants"]
    plain = variants["plain"]
    out.add_column("")
    for name in variants:
        out.add_column(name, justify="right", overflow="fold")

    def add(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        out.add_row(label, *map(cell, variants.values()))

    add("step, ms", lambda row: _ms(row["median_s"]))
    add("  eight of ten", lambda row: f"{_ms(row['low_s'])}-{_ms(row['high_s'])}")
    add("  compute", lambda row: _ms(compute["median_s"]))
    add("  communication", lambda row: _ms(row["communication_s"]))
    add("    predicted", lambda row: _ms(row["predicted_communication_s"]))
    add("times as fast as plain", lambda row: f"{plain['median_s'] / row['median_s']:.2f}")
    slow = next(iter(settings["mesh"]))
    add(f"MB over {slow}", lambda row: f"{row['crossing_bytes'] / 1e6:.1f}")
    add("loss", lambda row: f"{row['final_loss']:.4f}")
    add("  held-out files", lambda row: f"{row['held_out']:.4f}")
    add(
        f"  s until it is {figures['target_loss']:.3f}",
        lambda row: _until(row["time_to_target_s"]),
    )
    return out


def _until(time_s: float | None) -> str:
    return "not reached" if time_s is None else f"{time_s:.1f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draws the training loss of every variant against its wall clock."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, row) in enumerate(figures["variants"].items()):
        clock = np.cumsum(row["times_s"])
        means = smoothed(row["losses"])
        axes.plot(clock, row["losses"], color=f"C{number}", linewidth=0.6, alpha=0.35)
        axes.plot(clock[-len(means) :], means, color=f"C{number}", linewidth=1.6, label=name)
    target = figures["target_loss"]
    axes.axhline(target, color="gray", linewidth=0.8, linestyle=":", label=f"loss {target:.4g}")
    axes.set(
        xlabel="seconds of training steps, from the earliest start to the latest end of all hosts",
        ylabel=f"training loss, nats a byte (mean of {figures['smoothed']} steps)",
    )
    mesh = ", ".join(f"{axis}={size}" for axis, size in figures["settings"]["mesh"].items())
    axes.set_title(
        f"Loss against the clock: {figures['parameters'] / 1e6:.2g} M parameters, {mesh}, planned"
        f" for {figures['topology'].splitlines()[0]}",
        size=9,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
