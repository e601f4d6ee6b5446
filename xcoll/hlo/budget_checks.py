"""Holds an audit to a budget: what breaks it, by how much, and which lines are to blame."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xcoll.hlo.auditing import audit
from xcoll.hlo.broken import Blame, Breach
from xcoll.hlo.budgets import Budget, Limit, read_budget
from xcoll.hlo.reader import KINDS
from xcoll.hlo.result import Audit
from xcoll.hlo.rows import Row
from xcoll.memory import Memory
from xcoll.topology import Topology
from xcoll.units import counted

_PS = 1e12


def breaches(audited: Audit, budget: Budget) -> tuple[Breach, ...]:
    """Returns the limits that a program breaks or cannot be shown to keep, in the budget's order.

    What could not be measured breaks its limit: a loop of unknown length that sends over the axis,
    a row that was not read, a time that is not predicted, a memory use that XLA does not report.

    Raises:
      ValueError: the budget limits an axis that the mesh does not have.
    """
    budget.check_axes(audited.axis_sizes)
    found = (_check(audited, limit) for limit in budget.limits)
    return tuple(breach for breach in found if breach is not None)


def assert_budget(
    audit_or_fn: Any,
    *args: Any,
    budget: str | os.PathLike[str] | Mapping[str, Any] | Budget,
    mesh: Any = None,
    topology: Topology | str | None = None,
    **kwargs: Any,
) -> Audit:
    """Asserts that a compiled program keeps a budget, for tests.

    Args:
      audit_or_fn: an `Audit`, or what `xcoll.audit` takes: a function or a compiled program.
      *args: as `xcoll.audit`; none with an `Audit`.
      budget: path of a TOML file, a mapping of its tables, or a `Budget`; see `read_budget`.
      mesh: as `xcoll.audit`.
      topology: as `xcoll.audit`.
      **kwargs: as `xcoll.audit`.

    Returns:
      The audit.

    Raises:
      AssertionError: a limit is broken, or cannot be shown to hold. The message has each, with what
        was measured, what is allowed and the lines to blame.
      ValueError: as `read_budget` and `xcoll.audit`; or a limited axis is not in the mesh.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> kept = assert_budget(step, mesh=mesh, budget={"count": {"total": 0}})
    """
    __tracebackhide__ = True
    read = read_budget(budget)
    if isinstance(audit_or_fn, Audit):
        if args or kwargs or mesh is not None or topology is not None:
            raise TypeError("assert_budget(Audit, ...): takes only budget= beside an Audit")
        audited = audit_or_fn
    else:
        audited = audit(audit_or_fn, *args, mesh=mesh, topology=topology, **kwargs)
    broken = breaches(audited, read)
    if broken:
        raise AssertionError("\n".join([f"{read.name} is broken", *map(str, broken)]))
    return audited


def _check(audited: Audit, limit: Limit) -> Breach | None:
    measured = _measured(audited, limit)
    if limit.table == "memory":
        why = "" if audited.memory else "XLA does not say how much memory the program uses"
        if limit.key == "code" and measured == 0:
            why = "the compiler does not say how much the program itself takes"
        blame = tuple(_memory_parts(audited.memory)) if limit.key == "total" else ()
    else:
        unknown = [(row, why) for row in audited.rows if (why := _doubt(row, limit))]
        why = "; ".join(_counted(Counter(why for _, why in unknown)))
        if measured is None and not why:
            why = "how long a device computes is not known"
        blame = (*_unknown_sites(unknown), *_shares(audited.rows, limit))
    if measured is not None and measured <= limit.allowed and not why:
        return None
    return Breach(limit=limit, measured=measured, why=why, blame=blame)


def _counted(reasons: Mapping[str, int]) -> Iterator[str]:
    for why, number in reasons.items():
        yield f"{counted(number, 'collective')}: {why}"


def _measured(audited: Audit, limit: Limit) -> int | float | None:
    if limit.table == "wire_bytes":
        return audited.wire_bytes[limit.key]
    if limit.table == "count":
        return sum(_part(row, limit) for row in audited.rows)
    if limit.table == "memory":
        return None if audited.memory is None else int(getattr(audited.memory, limit.key))
    if limit.key == "exposed":
        # Times are predicted in whole picoseconds.
        return None if audited.exposed_s is None else round(audited.exposed_s * _PS)
    # What neither computes nor waits has no share: it is none of an empty step.
    return 0.0 if audited.step_s == 0 else audited.exposed_share


def _doubt(row: Row, limit: Limit) -> str:
    """Returns why a row's part is not known; empty where it is."""
    if limit.table == "count":
        return "" if row.kind in KINDS else (row.unread or f"operation {row.kind}")
    if row.unread:
        return row.unread
    in_time = limit.table == "time"
    part = row.exposed_s if in_time else row.wire_bytes.get(limit.key, 0)
    if row.executions is None and part != 0:
        return "in a loop of unknown trip count"
    return "its time is not predicted" if part is None and row.runs else ""


def _part(row: Row, limit: Limit) -> int | float:
    """Returns what a row contributes: bytes, operations, or picoseconds."""
    if limit.table == "count":
        # A collective between TPU slices is a send and a recv, and counts by its own kind too.
        carried_out = row.transfer if row.kind == "send" else None
        return int(limit.key in (row.kind, carried_out, "total"))
    if limit.table == "wire_bytes":
        return row.wire_bytes.get(limit.key, 0) * row.runs
    return (row.exposed_s or 0.0) * row.runs * _PS


def _site(row: Row) -> str:
    made_by = "" if row.made_by == "unknown" else f", made by {row.made_by}"
    # In a test or in CI that runs at the root of a repository, as people write its files.
    source = (row.source or "").removeprefix(os.getcwd() + os.sep)
    where = f"{'near ' if row.is_near else ''}{source}" if source else row.op_name
    carried_out = f" ({row.transfer})" if row.transfer else ""
    return f"{where or row.name} {row.kind}{carried_out}{made_by}"


def _unknown_sites(unknown: Iterable[tuple[Row, str]]) -> Iterator[Blame]:
    for site, why in dict.fromkeys((_site(row), why) for row, why in unknown):
        yield Blame(site=site, why=why)


def _shares(rows: Iterable[Row], limit: Limit) -> list[Blame]:
    """Returns the sites that contribute, the largest first."""
    parts: dict[str, int | float] = {}
    for row in rows:
        if part := _part(row, limit):
            parts[_site(row)] = parts.get(_site(row), 0) + part
    return _largest_first(parts)


def _memory_parts(memory: Memory | None) -> list[Blame]:
    if memory is None:
        return []
    parts = {
        "arguments": memory.arguments,
        "outputs that are not written over arguments": memory.outputs - memory.aliased,
        "temporaries": memory.temporaries,
        "code": memory.code,
    }
    return _largest_first({site: part for site, part in parts.items() if part})


def _largest_first(parts: Mapping[str, int | float]) -> list[Blame]:
    # A site's part of all contributions: rows need not be the busiest on the same device, so that
    # together they can be more than the total.
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [Blame(site=site, amount=part, share=part / total) for site, part in ordered]
