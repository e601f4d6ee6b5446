"""The primitive that a planned group becomes: same types and effects as what it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from xcoll import _compat, payload, recording
from xcoll.codecs import FixedPoint
from xcoll.compress import KERNELS
from xcoll.costmodel import block_of, carried
from xcoll.encoded import permute, two_shot
from xcoll.lower import cut_rows, run_stage
from xcoll.names import PLAN_SCOPE
from xcoll.nesting import Nest
from xcoll.plan import Plan, Request
from xcoll.ranks import Ranks
from xcoll.recording import Record
from xcoll.regrouping import rank_stride
from xcoll.schedule import slot_elements
from xcoll.wire import Wire, as_wide


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
    record: Record | None,
) -> Any:
    outs, effects = [], set()
    # A key may stand behind the operands.
    for aval, member in zip(avals, members, strict=False):
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
    record: Record | None,
) -> Any:
    recorder = recording.recorder()

    def run(*xs: jax.Array) -> list[jax.Array]:
        # A key may stand behind the operands.
        operands, key = list(xs[: len(members)]), (*xs[len(members) :], None)[0]
        params = [dict(m.params) for m in members]
        out = carry_out(plan, params, mesh_axes, operands, key)
        if record is not None and recorder is not None:
            axes = (*mesh_axes, *(nest.axes if nest else ()))
            others = tuple(axis for axis in axes if axis not in plan.request.axes)
            recorder.send(record, plan, params, others, operands, out)
        return out

    def implementation(*xs: jax.Array) -> list[jax.Array]:
        # The scope shows in profiles, and tells an audit who made these operations.
        with jax.named_scope(PLAN_SCOPE):
            out = run(*xs) if nest is None else nest.wrap(run)(*xs)
        return [out[i] for i in copies]

    # The types of the results are those of the replaced equations; inside, axes are not tracked.
    plain = [_compat.without_manual_type(aval) for aval in ctx.avals_in]
    with _compat.check_vma(False), warnings.catch_warnings():
        # jax says so of every Triton kernel; who trains with one can do nothing about it.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return mlir.lower_fun(implementation)(ctx.replace(avals_in=plain), *args)


mlir.register_lowering(stages_p, _lower)


def carry_out(
    plan: Plan,
    params: list[dict[str, Any]],
    mesh_axes: tuple[str, ...],
    xs: list[jax.Array],
    key: jax.Array | None = None,
) -> list[jax.Array]:
    """Carries out a plan inside a manual computation.

    Args:
      plan: what to do.
      params: for each site, the parameters of the equation that it was.
      mesh_axes: the mesh's axes, in its order.
      xs: the operand of each site, per rank.
      key: of stochastic rounding; each rank folds its number in.

    Returns:
      The result of each site, per rank, as the equation would have given it.
    """
    request = plan.request
    n, collective = request.num_ranks, request.collective
    shapes, dtype = [x.shape for x in xs], request.dtype
    codec, scales = plan.stages[0].codec, None
    if isinstance(codec, FixedPoint):
        scales = jax.lax.pmax(jnp.stack([codec.magnitude(x) for x in xs]), request.axes)
        keys = _keys_of_sites(key, request, len(xs))
        xs = [codec.to_integers(x, n, scales[i], keys[i], dtype=dtype) for i, x in enumerate(xs)]
    rows = [payload.to_rows(collective, p, x, n) for p, x in zip(params, xs, strict=True)]
    block = block_of(plan.stages)
    sizes = dict((*zip(request.axes, request.axis_sizes, strict=True), *request.in_step))
    run = _Stages(plan, {a: sizes[a] for a in mesh_axes if a in sizes}, block, key)
    result = run(payload.pack(rows, block))
    if collective in ("reduce", "gather"):
        # Ranks other than the root hold partial results here, and zeros by contract.
        is_root = jax.lax.axis_index(request.axes) == request.root
        result = jnp.where(is_root, result, jnp.zeros_like(result))
    elements = [payload.row_elements(collective, shape, n) for shape in shapes]
    parts = payload.unpack(result, elements, block)
    if isinstance(codec, FixedPoint):
        assert scales is not None
        parts = [
            codec.from_integers(part, n, scales[i], dtype=dtype).astype(dtype)
            for i, part in enumerate(parts)
        ]
    return [
        payload.from_rows(collective, p, part, shape, n)
        for p, part, shape in zip(params, parts, shapes, strict=True)
    ]


def _keys_of_sites(key: jax.Array | None, request: Request, num_sites: int) -> list[Any]:
    """Returns a key for what each site of a rank rounds: no two of them round alike."""
    if key is None:
        return [None] * num_sites
    key = jax.random.fold_in(key, jax.lax.axis_index(request.axes))
    return [jax.random.fold_in(key, i) for i in range(num_sites)]


class _Stages:
    """Runs the stages of a plan on a packed operand: ``(rows, elements)`` in and out.

    Args:
      plan: the plan.
      sizes: sizes of its axes and those in step with them, in the mesh's order.
      block: the payload is whole blocks of so many elements.
      key: of stochastic rounding, the same on all ranks.
    """

    def __init__(self, plan: Plan, sizes: Mapping[str, int], block: int, key: jax.Array | None):
        self.request, self.stages = plan.request, plan.stages
        self._sizes, self._block, self._key = sizes, block, key
        self._kernels = plan.kernels == KERNELS
        self._dtype = carried(plan.request, plan.stages).dtype

    def __call__(self, rows: jax.Array) -> jax.Array:
        request, stages = self.request, self.stages
        if request.collective == "all_reduce":
            return self._all_reduce(rows[0])[None]
        if len(stages) == 1:
            out = self._run(0, rows if request.collective in payload.SCATTERED else rows[0])
            return out if out.ndim == 2 else out[None]
        return self._by_digits(rows)

    def _run(self, number: int, x: jax.Array) -> jax.Array:
        """Runs one stage; what leaves a codec's stages has the payload's dtype again."""
        stage, wire = self.stages[number], self._wire(number)
        if wire is not None:
            x = as_wide(x)
        if stage.collective == "permute":
            assert wire is not None
            slot = slot_elements(x.size, 1, self._block)
            out = permute(x, self.request, Ranks(stage.span, self._sizes), wire, slot)
        else:
            request = self.request
            out = run_stage(
                x,
                stage,
                self._sizes,
                request.op,
                request.root,
                block=self._block,
                wire=wire,
                in_place=request.platform == "cpu",
            )
        after = self.stages[number + 1 : number + 2]
        stays_wide = wire is not None and after and after[0].codec == stage.codec
        return out if stays_wide else out.astype(self._dtype)

    def _wire(self, number: int) -> Wire | None:
        codec = self.stages[number].codec
        if codec is None or codec.integers is not None:
            return None
        key = None if self._key is None else self._key_of(number, self._key)
        return Wire(codec, self._dtype, self.request.platform, self._kernels, key)

    def _key_of(self, number: int, key: jax.Array) -> jax.Array:
        """Returns the key of a stage: of the rank's own, but the same where ranks hold the same.

        What earlier stages have gathered is replicated over their spans, and has to stay so.
        """
        key = jax.random.fold_in(key, number)
        if self.stages[number].collective != "all_gather":
            return jax.random.fold_in(key, jax.lax.axis_index(self.request.axes))
        for stage in self.stages[number:]:
            key = jax.random.fold_in(key, Ranks(stage.span, self._sizes).index())
        return key

    def _all_reduce(self, x: jax.Array) -> jax.Array:
        """Reduce-scatters inwards, all-reduces the share, all-gathers back outwards."""
        sizes: list[int] = []
        number = 0
        while number < len(self.stages):
            stage = self.stages[number]
            if self._is_two_shot(number):
                x = self._two_shot(number, x)
                number += 1
            elif stage.collective == "reduce_scatter":
                sizes.append(x.size)
                x = self._run(number, x)
            elif stage.collective == "all_reduce":
                x = self._run(number, x)
            else:
                x = self._run(number, x).reshape(-1)[: sizes.pop()]
            number += 1
        return x

    def _is_two_shot(self, number: int) -> bool:
        """Whether a stage and the next are an exchange and a gathering of encoded shares."""
        pair = self.stages[number : number + 2]
        if len(pair) < 2 or self._wire(number) is None or pair[0].codec != pair[1].codec:
            return False
        kinds = [(stage.collective, stage.choice.name) for stage in pair]
        return kinds == [("reduce_scatter", "direct"), ("all_gather", "direct")]

    def _two_shot(self, number: int, x: jax.Array) -> jax.Array:
        stage, wire = self.stages[number], self._wire(number)
        assert wire is not None
        n = stage.span.num_ranks
        slots = cut_rows(as_wide(x)[None], n, slot_elements(x.size, n, self._block), is_flat=True)
        total = two_shot(slots, Ranks(stage.span, self._sizes), wire)
        return total.reshape(-1)[: x.size].astype(self._dtype)

    def _by_digits(self, rows: jax.Array) -> jax.Array:
        """Runs one stage a digit of the rank number, on that digit's dimension of the payload.

        The payload is ``(digit, ..., digit, elements)``, most significant digit first. A
        reduce-scatter takes its dimension out, an all-gather puts it in, an all-to-all exchanges
        it.
        """
        request, stages = self.request, self.stages
        strides = [rank_stride(request, stage.span) for stage in stages]
        digits = dict(sorted(zip(strides, stages, strict=True), reverse=True))
        elements = rows.shape[1]
        present = [] if request.collective == "all_gather" else list(digits)
        x = rows.reshape(*(digits[s].span.num_ranks for s in present), elements)
        for number, (stride, stage) in enumerate(zip(strides, stages, strict=True)):
            if stage.collective == "all_gather":
                shape = x.shape
                present = sorted([*present, stride], reverse=True)
                x = self._run(number, x.reshape(-1)).reshape(-1, *shape)
                x = jnp.moveaxis(x, 0, present.index(stride))
                continue
            position = present.index(stride)
            x = jnp.moveaxis(x, position, 0)
            shape = x.shape
            x = self._run(number, x.reshape(shape[0], -1))
            if stage.collective == "reduce_scatter":
                x = x.reshape(shape[1:])
                present.remove(stride)
            else:
                x = jnp.moveaxis(x.reshape(shape), 0, position)
        return x.reshape(-1, elements)
