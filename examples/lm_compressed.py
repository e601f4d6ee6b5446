"""The compressed run beside the exact one: what it sends, as what, and what it does to the loss."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import lm_compare
import numpy as np
from lm_codecs import Compression
from lm_runs import Run

import xcoll

Tree = Any


def gradient_error(
    exact: tuple[Tree, Tree], averaged: Tree, report: xcoll.Report, roundings: int
) -> dict[str, float]:
    """Compares averaged gradients with the bound that the plan's codec proves.

    A plan promises ``|error of a sum| <= max_error * sum over ranks of m_r``, with ``m_r`` the
    largest magnitude in the element's block. Which elements share a block depends on how leaves
    are packed, so here ``m_r`` is the largest magnitude of all of device ``r``'s gradients, which
    is at least that. The exact average is itself rounded, at most ``roundings`` times a term, and
    the division by the number of devices once more in each program.

    Args:
      exact: averaged gradients, and those of each device (leading dimension), of the exact program.
      averaged: gradients of the compressed program.
      report: its collectives and their plans.
      roundings: how often the exact program rounds a term.

    Returns:
      The largest difference anywhere, the bound, and their ratio; NaN where a gradient of either
      program is not finite.
    """
    mean, own = exact

    @jax.jit
    def figures(mean: Tree, averaged: Tree, own: Tree) -> tuple[jax.Array, jax.Array]:
        leaves = zip(jax.tree.leaves(mean), jax.tree.leaves(averaged), strict=True)
        differences = [jnp.max(jnp.abs(a - b)) for a, b in leaves]
        largest = [jnp.max(jnp.abs(g).reshape(len(g), -1), 1) for g in jax.tree.leaves(own)]
        return jnp.max(jnp.stack(differences)), jnp.mean(jnp.max(jnp.stack(largest), 0))

    # Of all processes: arrays that span several can be read only once they are reduced.
    difference, magnitude = map(float, figures(mean, averaged, own))
    unit = float(jnp.finfo(jnp.float32).eps) / 2
    # 1 % for the terms in unit^2, these figures' own roundings and the compiler's own order in the
    # backward pass.
    bound = 1.01 * (largest_error(report) + (roundings + 2) * unit) * magnitude
    ratio = difference / bound if math.isfinite(difference) and math.isfinite(bound) else math.nan
    return {"max_difference": difference, "bound_there": bound, "max_ratio": ratio}


def compare(
    exact: Run,
    compressed: Run,
    *,
    compression: Compression,
    exact_predicted: dict[str, int],
    report: xcoll.Report,
    gradient: dict[str, float] | None,
    mesh: jax.sharding.Mesh,
    is_expected: bool,
    max_ratio: float | None,
) -> lm_compare.Further:
    """Sets the compressed run beside the exact one.

    Args:
      exact: the run without compression, planned for the same hardware.
      compressed: the run with it.
      compression: what it is.
      exact_predicted: bytes that the exact run was to send.
      report: of the compressed run's collectives.
      gradient: what `gradient_error` returned; None for compressors, whose error stays behind as
        residual.
      mesh: the devices.
      is_expected: whether the planner had a reason to compress.
      max_ratio: part of the exact run's bytes over the slow axis that may be sent, or None.
    """
    axis = compression.slow_axis(mesh)
    before, after = exact.busiest[axis], compressed.busiest[axis]
    ratio = after / before if before else math.nan
    max_error = largest_error(report)
    carried = compressed.dtypes[axis]
    wanted = compression.wire_dtype
    checks = {
        "compressed_bytes_as_predicted": report.wire_bytes() == compressed.busiest,
        "compressed_losses_finite": bool(np.all(np.isfinite([*compressed.losses, after]))),
        "codec_on_the_wire": wanted is None or wanted in carried or not is_expected,
    }
    if gradient is not None:
        checks["compressed_gradient_within_bound"] = gradient["max_ratio"] <= 1.0
    if max_ratio is not None:
        checks[f"bytes_over_{axis}_at_most_{max_ratio:g}"] = ratio <= max_ratio
    table = lm_compare.table(
        exact,
        compressed,
        (exact_predicted, report.wire_bytes()),
        gradient,
        allows="proved bound",
    )
    table.add_row(f"on the wire over {axis}")
    for dtype in sorted({*exact.dtypes[axis], *carried}):
        a, b = (run.dtypes[axis].get(dtype, 0) for run in (exact, compressed))
        table.add_row(f"  bytes as {dtype}, whole link", f"{a:,}", f"{b:,}")
    if gradient is not None:
        table.add_row("error bound of a sum", "", f"{max_error:.1e}")
    return lm_compare.Further(
        run=compressed,
        predicted=report.wire_bytes(),
        report=report,
        figures={
            "name": compression.name,
            "axis": axis,
            "ratio": ratio,
            "wire_dtypes": carried,
            "max_error": max_error if gradient is not None else None,
            "gradient": gradient,
        },
        checks=checks,
        table=table,
    )


def largest_error(report: xcoll.Report) -> float:
    """Returns the bound of the worst plan, relative to the sum over ranks of largest magnitudes."""
    return max((s.plan.max_error for s in report.sites if s.plan), default=0.0)
