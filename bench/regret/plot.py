"""Predicted against measured times, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.regret import figures
from bench.regret.figures import Point

_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by the colour-blind too (Okabe and Ito)."""

_NAMED = 3
"""So many clusters the title names."""


def scatter(all_points: Sequence[Point], path: Path) -> None:
    """Draws a point for each plan, with the diagonal and bands of 15 and 30 % around it.

    Raises:
      ImportError: matplotlib is not installed.
      OSError: the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = dict.fromkeys(str(point.case.setting) for point in all_points)
    clusters = ", ".join(settings) if len(settings) <= _NAMED else f"{len(settings)} clusters"
    figure, axis = pyplot.subplots(figsize=(7, 6.5), layout="constrained")
    times_ms = [1000 * time_s for p in all_points for time_s in (p.timed.median_s, p.predicted_s)]
    ends = [min(times_ms) / 1.5, max(times_ms) * 1.5]
    for limit, shade in ((figures.OTHER_ERROR, 0.10), (figures.WIRE_ERROR, 0.16)):
        low, high = ([end * factor for end in ends] for factor in (1 - limit, 1 + limit))
        label = f"within {limit:.0%}"
        axis.fill_between(ends, low, high, color="#000000", alpha=shade, linewidth=0, label=label)
    axis.plot(ends, ends, color="#000000", linewidth=0.8, label="as predicted")
    by_kind = sorted(figures.grouped(all_points, lambda p: p.timed.kind).items())
    for number, (kind, group) in enumerate(by_kind):
        axis.scatter(
            [1000 * p.timed.median_s for p in group],
            [1000 * p.predicted_s for p in group],
            s=14,
            color=_COLOURS[number % len(_COLOURS)],
            alpha=0.75,
            linewidths=0,
            label=f"{kind} ({len(group)})",
        )
    axis.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured, ms",
        ylabel="predicted, ms",
        title=f"Plans of collectives: {len(all_points)}, on {clusters}",
    )
    axis.set_aspect("equal")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
