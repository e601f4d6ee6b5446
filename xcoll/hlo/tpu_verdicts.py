"""What libtpu makes of collectives, where that differs from what was planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from xcoll.hlo.compared import (
    EQUAL,
    GATHERED,
    PADDED,
    REMOVED,
    SCATTERED,
    SHIFTED,
    SLICED,
    UNDONE,
    Item,
    Open,
    grouped,
    operands_of,
    total,
    total_bytes,
)
from xcoll.hlo.derived import TILED, is_planned_from
from xcoll.hlo.tiles import is_rounded_to, is_stored_in

_SUMS = ("all-reduce", "reduce-scatter")
_CHANGES = {
    ("all-gather", "all-reduce"): GATHERED,
    ("reduce-scatter", "all-reduce"): UNDONE,
    ("all-reduce", "reduce-scatter"): SCATTERED,
}


def sliced(left: Open) -> None:
    """Permutes on several TPU slices: pairs between slices are sent apart from those inside."""
    if left.platform != "tpu" or not any(row.transfer for row in left.rows):
        return
    for p, e in left.both(lambda item: (item.kind, item.num_bytes, item.in_unknown_loop)):
        if not p or not e or p[0].kind != "collective-permute" or _alike(p, e):
            continue
        axes = {axis for item in p for axis in item.axes or ()}
        sends = [item for item in e if item.row is not None and item.row.transfer]
        within = axes == {axis for item in e for axis in item.axes or ()}
        if within and total(sends) <= total(p) <= total(e):
            left.close(p, e, SLICED)


def _alike(p: list[Item], e: list[Item]) -> bool:
    counts: Counter[object] = Counter()
    for sign, items in ((1, p), (-1, e)):
        for item in items:
            counts[item.key] += sign * item.count
    return not any(counts.values())


@dataclass(frozen=True)
class _Unit:
    """An operation, or one of the operands of a combined one."""

    item: Item
    num_bytes: int
    runs: int


def tiled(left: Open) -> None:
    """Sums and gathers that are sent in whole tiles, or carried out as one another.

    Each operand that was emitted has a size in which the operand of the program given to XLA, of
    which the planned one is a part, may be stored.
    """
    is_open = any(item.kind in TILED for item in left.emitted)
    if left.platform != "tpu" or not is_open or not is_planned_from(left.promises, left.given):
        return
    for p, e in left.both(lambda item: (item.axes, item.in_unknown_loop, item.kind in TILED)):
        if not p or not e or p[0].kind not in TILED:
            continue
        readings = sorted(_readings(left, p, e), key=lambda found: len(found[0]) - len(found[1]))
        for planned, emitted in readings:
            pairs = _matched(left, planned, emitted)
            if pairs is not None:
                _close(left, (p, e), planned, pairs)
                break


def _readings(
    left: Open, p: Sequence[Item], e: Sequence[Item]
) -> Iterator[tuple[list[_Unit], list[_Unit]]]:
    """Yields planned and emitted operands; complex numbers may be sent in halves, or as one."""
    planned = [
        _Unit(item, item.num_bytes, item.count // item.promise.written)
        for item in p
        if item.promise is not None
        for _ in range(item.promise.written)
    ]
    operands = [_Unit(item, size, item.count) for item in e for size in operands_of(item)]
    whole = [_Unit(item, item.num_bytes, item.count) for item in e]
    joined = [
        _Unit(unit.item, 2 * unit.num_bytes, unit.runs)
        for units in _alike_units(planned)
        for unit in units[::2]
    ]
    yield planned, operands
    if any(written.is_complex for written in left.given.collectives):
        yield planned, whole
        yield joined, operands
        yield joined, whole


def _alike_units(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Returns units of one size and number of runs together."""
    found: dict[tuple[int, int], list[_Unit]] = {}
    for unit in units:
        found.setdefault((unit.num_bytes, unit.runs), []).append(unit)
    return list(found.values())


