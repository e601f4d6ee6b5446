"""Figures for programs to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.regret import figures
from bench.regret.grid import Case
from bench.regret.results import Result


def summary(kept: Sequence[Result], left_out: Sequence[Case]) -> dict[str, Any]:
    """Returns what `--json` prints: targets, choices, plans, and what was left out."""
    return {
        "machines": list(dict.fromkeys(result.machine for result in kept)),
        "topologies": list(dict.fromkeys(result.topology for result in kept)),
        "targets": [
            {
                "name": target.name,
                "value": target.value if target.count else None,
                "limit": target.limit,
                "count": target.count,
                "is_met": target.is_met,
            }
            for target in figures.targets(kept)
        ],
        "choices": [
            {
                "case": str(choice.case),
                "policy": choice.policy,
                "chosen": choice.chosen.name,
                "chosen_s": choice.chosen.median_s,
                "best": choice.best.name,
                "best_s": choice.best.median_s,
                "native_s": choice.native.median_s,
                "native_noise": choice.noise,
                "regret": choice.regret,
                "loss_beyond_noise": choice.loss,
            }
            for choice in figures.regrets(kept)
        ],
        "plans": [
            {
                "case": str(result.case),
                "plan": timed.name,
                "kind": timed.kind,
                "same_as": timed.same_as,
                "predicted_s": timed.predicted_s,
                "launch_s": result.launch_s,
                "measured_s": timed.median_s,
            }
            for result in kept
            for timed in result.timed
        ],
        "plans_too_slow": sum(len(result.too_slow) for result in kept),
        "plans_barred": sum(len(result.barred) for result in kept),
        "cases_left_out": [str(case) for case in left_out],
    }
