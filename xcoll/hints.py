"""Hints: programs whose collectives do something else than their author is likely to want.

What is known of a value is followed through calls, loops and branches. No hint is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from xcoll import _compat
from xcoll.costmodel import REDUCTIONS
from xcoll.sites import REGION, Scope, Spec, enter, operand_type, read

# fmt: off
_CALLS = frozenset({
    "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2", REGION,
})
"""Equations that do what their one body does."""

_SAME = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "name", "neg",
    "optimization_barrier", "pvary", "reduce_precision", "reduce_sum", "reshape", "rev", "slice",
    "split", "squeeze", "transpose", "unstack", "xcoll_barrier",
})
"""Steps from each array to one, or from one to several, through which a sum stays a sum."""

_JOINS = frozenset({"add", "add_any", "concatenate", "pad", "select_n", "stack", "sub"})
"""Steps that put arrays together, each a part of the result."""
# fmt: on

_NARROW = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True)
class _Sum:
    """A value that is a sum over ranks, or has one as a part, times constants.

    Attributes:
      made: axes over which it was summed and is the same on every rank, each with the line of it.
      dtype: what the last sum was computed in; empty where it is but a part of the value.
      is_typed: made where varying axes are checked, so that types say what all ranks share.
      scale: product of the constants since; None where it depends on the way here.
      divided: by what, in one step or in all, before or after.
      is_first: what was summed did not itself come from sums over these axes. Where it did, a loss
        over all ranks for example, its gradient is whole, and a later mean leaves it so.
    """

    made: tuple[tuple[Any, str], ...]
    dtype: str
    is_typed: bool
    scale: float | None = 1.0
    divided: frozenset[float] = frozenset()
    is_first: bool = True

    def times(self, factor: float) -> _Sum:
        scale = None if self.scale is None else self.scale * factor
        by = {1 / abs(s) for s in (factor, scale) if s}
        return replace(self, scale=scale, divided=self.divided | by)

    def is_mean(self, *counts: int) -> bool:
        """Returns whether it was divided by a multiple of one of ``counts``, about."""
        ratios = [d / c for d in self.divided for c in counts if c > 1]
        return any(r > 0.9 and math.isclose(r, round(r), rel_tol=5e-3) for r in ratios)


@dataclass(frozen=True)
class _Fact:
    """What is known of a value; by default nothing.

    Attributes:
      const: the number that all its elements are, on every rank.
      sum: the sum over ranks that it is.
      divisors: what replicated scalars behind it were divided by, as in the mean of a loss.
      behind: the axes over which something behind it was summed.
    """

    const: float | None = None
    sum: _Sum | None = None
    divisors: frozenset[int] = frozenset()
    behind: frozenset[Any] = frozenset()


_Facts = tuple[_Fact, ...]
_Result = tuple[_Facts, list[str]]


def find_hints(jaxpr: core.Jaxpr, scope: Scope | None = None) -> Iterator[str]:
    """Yields a sentence for each doubtful sum of a program, the bodies of its equations included.

    * A value that has been summed over an axis is summed over it once more, such as the gradient
      of a replicated parameter under ``check_vma=True``.
    * bfloat16 or float16 values are summed and only then cast to float32.

    Args:
      jaxpr: the whole program; nothing is known of its inputs.
      scope: where it stands; None outside any mesh.
    """
    _, hints = _Finder().run(jaxpr, _unknown(len(jaxpr.invars)), scope or Scope())
    yield from dict.fromkeys(hints)


@dataclass
class _Finder:
    """Follows facts through the bodies of a program; each once for each set of facts."""

    done: dict[Any, _Result] = field(default_factory=dict)

    def run(self, jaxpr: core.Jaxpr, facts: _Facts, scope: Scope) -> _Result:
        """Returns what is known of a body's results, and its hints, given that of its inputs."""
        key = (id(jaxpr), facts, scope.axis_sizes)
        if key not in self.done:
            known: dict[Any, _Fact] = dict(zip(jaxpr.invars, facts, strict=True))
            hints: list[str] = []
            for eqn in jaxpr.eqns:
                inputs = tuple(_look_up(v, known) for v in eqn.invars)
                outputs, found = self.step(eqn, inputs, scope)
                known.update(zip(eqn.outvars, outputs, strict=True))
                hints += found
            self.done[key] = tuple(_look_up(v, known) for v in jaxpr.outvars), hints
        return self.done[key]

    def step(self, eqn: core.JaxprEqn, inputs: _Facts, scope: Scope) -> _Result:
        """Returns what is known of an equation's results, and the hints in it."""
        spec, name = read(eqn), eqn.primitive.name
        if spec is not None:
            return _collective(eqn, spec, inputs, scope)
        bodies = [found[2:] for found in sorted(enter(eqn, scope), key=lambda found: found[0])]
        if not bodies:
            is_cast = name == "convert_element_type"
            return _plain(eqn, inputs), list(_late_cast(eqn, inputs[0])) if is_cast else []
        if name == "scan" and "ft_in" in eqn.params:
            return self.loop(*bodies[0], *map(tuple, eqn.params["ft_in"].update(inputs).unpack()))
        if name == "while":
            first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            test, consts, carry = inputs[:first], inputs[first:][:second], inputs[first + second :]
            (body, inner), (cond, _) = bodies
            facts, hints = self.loop(body, inner, consts, carry, ())
            again, more = self.run(cond, (*test, *facts), inner)
            # Ranks that stop after different numbers of passes end with different values.
            return tuple(_chosen(cond.outvars[0], again[0], f) for f in facts), more + hints
        if name == "cond":
            results = [self.run(body, inputs[1:], inner) for body, inner in bodies]
            ways = zip(*(facts for facts, _ in results), strict=True)
            facts = tuple(_chosen(eqn.invars[0], inputs[0], _either(way)) for way in ways)
            return facts, [hint for _, found in results for hint in found]
        if name in _CALLS:
            return self.run(bodies[0][0], inputs, scope)
        # A shard_map cuts its arguments, and may leave types unchecked.
        results = [self.run(b, _unknown(len(b.invars), inputs), inner) for b, inner in bodies]
        facts = results[0][0] if name == "shard_map" else _unknown(len(eqn.outvars), inputs)
        return facts, [hint for _, found in results for hint in found]

    def loop(self, body: core.Jaxpr, scope: Scope, *parts: _Facts) -> _Result:
        """Returns what is known of a loop's results whatever the number of passes."""
        consts, carry, xs = parts
        while True:
            outs, hints = self.run(body, (*consts, *carry, *xs), scope)
            joined = tuple(_either(pair) for pair in zip(carry, outs, strict=False))
            if joined == carry:
                return (*carry, *outs[len(carry) :]), hints
            carry = joined


