"""Small reductions over the same groups of devices that could be one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from xcoll.hlo.advising.requests import operation, request_of
from xcoll.hlo.advising.words import named, places
from xcoll.hlo.reader import Collective
from xcoll.hlo.rows import Advice, Row, total_s
from xcoll.hlo.text import Computation, Module
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.topology import Topology
from xcoll.units import readable_bytes, readable_time

_FEWEST = 8
_SMALL = 64 << 10
_NATIVE = Policy.native()
_PS = 1e-12


def small_reductions(
    module: Module,
    rows: Sequence[Row],
    collectives: Mapping[str, Collective],
    topology: Topology,
    axis_sizes: Mapping[str, int],
) -> Iterator[Advice]:
    """Yields one advice for each set of small reductions of which none waits for another.

    They are the all-reduces of at most 64 KiB, of one dtype and operation over the same groups of
    devices in one computation, 8 or more of them.
    """
    sets: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.kind == "all-reduce" and row.num_bytes <= _SMALL and row.axes:
            op = operation(module, row)
            key = (row.computation, row.axes, row.dtypes, collectives[row.name].groups, op)
            sets.setdefault(key, []).append(row)
    for small in sets.values():
        if len(small) < _FEWEST:
            continue
        for found in _rounds(module.computations[small[0].computation], small):
            if len(found) >= _FEWEST:
                yield _advice(module, found, topology, axis_sizes)


def _rounds(computation: Computation, small: Sequence[Row]) -> Iterator[list[Row]]:
    """Yields the rows that have the same number of others before them, none of them the other."""
    by_name = {row.name: row for row in small}
    before: dict[str, int] = {}
    rounds: dict[int, list[Row]] = {}
    # The text has operands before what uses them.
    for i in computation.instructions.values():
        number = max((before.get(name, 0) for name in i.operands), default=0)
        if i.name in by_name:
            rounds.setdefault(number, []).append(by_name[i.name])
            number += 1
        before[i.name] = number
    yield from rounds.values()


def _advice(
    module: Module, rows: Sequence[Row], topology: Topology, axis_sizes: Mapping[str, int]
) -> Advice:
    request = request_of(module, rows, topology, axis_sizes)
    one_ps = None if request is None else plan(request, topology, _NATIVE).native_time_ps
    runs = rows[0].runs
    now_s = total_s((row.exposed_s, runs) for row in rows)
    saves_s, times = None, ""
    if one_ps is not None and now_s is not None:
        saves_s = max(0.0, now_s - one_ps * _PS * runs)
        now = readable_time(round(now_s / runs / _PS)) if runs else "nothing"
        times = f" They wait {now}; one of all takes {readable_time(one_ps)}, predicted."
    total = readable_bytes(sum(row.num_bytes for row in rows))
    return Advice(
        kind="small-reductions",
        text=(
            f"{len(rows)} small reductions over {named(rows[0].axes)}, {total} in all, none of"
            f" which waits for another{places(rows)}.{times} Reduce them as one array"
            " (jax.flatten_util.ravel_pytree before jax.lax.psum)."
        ),
        rows=tuple(row.name for row in rows),
        saves_s=saves_s,
    )
