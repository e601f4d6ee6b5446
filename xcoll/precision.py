"""Bounds on the error of plans with codecs: how roundings of blocks add up."""

from __future__ import annotations

from collections.abc import Sequence

from xcoll.costmodel import REDUCTIONS, stage_form
from xcoll.plan import Request, Stage
from xcoll.roundoff import error_bound, is_inexact, unit_roundoff

_WIDE = 2.0**-24
"""Unit roundoff of float32, in which decoded values are summed."""

_SLACK = 1 + 1e-9
"""Covers the rounding of this computation itself."""


def max_error(request: Request, stages: Sequence[Stage]) -> float:
    """Returns the bound on a plan's error in any block, relative to what the ranks put in.

    ``|result - exact| <= max_error * sum over ranks of the block's largest magnitude``, but for
    2**-126 a rounding: XLA takes smaller magnitudes for zero. For float16, whose subnormal numbers
    are 2**-24 apart, also but for 2**-25 wherever a decoded value is rounded to it.

    A codec that rounds a block by ``d`` times its largest magnitude, applied to a sum that is
    already off by ``e``, leaves ``e + d (1 + e)``. Two shots round twice, a ring once a hop,
    recursive doubling once a step; additions are in float32, and a narrower result is rounded once
    more. Data movement counts one rank's block.

    Returns:
      0 where nothing is rounded.
    """
    codecs = [stage.codec for stage in stages if stage.codec is not None]
    unit = unit_roundoff(request.dtype) if is_inexact(request.dtype) else 0.0
    if not codecs:
        return error_bound(request, stages) * unit * (_SLACK if unit else 1)
    narrow = unit if unit > _WIDE else 0.0
    if codecs[0].integers is not None:
        bound = codecs[0].max_error_for(request.num_ranks)
        return (bound + narrow * (1 + bound)) * _SLACK
    error = 0.0
    for stage, after in zip(stages, [*stages[1:], None], strict=True):
        if stage.codec is None:
            adds = 0 if stage.collective not in REDUCTIONS else stage.span.num_ranks - 1
            error += adds * unit * (1 + error)
            continue
        error = _rounded(error, _one_rounding(stage, unit), _roundings(stage))
        if stage.collective in REDUCTIONS:
            error += (stage.span.num_ranks - 1) * _WIDE * (1 + error)
        stays_wide = after is not None and after.codec == stage.codec
        # What is gathered or reduced at once as the payload's own bits is rounded there already.
        is_wide = stage.codec.is_lossy or stage.collective == "reduce_scatter"
        if not stays_wide and is_wide:
            error += narrow * (1 + error)
    return error * _SLACK


_MOST = 1e300
"""What is past it is not told apart: no float32 is as many times another."""


def _rounded(error: float, by: float, times: int) -> float:
    """Returns what some roundings in a row make of an error: ``(1 + error) (1 + by)^times - 1``.

    By squaring, so that a ring of a hundred thousand ranks takes no longer, and by products only,
    which all processors round alike.
    """
    factor, power = 1.0, 1.0 + by
    while times:
        if times % 2:
            factor *= power
        power *= power
        times //= 2
    return min((1 + error) * factor - 1, _MOST)


def _roundings(stage: Stage) -> int:
    """Returns how often a value is encoded in a stage, at most."""
    if stage.collective not in REDUCTIONS or stage.choice.name in ("direct", "pairwise"):
        return 1
    return sum(phase.steps for phase in stage_form(stage).phases if phase.kind == "permute")


def _one_rounding(stage: Stage, unit: float) -> float:
    assert stage.codec is not None
    if stage.codec.is_lossy:
        return stage.codec.max_error
    # The payload's own bits: only what was summed in float32 is rounded, to the payload's dtype.
    return 0.0 if stage.collective == "reduce_scatter" else unit
