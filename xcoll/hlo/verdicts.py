"""Why what was planned and what was emitted differ.

Each rule closes what it can show to be right: what is left over at the end is not explained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

from xcoll.hlo.compared import (
    ADDED,
    CARRIED,
    COMBINED,
    CUT,
    EQUAL,
    LOOP,
    NOT_EXPLAINED,
    NOTHING,
    OTHER_END,
    PADDED,
    REMOVED,
    SHIFTED,
    SLICED,
    UNCERTAIN,
    UNDONE,
    UNREAD,
    Compared,
    Item,
    Open,
    grouped,
    operands_of,
    runs_of,
    total,
    total_bytes,
)
from xcoll.hlo.promised import Given, Promise
from xcoll.hlo.rows import Row


def compared(
    planned: Sequence[Promise],
    rows: Sequence[Row],
    platform: str,
    given: Given,
) -> tuple[Compared, ...]:
    """Compares promises with rows; each of them is in exactly one line.

    Args:
      planned: what was planned.
      rows: what was emitted.
      platform: what it was compiled for.
      given: the program that XLA was given.
    """
    left = Open(planned, rows, platform, given)
    for rule in (
        _nothing,
        _sliced,
        _equal,
        _other_ends,
        _added,
        _uncertain,
        _loops,
        _carried,
        _undone,
        _resized,
        _shifted,
        _cut,
        _removed,
    ):
        rule(left)
    left.close([], [item for item in left.emitted if item.axes is None], UNREAD)
    left.close(left.planned, left.emitted, NOT_EXPLAINED)
    return tuple(left.lines)


def _sliced(left: Open) -> None:
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


def _equal(left: Open) -> None:
    for p, e in left.both(lambda item: item.key):
        own = [i for i in e if i.row is not None and i.row.made_by != "partitioner"]
        for emitted in (e, own):
            if total(p) == total(emitted):
                left.close(p, emitted, EQUAL)
                break


def _other_ends(left: Open) -> None:
    sent: dict[Hashable, int] = {}
    for row in left.rows:
        if row.kind == "send":
            sent[row.transfer, row.axes] = sent.get((row.transfer, row.axes), 0) + row.runs
    ends = [item for item in left.emitted if item.kind == "recv"]
    for e in grouped(ends, _sent_by).values():
        if total(e) == sent.get(_sent_by(e[0])):
            left.close([], e, OTHER_END)


def _sent_by(item: Item) -> Hashable:
    assert item.row is not None
    return item.row.transfer, item.axes


def _nothing(left: Open) -> None:
    left.close([], [item for item in left.emitted if item.axes == ()], NOTHING)


def _added(left: Open) -> None:
    """What the partitioner has made: by its name, or nameless over axes that no plan uses."""
    planned = {axis for promise in left.promises for axis in promise.axes}
    found = []
    for item in left.emitted:
        assert item.row is not None
        is_nameless = item.row.made_by == "unknown"
        is_apart = is_nameless and item.axes is not None and planned.isdisjoint(item.axes)
        if item.row.made_by == "partitioner" or (is_apart and left.given.is_partitioned):
            found.append(item)
    left.close([], found, ADDED)


def _uncertain(left: Open) -> None:
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        kept = [item for item in p if item.promise is not None and not item.promise.is_certain]
        if kept and total(kept) == total(e):
            left.close(kept, e, UNCERTAIN)


def _loops(left: Open) -> None:
    for p, e in left.both(lambda item: item.key[:3]):
        known_p, known_e = ([i for i in items if not i.in_unknown_loop] for items in (p, e))
        only_p = len(known_p) < len(p) and len(known_e) == len(e) > 0
        only_e = len(known_e) < len(e) and len(known_p) == len(p) > 0
        # What is known on both sides has to leave room for what one of them does not know.
        if (only_p and total(known_p) <= total(e)) or (only_e and total(known_e) <= total(p)):
            left.close(p, e, LOOP)


def _carried(left: Open) -> None:
    def planned_key(item: Item) -> Hashable | None:
        is_given = left.given.writes(item.kind, item.num_bytes) > 0
        return (
            (item.kind, item.axes, 2 * item.num_bytes, item.in_unknown_loop) if is_given else None
        )

    if left.platform == "cpu":
        _pairs(
            left,
            planned_key,
            lambda i: i.key if i.row and {*i.row.dtypes} <= {"f32", "f16"} else None,
            CARRIED,
        )


def _undone(left: Open) -> None:
    def planned_key(item: Item) -> Hashable | None:
        return ("all-reduce", *item.key[1:]) if item.kind == "reduce-scatter" else None

    def emitted_key(item: Item) -> Hashable | None:
        return None if _is_given(left, item, ("all-reduce",)) else item.key

    if left.platform == "tpu":
        _pairs(left, planned_key, emitted_key, UNDONE)


def _resized(left: Open) -> None:
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        before, after = total_bytes(p), total_bytes(e)
        if not p or not e:
            continue
        # An operation made of several has the operands of each; libtpu sends them as one.
        parts = sum(len(operands_of(item)) * item.count for item in e)
        is_sent = any(item.row is not None and item.row.transfer for item in e)
        if before == after and total(e) <= total(p) and (is_sent or total(p) <= parts):
            left.close(p, e, COMBINED)
        elif (
            left.platform == "tpu"
            and total(e) <= total(p)
            # At most, each element becomes a tile of 8 x 128.
            and before < after <= 1024 * before
            and not any(_is_given(left, item, _SUMS) for item in e)
            and all(_is_tiled(item.row) for item in e if item.row is not None)
        ):
            left.close(p, e, PADDED)


def _shifted(left: Open) -> None:
    """Permutes that move shares of a padded reduce-scatter to where they belong without padding."""
    for e in grouped(left.emitted, lambda item: item.axes).values():
        padded = [line for line in left.lines if line.verdict == PADDED and line.axes == e[0].axes]
        room = sum(line.num_bytes * (line.emitted - line.planned) for line in padded)
        moves = [item for item in e if item.kind == "collective-permute"]
        if 0 < total_bytes(moves) <= room:
            left.close([], moves, SHIFTED)


def _cut(left: Open) -> None:
    """Operands of which the partitioner leaves each device a part, in the program given to XLA.

    A plan knows of that only where it is written near the collective.
    """
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        if not p or not e or not left.given.is_partitioned:
            continue
        others = [size for a, size in left.given.axis_sizes.items() if a not in (p[0].axes or ())]
        parts = {
            math.prod(some) for n in range(len(others) + 1) for some in combinations(others, n)
        }
        planned = sorted(size for item in p for size in [item.num_bytes] * item.count)
        emitted = sorted(size for item in e for size in operands_of(item) * item.count)
        if len(planned) == len(emitted) and all(
            one and whole % one == 0 and whole // one in parts
            for whole, one in zip(planned, emitted, strict=True)
        ):
            left.close(p, e, CUT)


def _removed(left: Open) -> None:
    """Operations of which the program given to XLA has as many as planned, and XLA's fewer.

    Those that are left run as often as planned.
    """
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        planned = grouped(p, lambda item: item.key)
        fewer = all(
            runs_of(items) <= runs_of(planned.get(key, []))
            for key, items in grouped(e, lambda item: item.key).items()
        )
        if p and fewer and all(_is_written(left, item.kind, item.num_bytes) for item in p):
            left.close(p, e, REMOVED)


_SUMS = ("all-reduce", "reduce-scatter")


def _is_given(left: Open, item: Item, alike: Sequence[str]) -> bool:
    """Whether the program given to XLA has more of this size than are planned.

    Then the size is no work of the compiler's.

    Args:
      left: all that is compared.
      item: what was emitted.
      alike: kinds that count as one.
    """
    kinds = alike if item.kind in alike else (item.kind,)
    planned = [
        p.written for p in left.promises if p.kind in kinds and p.num_bytes == item.num_bytes
    ]
    return sum(left.given.writes(kind, item.num_bytes) for kind in kinds) > sum(planned)


def _is_written(left: Open, kind: str, num_bytes: int) -> bool:
    alike = [p.written for p in left.promises if (p.kind, p.num_bytes) == (kind, num_bytes)]
    return left.given.writes(kind, num_bytes) == sum(alike)


def _is_tiled(row: Row) -> bool:
    return all(dims and dims[-1] % 128 == 0 for _, dims in row.operands)


def _pairs(
    left: Open,
    planned_key: Callable[[Item], Hashable | None],
    emitted_key: Callable[[Item], Hashable | None],
    verdict: str,
) -> None:
    """Closes planned and emitted items whose keys, both not None, and numbers are equal."""
    planned, emitted = grouped(left.planned, planned_key), grouped(left.emitted, emitted_key)
    for key, p in planned.items():
        e = emitted.get(key, [])
        if key is not None and e and total(p) == total(e):
            left.close(p, e, verdict)


def _alike(p: list[Item], e: list[Item]) -> bool:
    counts: dict[Any, int] = {}
    for sign, items in ((1, p), (-1, e)):
        for item in items:
            counts[item.key] = counts.get(item.key, 0) + sign * item.count
    return not any(counts.values())
