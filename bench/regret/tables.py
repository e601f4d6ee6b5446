"""What a run shows: targets, the largest regrets, where predictions are off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from rich.console import Group
from rich.table import Table

from bench.regret import figures
from bench.regret.considered import FACTOR
from bench.regret.figures import Point, Regret
from bench.regret.grid import Case, Setting
from bench.regret.results import Result, Timed
from xcoll.printing import Name, plain_table
from xcoll.units import readable_bytes, readable_seconds

_WORST = 10


def report(results: Sequence[Result], left_out: Sequence[Case], notes: Iterable[str] = ()) -> Group:
    """Lays everything out for people.

    Args:
      results: what was measured.
      left_out: the cases of the grid that were not.
      notes: lines that stand below.
    """
    if not results:
        return Group("nothing was measured", *cases_left_out(left_out, ()), *notes)
    head = [f"on {facts}" for facts in dict.fromkeys(result.machine for result in results)]
    head.append(f"planned from {', '.join(dict.fromkeys(result.topology for result in results))}")
    choices = list(figures.regrets(results))
    return Group(
        *head,
        "",
        target_table(results),
        "",
        by_size_table(results),
        "",
        regret_table(choices),
        "",
        *(part for table in separation_tables(figures.points(results)) for part in (table, "")),
        *plans_left_out(results),
        *cases_left_out(left_out, {result.case.setting for result in results}),
        *notes,
    )


def target_table(results: Sequence[Result]) -> Table:
    """Lays out the figures that have a target, with the noise that they stand in."""
    table = plain_table("regret and prediction")
    table.add_column("")
    for name in ("measured", "target", "of", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for target in figures.targets(results):
        verdict = "met" if target.is_met else "missed" if target.count else "not measured"
        limit = f"<= {target.limit:.0%}"
        table.add_row(target.name, _percent(target.value), limit, str(target.count), verdict)
    noises = [result.native_noise for result in results]
    for name, value in (
        ("regret, worst", max((c.regret for c in figures.regrets(results)), default=float("nan"))),
        ("native against itself, median", figures.median(noises)),
        ("native against itself, 95th percentile", figures.percentile(noises, 95)),
    ):
        table.add_row(name, _percent(value), "", str(len(noises)), "")
    return table


def regret_table(choices: Sequence[Regret]) -> Table:
    """Lays out the choices that cost most."""
    shown = sorted(choices, key=lambda choice: -choice.regret)[:_WORST]
    table = plain_table(f"the {len(shown)} choices of {len(choices)} with the largest regret")
    for name in ("case", "permitted", "chosen", "best"):
        table.add_column(name, overflow="fold")
    for name in ("regret", "to native", "noise"):
        table.add_column(name, justify="right", no_wrap=True)
    for choice in shown:
        to_native = choice.chosen.median_s / choice.native.median_s - 1
        table.add_row(
            str(choice.case),
            choice.policy,
            Name(_timed(choice.chosen)),
            Name(_timed(choice.best)),
            f"{choice.regret:.1%}",
            f"{to_native:+.1%}",
            f"{choice.noise:.1%}",
        )
    table.caption = (
        "times: measured (predicted), medians; to native: slower than XLA's own collective."
        "\nregret: the best of one half of the rounds, by its time in the other half"
    )
    table.caption_justify = "left"
    return table


def by_size_table(results: Sequence[Result]) -> Table:
    """Lays out regret by size and rate, beside native's own noise."""

    def size_and_rate(case: Case) -> str:
        return f"{figures.size_class(case)}|{case.setting.rate}"

    choices = figures.grouped(figures.regrets(results), lambda c: size_and_rate(c.case))
    noises = figures.grouped(results, lambda result: size_and_rate(result.case))
    table = plain_table("regret by size and rate")
    for name in ("payload", "rate"):
        table.add_column(name)
    for name in ("choices", "median", "95th percentile", "worst loss to native", "native's noise"):
        table.add_column(name, justify="right")
    for name, group in sorted(choices.items()):
        costs = [choice.regret for choice in group]
        table.add_row(
            *name.split("|"),
            str(len(group)),
            _percent(figures.median(costs)),
            _percent(figures.percentile(costs, 95)),
            _percent(max(choice.loss for choice in group)),
            _percent(figures.median([result.native_noise for result in noises[name]])),
        )
    return table