def _look_up(value: Any, known: dict[Any, _Fact]) -> _Fact:
    if isinstance(value, core.Var):
        return known.get(value, _Fact())
    is_real = any(jnp.issubdtype(value.aval.dtype, kind) for kind in (np.floating, np.integer))
    return _Fact(float(value.val) if is_real and value.aval.shape == () else None)


def _after(inputs: Sequence[_Fact]) -> _Fact:
    """Returns what is known of any result of ``inputs``."""
    return _Fact(
        divisors=frozenset[int]().union(*(f.divisors for f in inputs)),
        behind=frozenset[Any]().union(*(f.behind for f in inputs)),
    )


def _unknown(count: int, inputs: Sequence[_Fact] = ()) -> _Facts:
    return (_after(inputs),) * count


def _collective(eqn: core.JaxprEqn, spec: Spec, inputs: _Facts, scope: Scope) -> _Result:
    """Returns what is known of the result of a sum over ranks, and whether it is one too many."""
    sizes, fact, unknown = scope.sizes(), inputs[0], _unknown(len(eqn.outvars), inputs)
    is_sum = spec.op == "sum" and spec.collective in REDUCTIONS
    if not is_sum or spec.kept_reason is not None or not all(a in sizes for a in spec.axes):
        return unknown, []
    num_ranks = _count(spec.axes, sizes)
    if fact.const is not None:
        return (replace(fact, const=fact.const * num_ranks),), []
    if num_ranks == 1:
        return inputs, []
    before = fact.sum or _Sum((), "", False)
    again = [axis for axis, _ in before.made if axis in spec.axes]
    counts = _count(again, sizes), _count([axis for axis, _ in before.made], sizes)
    is_mean = before.is_mean(*counts)
    line = _compat.source_line(eqn) or "an unknown line"
    hints = []
    is_typed = eqn.primitive.name == "psum_invariant" or spec.collective != "all_reduce"
    is_certain = before.is_typed and is_typed and before.is_first
    if counts[0] > 1 and not is_mean and is_certain:
        lines = ", ".join(dict.fromkeys(at for axis, at in before.made if axis in again))
        hints = [
            f"{line}: {spec.name} over {spec.axes} of a value that is the same on all {counts[0]}"
            f" ranks of {tuple(again)}, since it, or a part of it, was summed over the same axis"
            f" before ({lines}). Once more multiplies it by {counts[0]}, which the division of a"
            " pmean only undoes: a sum stays a sum. Under check_vma=True the gradient of a"
            " replicated parameter is summed already: leave this out, and divide if a mean is"
            " meant, or jax.lax.pcast(params, axes, to='varying') before differentiating."
        ]
    if spec.collective != "all_reduce":
        return unknown, hints
    older = () if is_mean else tuple(m for m in before.made if m[0] not in again)
    made = (*older, *((axis, line) for axis in spec.axes))
    new = _Sum(made, str(operand_type(eqn).dtype), eqn.primitive.name == "psum_invariant")
    new = replace(new, is_first=not fact.behind & set(spec.axes))
    if older:
        new = replace(new, scale=before.scale, divided=before.divided)
    if new.is_typed and any(d % num_ranks == 0 for d in fact.divisors):
        new = replace(new, divided=new.divided | {num_ranks})
    return (replace(fact, const=None, sum=new, behind=fact.behind | set(spec.axes)),), hints


