"""Grouping: which collectives can travel together, and where their common equation stands."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from xcoll import recording
from xcoll.nesting import Nest
from xcoll.plan import Plan
from xcoll.sites import operand_bytes, read
from xcoll.stages import Member, stages_p

MAX_PACKED_BYTES = 128 << 20
"""A group ends before its operands are more than this: packing copies them, and a model's
gradients may fill a third of the memory. Larger payloads are bound by bandwidth, not by latency."""


def levels_of(jaxpr: core.Jaxpr) -> list[int]:
    """Returns for each equation how many collectives stand one behind the other before it.

    Before it by data, or by the order that effects (prints, callbacks) have to keep. Collectives of
    the same level cannot depend on each other, and packing by level cannot make a cycle: every
    dependence between two collectives goes up.
    """
    depth: dict[Any, int] = {}
    last_effect = 0
    levels = []
    for eqn in jaxpr.eqns:
        level = max((depth.get(v, 0) for v in eqn.invars if isinstance(v, core.Var)), default=0)
        if _is_ordered(eqn):
            level = last_effect = max(level, last_effect)
        levels.append(level)
        after = level + (read(eqn) is not None)
        for v in eqn.outvars:
            depth[v] = after
    return levels


def _is_ordered(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation has effects beyond naming an axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def cut_groups(
    groups: Mapping[tuple[Any, ...], list[int]], jaxpr: core.Jaxpr
) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
    """Yields the collectives that travel together: their key, and where they stand.

    Args:
      groups: indices of equations that can be packed, by their key.
      jaxpr: the body that they stand in.
    """
    for key, indices in groups.items():
        start, num_bytes, seen = 0, 0, set[int]()
        for position, index in enumerate(indices):
            operand = id(jaxpr.eqns[index].invars[0])
            size = 0 if operand in seen else operand_bytes(jaxpr.eqns[index])
            seen.add(operand)
            if position > start and num_bytes + size > MAX_PACKED_BYTES:
                yield key, indices[start:position]
                start, num_bytes, seen = position, 0, {operand}
            num_bytes += size
        yield key, indices[start:]


def pack_equations(
    eqns: list[core.JaxprEqn],
    plan: Plan,
    mesh_axes: tuple[str, ...],
    nest: Nest | None = None,
    key: Any = None,
    sites: Sequence[Any] = (),
) -> core.JaxprEqn:
    """Returns one equation in the place of several: their operands, results and effects.

    Args:
      eqns: what it replaces.
      plan: what it does.
      mesh_axes: the manual axes, in the mesh's order.
      nest: how the distinct operands are cut over axes that the partitioner owns, if there are any.
      key: variable of the PRNG key of stochastic rounding, if there is one.
      sites: what the report has of each equation, for records.
    """
    once, copies = distinct(eqns)
    recorder = recording.recorder()
    record = None if recorder is None else recorder.record(sites, copies)
    members = tuple(Member(e.primitive, tuple(sorted(e.params.items()))) for e in once)
    return core.new_jaxpr_eqn(
        [*(e.invars[0] for e in once), *([] if key is None else [key])],
        [e.outvars[0] for e in eqns],
        stages_p,
        dict(
            plan=plan, members=members, copies=copies, mesh_axes=mesh_axes, nest=nest, record=record
        ),
        set().union(*(e.effects for e in eqns)),
        eqns[0].source_info,
        eqns[0].ctx,
    )


def distinct(eqns: list[core.JaxprEqn]) -> tuple[list[core.JaxprEqn], tuple[int, ...]]:
    """Returns the equations that differ, and for each of all which of those it is.

    The same collective of the same operand is sent once, as XLA's own elimination of common
    subexpressions would have it.
    """
    once: list[core.JaxprEqn] = []
    places: dict[Any, int] = {}
    copies = []
    for eqn in eqns:
        key = (eqn.primitive, id(eqn.invars[0]), repr(sorted(eqn.params.items())))
        if key not in places:
            places[key] = len(once)
            once.append(eqn)
        copies.append(places[key])
    return once, tuple(copies)


def sort_equations(eqns: list[core.JaxprEqn], packs: list[list[int]]) -> list[core.JaxprEqn]:
    """Returns the equations in an order that respects dependences, close to the old one.

    Each pack stands at the index of its last member; the other members are gone. Equations
    with effects beyond named axes keep their order.
    """
    gone = {i for pack in packs for i in pack[:-1]}
    maker = {v: i for i, eqn in enumerate(eqns) if i not in gone for v in eqn.outvars}
    waits: dict[int, set[int]] = {}
    last_effect: int | None = None
    for i, eqn in enumerate(eqns):
        if i in gone:
            continue
        waits[i] = {maker[v] for v in eqn.invars if isinstance(v, core.Var) and v in maker}
        if _is_ordered(eqn):
            if last_effect is not None:
                waits[i].add(last_effect)
            last_effect = i
    users: dict[int, list[int]] = {}
    for i, before in waits.items():
        for b in before:
            users.setdefault(b, []).append(i)
    ready = [i for i, before in waits.items() if not before]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(eqns[i])
        for user in users.get(i, ()):
            waits[user].discard(i)
            if not waits[user]:
                heapq.heappush(ready, user)
    assert len(order) == len(waits), "packing made a cycle"
    return order
