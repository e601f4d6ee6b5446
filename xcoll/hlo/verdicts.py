"""Why what was planned and what was emitted differ.

Each rule closes what it can show to be right: what is left over at the end is not explained.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import combinations

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
    REMOVED,
    UNCERTAIN,
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
from xcoll.hlo.derived import TILED
from xcoll.hlo.promised import Given, Promise
from xcoll.hlo.rows import Row
from xcoll.hlo.tpu_verdicts import shifted, sliced, tiled


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
        sliced,
        _equal,
        _other_ends,
        _added,
        _uncertain,
        _loops,
        _carried,
        tiled,
        _resized,
        shifted,
        _cut,
        _removed,
    ):
        rule(left)
    left.close([], [item for item in left.emitted if item.axes is None], UNREAD)
    left.close(left.planned, left.emitted, NOT_EXPLAINED)
    return tuple(left.lines)


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
        is_apart = is_apart and not left.given.writes(item.kind, item.num_bytes)
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
    """16-bit permutes, as float32; of those in the program, XLA may have merged or removed some."""

    def key(item: Item) -> Hashable:
        wider = item.num_bytes * (1 if item.row else 2)
        return item.kind, item.axes, wider, item.in_unknown_loop

    for p, e in left.both(key) if left.platform == "cpu" else []:
        if not p or not all(item.row and {*item.row.dtypes} <= {"f32", "f16"} for item in e):
            continue
        if not all(left.given.writes(item.kind, item.num_bytes) for item in p):
            continue
        if total(p) == total(e):
            left.close(p, e, CARRIED)
        elif e and runs_of(e) <= runs_of(p) and _is_written(left, p[0].kind, p[0].num_bytes):
            left.close(p, e, f"{CARRIED}; {REMOVED}")


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


def _cut(left: Open) -> None:
    """Operands of which the partitioner leaves each device a part, in the program given to XLA.

    A plan knows of that only where it is written near the collective.
    """
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        if not p or not e or not left.given.is_partitioned:
            continue
        if not all(left.given.writes(item.kind, item.num_bytes, left.platform) for item in p):
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
        # What is open beside them may be what they have become.
        is_other = p and any(
            (item.axes, item.in_unknown_loop) == (p[0].axes, p[0].in_unknown_loop)
            and {item.kind, p[0].kind} <= {*TILED}
            and item.kind != p[0].kind
            for item in left.emitted
        )
        if (
            p
            and fewer
            and not is_other
            and all(_is_written(left, item.kind, item.num_bytes) for item in p)
        ):
            left.close(p, e, REMOVED)


def _is_written(left: Open, kind: str, num_bytes: int) -> bool:
    alike = [p.written for p in left.promises if (p.kind, p.num_bytes) == (kind, num_bytes)]
    return left.given.writes(kind, num_bytes, left.platform) == sum(alike)