def _count(axes: Sequence[Any], sizes: Mapping[Any, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _late_cast(eqn: core.JaxprEqn, fact: _Fact) -> Iterator[str]:
    total, is_late = fact.sum, eqn.params["new_dtype"] == np.float32
    if total and is_late and total.made and {total.dtype, str(operand_type(eqn).dtype)} <= _NARROW:
        line = total.made[-1][1]
        axes = tuple(axis for axis, at in total.made if at == line)
        yield (
            f"{line}: psum over {axes} in {total.dtype}, cast to float32 afterwards: the sum has"
            " already been rounded. Cast before the sum to keep its bits."
        )


def _plain(eqn: core.JaxprEqn, inputs: _Facts) -> _Facts:
    """Returns what is known of the results of an equation without bodies."""
    name, unknown = eqn.primitive.name, _unknown(len(eqn.outvars), inputs)
    if name == "xcoll_mark":
        return inputs[:1]
    if name in _SAME:
        kind = eqn.params.get("new_dtype", np.float32)
        facts = inputs * len(unknown) if len(inputs) == 1 else inputs
        if name in ("neg", "reduce_sum") or not jnp.issubdtype(kind, np.inexact):
            facts = tuple(replace(f, const=None) for f in facts)
        return unknown if kind == np.bool_ else facts
    if name in _JOINS:
        first = 1 if name == "select_n" else 0  # what it selects by is no part of the result
        parts = [_Fact(const=f.const) for f in inputs[:first]] + list(inputs[first:])
        return (replace(unknown[0], sum=_together(parts, eqn.invars)),)
    if name in ("mul", "div"):
        return (_scaled(eqn, inputs),)
    return unknown


def _scaled(eqn: core.JaxprEqn, inputs: _Facts) -> _Fact:
    """Returns what is known of a product with a constant, or a quotient by one."""
    is_quotient, aval = eqn.primitive.name == "div", operand_type(eqn)
    one, two = inputs if is_quotient or inputs[1].const else inputs[::-1]
    if not two.const:
        return _after(inputs)
    factor = 1 / two.const if is_quotient else two.const
    is_shared_scalar = aval.shape == () and not _compat.varying_axes(aval)
    divisor = {round(1 / abs(factor))} if is_shared_scalar and 1e-9 < abs(factor) < 1 else set()
    const = None if one.const is None else one.const * factor
    total = None if one.sum is None else one.sum.times(factor)
    known = _after(inputs)
    return replace(known, const=const, sum=total, divisors=known.divisors | divisor)


def _merge(sums: Sequence[_Sum]) -> _Sum:
    """Returns what holds of each of several sums."""
    first, *rest = sums
    return replace(
        first,
        made=tuple(m for m in first.made if all(m[0] in dict(s.made) for s in rest)),
        is_typed=all(s.is_typed for s in sums),
        scale=first.scale if all(s.scale == first.scale for s in rest) else None,
        divided=first.divided.union(*(s.divided for s in rest)),
        is_first=all(s.is_first for s in sums),
    )


def _either(facts: Sequence[_Fact]) -> _Fact:
    """Returns what is known of a value that is one of several."""
    sums = [f.sum for f in facts if f.sum is not None]
    if all(f.const == facts[0].const for f in facts) and not sums:
        return replace(_after(facts), const=facts[0].const)
    is_known = all(f.sum is not None or f.const is not None for f in facts)
    return replace(_after(facts), sum=_merge(sums) if sums and is_known else None)


def _together(parts: Sequence[_Fact], values: Sequence[Any]) -> _Sum | None:
    """Returns the sum that is in a value made of several parts."""
    sums = [f.sum for f in parts if f.sum is not None]
    others = [v for f, v in zip(parts, values, strict=True) if f.sum is None and f.const is None]
    if not sums or not others:
        return _merge(sums) if sums else None
    merged = _merge(sums)
    varying = frozenset[Any]().union(*(_compat.varying_axes(v.aval) for v in others))
    made = tuple(m for m in merged.made if m[0] not in varying)
    return replace(merged, made=made, dtype="") if merged.is_typed else None


def _chosen(selector: Any, by: _Fact, fact: _Fact) -> _Fact:
    """Returns what is known of a value that ranks choose, each by its own ``selector``."""
    return replace(fact, sum=_together([_Fact(const=by.const), fact], [selector, selector]))
