"""The primitive that a planned group becomes: same types and effects as what it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from xcoll import _compat, payload
from xcoll.lower import run_stage
from xcoll.nesting import Nest
from xcoll.plan import Plan, Request, Span, Stage


@dataclass(frozen=True)
class Member:
    """One of the equations that a group replaces; equations alike count once.

    Attributes:
      primitive: the primitive it had.
      params: its parameters, as sorted pairs.
    """

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]


stages_p = core.Primitive("xcoll_stages")
stages_p.multiple_results = True


@stages_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any,
    plan: Plan,
    members: tuple[Member, ...],
    copies: tuple[int, ...],
    mesh_axes: tuple[str, ...],
    nest: Nest | None,
) -> Any:
    outs, effects = [], set()
    for aval, member in zip(avals, members, strict=True):
        out, its = member.primitive.abstract_eval(aval, **dict(member.params))
        outs.append(out)
        effects |= its
    return [outs[i] for i in copies], effects


def _lower(
    ctx: Any,
    *args: Any,
    plan: Plan,
    members: tuple[Member, ...],
    copies: tuple[int, ...],
    mesh_axes: tuple[str, ...],
    nest: Nest | None,
) -> Any:
    def run(*xs: jax.Array) -> list[jax.Array]:
        return carry_out(plan, [dict(m.params) for m in members], mesh_axes, list(xs))

    def implementation(*xs: jax.Array) -> list[jax.Array]:
        out = run(*xs) if nest is None else nest.wrap(run)(*xs)
        return [out[i] for i in copies]

    # The types of the results are those of the replaced equations; inside, axes are not tracked.
    plain = [_compat.without_manual_type(aval) for aval in ctx.avals_in]
    with _compat.check_vma(False):
        return mlir.lower_fun(implementation)(ctx.replace(avals_in=plain), *args)


mlir.register_lowering(stages_p, _lower)


def carry_out(
    plan: Plan,
    params: list[dict[str, Any]],
    mesh_axes: tuple[str, ...],
    xs: list[jax.Array],
) -> list[jax.Array]:
    """Carries out a plan inside a manual computation.

    Args:
      plan: what to do.
      params: for each site, the parameters of the equation that it was.
      mesh_axes: the mesh's axes, in its order.
      xs: the operand of each site, per rank.

    Returns:
      The result of each site, per rank, as the equation would have given it.
    """
    request = plan.request
    n, collective = request.num_ranks, request.collective
    rows = [payload.to_rows(collective, p, x, n) for p, x in zip(params, xs, strict=True)]
    packed = payload.pack(rows)
    sizes = dict(zip(request.axes, request.axis_sizes, strict=True))
    result = _run(plan, packed, {a: sizes[a] for a in mesh_axes if a in sizes})
    if collective in ("reduce", "gather"):
        # Ranks other than the root hold partial results here, and zeros by contract.
        is_root = jax.lax.axis_index(request.axes) == request.root
        result = jnp.where(is_root, result, jnp.zeros_like(result))
    elements = [payload.row_elements(collective, x.shape, n) for x in xs]
    parts = payload.unpack(result, elements)
    return [
        payload.from_rows(collective, p, part, x.shape, n)
        for p, part, x in zip(params, parts, xs, strict=True)
    ]


def _run(plan: Plan, rows: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """Runs the stages on the packed operand: ``(rows, elements)`` in and out."""
    request, stages = plan.request, plan.stages

    def run(stage: Stage, x: jax.Array) -> jax.Array:
        return run_stage(x, stage, sizes, request.op, request.root)

    if len(stages) == 1:
        out = run(stages[0], rows if request.collective in payload.SCATTERED else rows[0])
        return out if out.ndim == 2 else out[None]
    if request.collective == "all_reduce":
        return _all_reduce(stages, rows[0], run)[None]
    return _by_digits(request, stages, rows, run)


_Runner = Callable[[Stage, jax.Array], jax.Array]


def _all_reduce(stages: tuple[Stage, ...], x: jax.Array, run: _Runner) -> jax.Array:
    """Reduce-scatters inwards, all-reduces the share, all-gathers back outwards."""
    sizes: list[int] = []
    for stage in stages:
        if stage.collective == "reduce_scatter":
            sizes.append(x.size)
            x = run(stage, x)
        elif stage.collective == "all_reduce":
            x = run(stage, x)
        else:
            x = run(stage, x).reshape(-1)[: sizes.pop()]
    return x


def _by_digits(
    request: Request, stages: tuple[Stage, ...], rows: jax.Array, run: _Runner
) -> jax.Array:
    """Runs one stage a digit of the rank number, on that digit's dimension of the payload.

    The payload is ``(digit, ..., digit, elements)``, most significant digit first. A
    reduce-scatter takes its dimension out, an all-gather puts it in, an all-to-all exchanges it.
    """
    strides = [_rank_stride(request, stage.span) for stage in stages]
    digits = dict(sorted(zip(strides, stages, strict=True), reverse=True))
    elements = rows.shape[1]
    present = [] if request.collective == "all_gather" else list(digits)
    x = rows.reshape(*(digits[s].span.num_ranks for s in present), elements)
    for stride, stage in zip(strides, stages, strict=True):
        if stage.collective == "all_gather":
            shape = x.shape
            present = sorted([*present, stride], reverse=True)
            x = run(stage, x.reshape(-1)).reshape(-1, *shape)
            x = jnp.moveaxis(x, 0, present.index(stride))
            continue
        position = present.index(stride)
        x = jnp.moveaxis(x, position, 0)
        shape = x.shape
        x = run(stage, x.reshape(shape[0], -1))
        if stage.collective == "reduce_scatter":
            x = x.reshape(shape[1:])
            present.remove(stride)
        else:
            x = jnp.moveaxis(x.reshape(shape), 0, position)
    return x.reshape(-1, elements)


def _rank_stride(request: Request, span: Span) -> int:
    """Returns how far apart neighbours of a span are in the numbering of all ranks."""
    last = max(request.axes.index(axis) for axis in span.axes)
    return span.stride * math.prod(request.axis_sizes[last + 1 :])
