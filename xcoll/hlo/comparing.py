"""Compares two audits: what a change did to a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from xcoll.hlo.changes import Comparison, SiteChange, Tally, Total
from xcoll.hlo.result import Audit
from xcoll.hlo.rows import Row, total_s

_PARTS = ("arguments", "outputs", "aliased", "temporaries", "code", "total")


def compare(before: Audit, after: Audit) -> Comparison:
    """Compares the audits of a program before and after a change.

    Collectives are matched by kind, axes, dtypes and where they come from: first by source line and
    name of the operation together, then by the name alone, since an edit moves lines, then by the
    line alone.

    Args:
      before: the audit before the change.
      after: the audit after it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from xcoll.hlo.auditing import audit
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
      >>> once = audit(lambda x: x * 2, jnp.zeros(8), mesh=mesh)
      >>> compare(once, once).sites
      ()
    """
    return Comparison(
        notes=tuple(_notes(before, after)),
        totals=tuple(_totals(before, after)),
        sites=tuple(_sites(before.rows, after.rows)),
    )


def _notes(before: Audit, after: Audit) -> Iterator[str]:
    same_mesh = list(before.axis_sizes.items()) == list(after.axis_sizes.items())
    if not same_mesh:
        meshes = (_mesh(audit.axis_sizes) for audit in (before, after))
        yield "the meshes differ: {}, then {}; bytes are those of one device".format(*meshes)
    first, second = (audit.topology.splitlines()[0] for audit in (before, after))
    if first != second:
        yield f"the topologies differ: {first}, then {second}; times differ with them"
    elif same_mesh and before.topology != after.topology:
        yield f"the axes lie on other links of {first}; times differ with them"
    # Its first word says how; the others have figures of the program.
    if before.compute_source.split()[:1] != after.compute_source.split()[:1]:
        yield (f"compute times come from {before.compute_source}, then from {after.compute_source}")
    for name, audit in (("first", before), ("second", after)):
        unread = sum(bool(row.unread) for row in audit.rows)
        if unread:
            yield f"collectives of the {name} that could not be read: {unread}"
        unknown = sum(row.executions is None for row in audit.rows)
        if unknown:
            yield f"collectives of the {name} in loops of unknown length, counted once: {unknown}"


def _mesh(axis_sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axis_sizes.items())


def _totals(before: Audit, after: Audit) -> Iterator[Total]:
    first, second = _figures(before), _figures(after)
    for table in first:
        # A kind of collective that is not there is there zero times.
        missing = 0 if table == "count" else None
        for key in dict.fromkeys((*first[table], *second[table])):
            old, new = (figures[table].get(key, missing) for figures in (first, second))
            yield Total(table=table, key=key, before=old, after=new)


def _figures(audit: Audit) -> dict[str, Mapping[str, int | float | None]]:
    return {
        "wire_bytes": audit.wire_bytes,
        "count": audit.counts(),
        "time": {
            "communication": audit.communication_s,
            "exposed": audit.exposed_s,
            "compute": audit.compute_s,
            "step": audit.step_s,
        },
        "memory": {part: getattr(audit.memory, part, None) for part in _PARTS},
    }


_MATCHES: tuple[Callable[[Row], object], ...] = (
    lambda row: (row.source, row.op_name),
    lambda row: row.op_name,
    lambda row: row.source,
)
"""What rows of one site have in common, the surest first; what is empty matches nothing."""


def _sites(before: Sequence[Row], after: Sequence[Row]) -> Iterator[SiteChange]:
    pairs: list[tuple[list[Row], list[Row]]] = []
    olds, news = list(before), list(after)
    for common in _MATCHES:
        old_groups, new_groups = _grouped(olds, common), _grouped(news, common)
        both = {key for key in old_groups.keys() & new_groups.keys() if key[-1]}
        pairs += [(old_groups[key], new_groups[key]) for key in both]
        olds = [row for key, group in old_groups.items() if key not in both for row in group]
        news = [row for key, group in new_groups.items() if key not in both for row in group]
    pairs += [([], group) for group in _grouped(news, _MATCHES[0]).values()]
    pairs += [(group, []) for group in _grouped(olds, _MATCHES[0]).values()]
    place = {id(row): number for number, row in enumerate((*before, *after))}
    pairs.sort(key=lambda pair: (not pair[1], place[id((pair[1] or pair[0])[0])]))
    for old, new in pairs:
        first = (new or old)[0]
        yield SiteChange(
            kind=first.kind,
            axes=first.axes,
            dtypes=first.dtypes,
            source=first.source,
            op_name=first.op_name,
            before=_tally(old) if old else None,
            after=_tally(new) if new else None,
        )


def _grouped(
    rows: Iterable[Row], common: Callable[[Row], object]
) -> dict[tuple[object, ...], list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.axes, row.dtypes, common(row)), []).append(row)
    return groups


def _tally(rows: list[Row]) -> Tally:
    wire_bytes: Counter[str] = Counter()
    for row in rows:
        wire_bytes.update({axis: sent * row.runs for axis, sent in row.wire_bytes.items()})
    runs = [row.executions for row in rows]
    return Tally(
        number=len(rows),
        executions=None if None in runs else sum(row.runs for row in rows),
        num_bytes=sum(row.num_bytes for row in rows),
        wire_bytes=dict(wire_bytes),
        exposed_s=total_s((row.exposed_s, row.runs) for row in rows),
    )
