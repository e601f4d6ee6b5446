"""What `convergence.py` shows: a table, targets met or missed, and curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

TARGETS = {"int8": 0.005, "int4 with feedback": 0.01}
"""Part of the exact run's held-out loss by which a variant's may differ."""

SMOOTHED = 20
"""Steps that a point of a curve is the mean of."""


def differences(variants: dict[str, Any], name: str) -> np.ndarray:
    """Returns, seed by seed, how far a held-out loss is from the exact run's, as a part of it."""
    exact = np.array(variants["exact"]["held_out"])
    found: np.ndarray = np.array(variants[name]["held_out"]) / exact - 1
    return found


def spread(variants: dict[str, Any]) -> float:
    """Returns by how much the exact runs' held-out losses differ from seed to seed.

    The difference between the largest and the smallest, as a part of the mean.
    """
    exact = np.array(variants["exact"]["held_out"])
    return float((exact.max() - exact.min()) / exact.mean())


def targets(variants: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns for each target the mean difference over seeds, and whether it is met."""
    found = {}
    for name, target in TARGETS.items():
        difference = float(differences(variants, name).mean())
        found[name] = {
            "target": target,
            "difference": difference,
            "met": abs(difference) <= target,
        }
    return found


def table(figures: dict[str, Any]) -> Table:
    """Lays the figures out for people."""
    variants = figures["variants"]
    out = Table(
        title=f"{figures['parameters']:,} parameters, {figures['tokens_a_step']} bytes of text a"
        f" step, {figures['steps']} steps, {figures['seeds']} seeds; {figures['machine']};"
        f" jax {figures['jax']}; {figures['seconds']:.0f} s",
        title_justify="left",
        caption=f"exact runs differ by {spread(variants):.2%} from seed to seed",
        caption_justify="left",
    )
    out.add_column("variant", no_wrap=True)
    for heading in (
        "held-out loss",
        "to exact, mean",
        "worst seed",
        "slow axis, bytes a step",
        "of exact",
    ):
        out.add_column(heading, justify="right")
    out.add_column("on the wire", no_wrap=True)
    exact_bytes = variants["exact"]["slow_axis_bytes"]
    for name, row in variants.items():
        difference = differences(variants, name)
        worst = difference[np.argmax(np.abs(difference))]
        sent = row["slow_axis_bytes"]
        out.add_row(
            name,
            f"{np.mean(row['held_out']):.4f}",
            "" if name == "exact" else f"{difference.mean():+.2%}",
            "" if name == "exact" else f"{worst:+.2%}",
            f"{sent:,}",
            f"{sent / exact_bytes:.3f}",
            dtypes(row["wire_dtypes"]),
        )
    return out


def dtypes(sent: dict[str, int]) -> str:
    """Returns the dtypes on the wire with their parts of the bytes, the largest first.

    >>> dtypes({"f32": 1, "s8": 300})
    's8 100 %, f32 < 1 %'
    """
    total = sum(sent.values())
    shown = []
    for dtype, num_bytes in sorted(sent.items(), key=lambda item: -item[1]):
        percent = round(100 * num_bytes / total)
        shown.append(f"{dtype} {percent} %" if percent else f"{dtype} < 1 %")
    return ", ".join(shown)


def smoothed(losses: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps, and the loss there: a mean over seeds and the last steps."""
    mean = np.mean(losses, axis=0)
    window = min(SMOOTHED, len(mean))
    values = np.convolve(mean, np.ones(window) / window, mode="valid")
    return np.arange(window, len(mean) + 1), values


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draws the training loss against steps, and against bytes on the slow axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = figures["variants"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    exact = np.array(variants["exact"]["losses"])
    for number, (name, row) in enumerate(variants.items()):
        steps, loss = smoothed(row["losses"])
        style = {"color": "black", "zorder": 5} if name == "exact" else {"color": f"C{number}"}
        axes[0].plot(steps, loss, label=name, linewidth=1.2, **style)
        axes[1].plot(steps * row["slow_axis_bytes"] / 1e6, loss, linewidth=1.2, **style)
    each = [smoothed([losses])[1] for losses in exact.tolist()]
    axes[0].fill_between(
        smoothed(exact.tolist())[0],
        np.min(each, axis=0),
        np.max(each, axis=0),
        color="black",
        alpha=0.12,
        linewidth=0,
        label="exact, from seed to seed",
    )
    axes[0].set(xlabel="steps", ylabel=f"training loss, nats a byte (mean of {SMOOTHED} steps)")
    axes[1].set(xlabel="MB sent over the slow axis by a device", xscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    axes[0].set_title("by steps", size=9)
    axes[1].set_title("by bytes sent between hosts", size=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