def _matched(
    left: Open, planned: list[_Unit], emitted: list[_Unit]
) -> list[tuple[_Unit, _Unit]] | None:
    """Returns a planned operand for each that was emitted, or None.

    Those that are left over have to be like one that is not.
    """
    if len(emitted) > len(planned):
        return None
    fits = [[_fits(left, p, e) for p in planned] for e in emitted]
    of: dict[int, int] = {}

    def place(i: int, tried: set[int]) -> bool:
        for j, is_possible in enumerate(fits[i]):
            if is_possible and j not in tried:
                tried.add(j)
                if j not in of or place(of[j], tried):
                    of[j] = i
                    return True
        return False

    if not all(place(i, set()) for i in range(len(emitted))):
        return None
    taken = {(planned[j].item.key, planned[j].runs) for j in of}
    if any((unit.item.key, unit.runs) not in taken for unit in planned):
        return None
    return [(planned[j], emitted[i]) for j, i in of.items()]


def _fits(left: Open, p: _Unit, e: _Unit) -> bool:
    before, after = p.item.kind, e.item.kind
    if p.runs != e.runs or (before != after and (before, after) not in _CHANGES):
        return False
    if before == after and p.num_bytes == e.num_bytes:
        return True
    sizes = left.given.axis_sizes
    own = [size for axis, size in sizes.items() if axis in (p.item.axes or ())]
    others = [size for axis, size in sizes.items() if axis not in (p.item.axes or ())]
    slots = _products([*own, *others])
    # An all-gather at the end of an all-reduce has a share of its own ranks.
    parts = slots if before == "all-gather" else _products(others)
    copies = math.prod(own) if (before, after) == ("all-gather", "all-reduce") else 1
    kinds: tuple[str, ...] = TILED if before == "all-gather" else _SUMS
    if _CHANGES.get((before, after)) == SCATTERED and not _is_gathered(left, p.item):
        kinds = ("reduce-scatter",)
    ranks = math.prod(own) if after == "reduce-scatter" else 0
    return any(
        is_stored_in(e.num_bytes, written, p.num_bytes, parts, slots, copies)
        or (ranks and is_rounded_to(e.num_bytes, written, p.num_bytes, ranks))
        for written in left.given.collectives
        if written.kind in kinds
        and (written.axes is None or written.axes.issuperset(p.item.axes or ()))
    )


def _products(sizes: Sequence[int]) -> list[int]:
    """Returns the products of some of the sizes, of none too."""
    some = [combinations(sizes, n) for n in range(len(sizes) + 1)]
    return sorted({math.prod(chosen) for choices in some for chosen in choices})


def _is_gathered(left: Open, item: Item) -> bool:
    """Whether an all-gather over the same axes is planned, as at the end of an all-reduce."""
    return any((p.kind, p.axes) == ("all-gather", item.axes) for p in left.promises)


def _close(
    left: Open,
    items: tuple[list[Item], list[Item]],
    planned: list[_Unit],
    pairs: list[tuple[_Unit, _Unit]],
) -> None:
    """Closes lines together that belong to one another."""
    p, e = items
    group = {item.key: item.key for item in p} | {item.key: item.key for item in e}
    for a, b in pairs:
        old, new = group[a.item.key], group[b.item.key]
        group = {key: new if found == old else found for key, found in group.items()}
    for name in dict.fromkeys(group.values()):
        mine = [(a, b) for a, b in pairs if group[a.item.key] == name]
        why = {
            _CHANGES.get((a.item.kind, b.item.kind), PADDED): None
            for a, b in mine
            if a.item.key[:3] != b.item.key[:3]
        }
        ours = [item for item in p if group[item.key] == name]
        theirs = [item for item in e if group[item.key] == name]
        if len(mine) < sum(group[unit.item.key] == name for unit in planned):
            why[REMOVED] = None
        left.close(ours, theirs, "; ".join(why) or EQUAL)


def shifted(left: Open) -> None:
    """Permutes that move shares of a padded reduce-scatter to where they belong without padding."""
    for e in grouped(left.emitted, lambda item: item.axes).values():
        padded = [
            line
            for line in left.lines
            if line.axes == e[0].axes and (PADDED in line.verdict or SCATTERED in line.verdict)
        ]
        room = sum(line.num_bytes * (line.emitted - line.planned) for line in padded)
        moves = [item for item in e if item.kind == "collective-permute"]
        if 0 < total_bytes(moves) <= room:
            left.close([], moves, SHIFTED)