def separation_tables(all_points: Sequence[Point]) -> list[Table]:
    """Lays out how far predictions are off, by what may explain it."""

    def rate(point: Point) -> str:
        return point.case.setting.rate

    def size_and_rate(point: Point) -> str:
        return f"{figures.size_class(point.case)}|{rate(point)}"

    def kind_and_size(point: Point) -> str:
        return f"{point.timed.kind}|{figures.size_class(point.case)}"

    def collective_and_mesh(point: Point) -> str:
        setting = point.case.setting
        return f"{point.case.collective}|{setting.hosts}x{setting.devices}"

    return [
        _separation("by size and rate", ("payload", "rate"), all_points, size_and_rate),
        _separation("by kind of plan and size", ("plan", "payload"), all_points, kind_and_size),
        _separation(
            "by collective and mesh", ("collective", "mesh"), all_points, collective_and_mesh
        ),
    ]


def _separation(
    what: str, heads: tuple[str, str], all_points: Sequence[Point], key: Callable[[Point], str]
) -> Table:
    table = plain_table(f"predicted, with the program's start, against measured, {what}")
    for head in heads:
        table.add_column(head)
    for head in ("plans", "error, median", "95th percentile", "predicted / measured, median"):
        table.add_column(head, justify="right")
    for name, group in sorted(figures.grouped(all_points, key).items()):
        errors = [point.error for point in group]
        table.add_row(
            *name.split("|"),
            str(len(group)),
            f"{figures.median(errors):.1%}",
            f"{figures.percentile(errors, 95):.1%}",
            f"{figures.median([point.ratio for point in group]):.2f}",
        )
    return table


def plans_left_out(results: Sequence[Result]) -> list[str]:
    """Returns what to say of plans that were considered and not timed."""
    timed = sum(len(result.timed) for result in results)
    same = sum(bool(plan.same_as) for result in results for plan in result.timed)
    slow = sum(len(result.too_slow) for result in results)
    barred = sum(len(result.barred) for result in results)
    lines = [f"{timed} plans of {len(results)} cases were timed; {same} are the program of another"]
    if slow:
        lines.append(f"not timed: {slow} plans predicted over {FACTOR} times slower than the best")
    if barred:
        lines.append(f"not timed: {barred} plans that the planner may not choose")
    return lines


def cases_left_out(left_out: Sequence[Case], begun: Collection[Setting]) -> list[str]:
    """Returns what to say of cases that were not measured: one line a cluster.

    Args:
      left_out: the cases.
      begun: clusters on which others were.
    """
    by_setting: dict[Setting, list[Case]] = {}
    for case in left_out:
        by_setting.setdefault(case.setting, []).append(case)
    lines = []
    for setting, missing in by_setting.items():
        if setting not in begun:
            lines.append(f"not measured: any of the {len(missing)} cases, {setting}")
            continue
        by_collective: dict[str, list[int]] = {}
        for case in missing:
            by_collective.setdefault(case.collective, []).append(case.num_bytes)
        parts = (
            f"{collective} of {', '.join(readable_bytes(size) for size in sorted(sizes))}"
            for collective, sizes in by_collective.items()
        )
        lines.append(f"not measured: {len(missing)} cases, {setting}: {'; '.join(parts)}")
    return lines


def _timed(plan: Timed) -> str:
    times = f"{readable_seconds(plan.median_s)} ({readable_seconds(plan.predicted_s)})"
    return f"{plan.name}: {times}"


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"
