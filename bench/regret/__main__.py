"""The command line: ``python -m bench.regret --budget 20min``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import cluster
from bench.cluster import requirements
from bench.cluster.commands import ClusterError
from bench.regret import figures, results
from bench.regret.grid import Setting, cases
from bench.regret.options import SIZE_STEP, parser
from bench.regret.plot import scatter
from bench.regret.results import Result
from bench.regret.summary import summary
from bench.regret.tables import report
from xcoll.units import readable_bytes

CANT = 125
"""The exit code where the hosts can't be made."""

_LEAST_S = 10.0
"""Starting a cluster is not worth less."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the grid, and reports; returns the exit code."""
    words = parser()
    args = words.parse_args(arguments)
    settings = [
        Setting(hosts=hosts, devices=devices, rate_bits_per_s=rate)
        for rate in args.rates
        for hosts, devices in args.meshes
    ]
    if args.profile and len(settings) > 1:
        words.error(
            f"--profile {args.profile}: a profile is of one mesh and rate, and there are"
            f" {len(settings)}; name them with --mesh and --rate"
        )
    for setting in settings:
        for size in args.sizes:
            if size // 4 % setting.ranks:
                words.error(
                    f"--size {readable_bytes(size)}: {setting.ranks} devices, of --mesh"
                    f" {setting.hosts}x{setting.devices}, can't have as many numbers each; give"
                    f" multiples of {readable_bytes(math.lcm(SIZE_STEP, 4 * setting.ranks))}"
                )
    file = args.out / "results.json"
    if not args.report and (reason := requirements.lacking()):
        print(f"bench.regret: {reason}", file=sys.stderr)
        return CANT
    if not args.report:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            words.error(f"--out {args.out}: {err.strerror}")
    if args.fresh and not args.report:
        for old in (file, *args.out.glob("profile-*.json")):
            old.unlink(missing_ok=True)
    try:
        results.read(file)
    except (ValueError, OSError) as err:
        words.error(f"{err}; start anew with --fresh")
    code = 0 if args.report else _measure(args, settings, file)
    if code == CANT and not file.exists():
        return code
    wanted = [case for setting in settings for case in cases(setting, args.collectives, args.sizes)]
    kept = [result for result in results.read(file) if result.case in wanted]
    done = {result.case for result in kept}
    left_out = [case for case in wanted if case not in done]
    picture = _picture(kept, args.out / "predicted.png")
    if args.json:
        print(json.dumps(summary(kept, left_out), indent=1))
    else:
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(
            report(kept, left_out, filter(None, [picture])), markup=False, highlight=False
        )
    return code


def _measure(args: argparse.Namespace, settings: Sequence[Setting], file: Path) -> int:
    """Runs the clusters one after another, each with its part of the time; the worst exit code."""
    deadline_s = time.monotonic() + args.budget
    worst = 0
    for number, setting in enumerate(settings):
        left_s = (deadline_s - time.monotonic()) / (len(settings) - number)
        done = {result.case for result in results.read(file)}
        if left_s < _LEAST_S or done.issuperset(cases(setting, args.collectives, args.sizes)):
            continue
        shape = f"{setting.hosts}x{setting.devices}"
        profile = args.profile or args.out / f"profile-{shape}-{setting.rate}.json"
        command = [
            *(sys.executable, "-m", "bench.regret.worker", "--results", str(file)),
            *("--rate-bits-per-s", str(setting.rate_bits_per_s), "--budget", f"{left_s:.1f}"),
            *("--profile", str(profile), "--tune-budget", str(args.tune_budget)),
            *("--collectives", *args.collectives, "--sizes", *map(str, args.sizes)),
        ]
        of_cluster = cluster.Settings(
            num_hosts=setting.hosts,
            num_devices=setting.devices,
            rates_bits_per_s=(setting.rate_bits_per_s,) * setting.hosts,
            congestion=args.congestion,
            timeout_s=2 * left_s + 120,
        )
        try:
            worst = max(worst, cluster.run(command, of_cluster))
        except ClusterError as err:
            print(f"bench.regret: {err}", file=sys.stderr)
            return CANT
        if worst > 128:  # stopped
            return worst
    return worst


def _picture(kept: Sequence[Result], path: Path) -> str:
    """Draws the plot; returns the line that says where it is, or why there is none."""
    if not kept:
        return ""
    try:
        scatter(figures.points(kept), path)
    except ImportError:
        return "no picture: matplotlib is not installed; pip install 'jax-xcoll[bench]'"
    return f"every plan, predicted against measured: {path}"


if __name__ == "__main__":
    sys.exit(main())
