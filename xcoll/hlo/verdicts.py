"""How operations that were planned and operations that were emitted compare, and why they differ.

Each rule closes what it can show to be right: what is left over at the end is not explained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xcoll.hlo.promised import Promise
from xcoll.hlo.rows import Row

EQUAL = "equal"
COMBINED = "combined by XLA"
SPLIT = "split by XLA"
SLICED = "split by the TPU compiler: between slices, and inside"
PADDED = "padded by the TPU compiler to whole tiles"
UNDONE = "a reduce-scatter, undone by the TPU compiler"
SCATTERED = "an all-reduce and its slice, made a reduce-scatter by XLA"
CARRIED = "carried twice as wide by XLA:CPU"
REMOVED = "merged with another, or removed, by XLA"
LOOP = "in a loop whose length only one side knows"
ADDED = "added by the partitioner"
OTHER_END = "the other end of a send"
NOTHING = "sends nothing"
UNCERTAIN = "kept; its bytes were not planned"
NOT_EXPLAINED = "not explained"
UNREAD = "not explained: the program does not show what it sends"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Operations of one kind, over the same axes and of the same size: planned and emitted.

    Attributes:
      kind: HLO name; for transfers between TPU slices, that of the collective they carry out.
      axes: mesh axes; None where they could not be read.
      num_bytes: bytes of one operation's operands, per device.
      planned: executions in one run of the program, as planned.
      emitted: executions in one run of the compiled program.
      in_unknown_loop: they stand in a loop of unknown length, and count once.
      verdict: ``"equal"``, or why they differ.
      rows: the instructions, as the audit names them.
      sources: ``file:line`` of the sites that were planned.
    """

    kind: str
    axes: tuple[str, ...] | None
    num_bytes: int
    planned: int
    emitted: int
    in_unknown_loop: bool
    verdict: str
    rows: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One promise, or one row."""

    kind: str
    axes: tuple[str, ...] | None
    num_bytes: int
    count: int
    in_unknown_loop: bool
    promise: Promise | None = None
    row: Row | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.kind, self.axes, self.num_bytes, self.in_unknown_loop


class _Open:
    """What is planned and emitted and not yet compared; closing turns it into lines."""

    def __init__(self, planned: Sequence[Promise], rows: Sequence[Row], platform: str):
        self.platform, self.rows = platform, rows
        self.lines: list[Compared] = []
        self.planned = [
            _Item(
                kind=p.kind,
                axes=p.axes,
                num_bytes=p.num_bytes,
                count=p.count,
                in_unknown_loop=p.in_unknown_loop,
                promise=p,
            )
            for p in planned
        ]
        self.emitted = [
            _Item(
                kind="recv" if row.kind == "recv" else row.transfer or row.kind,
                axes=row.axes,
                num_bytes=row.num_bytes,
                count=row.runs,
                in_unknown_loop=row.executions is None,
                row=row,
            )
            for row in rows
        ]

    def close(self, planned: Sequence[_Item], emitted: Sequence[_Item], verdict: str) -> None:
        gone = {id(item) for item in (*planned, *emitted)}
        self.planned = [item for item in self.planned if id(item) not in gone]
        self.emitted = [item for item in self.emitted if id(item) not in gone]
        for items in _grouped((*planned, *emitted), lambda item: item.key).values():
            kind, axes, num_bytes, in_unknown_loop = items[0].key
            rows = [item.row.name for item in items if item.row is not None]
            sources = [item.promise.source for item in items if item.promise is not None]
            self.lines.append(
                Compared(
                    kind=kind,
                    axes=axes,
                    num_bytes=num_bytes,
                    planned=_total(item for item in items if item.promise is not None),
                    emitted=_total(item for item in items if item.row is not None),
                    in_unknown_loop=in_unknown_loop,
                    verdict=verdict,
                    rows=tuple(rows),
                    sources=tuple(dict.fromkeys(sources)),
                )
            )

    def both(self, key: Callable[[_Item], Hashable]) -> list[tuple[list[_Item], list[_Item]]]:
        """Returns what is open with equal keys, planned and emitted."""
        planned, emitted = _grouped(self.planned, key), _grouped(self.emitted, key)
        keys = dict.fromkeys((*planned, *emitted))
        return [(planned.get(k, []), emitted.get(k, [])) for k in keys]


def compared(
    planned: Sequence[Promise],
    rows: Sequence[Row],
    platform: str,
    is_as_lowered: Callable[[], bool],
) -> tuple[Compared, ...]:
    """Compares promises with rows; each of them is in exactly one line.

    Args:
      planned: what was planned.
      rows: what was emitted.
      platform: what it was compiled for.
      is_as_lowered: says whether the program that XLA was given has as many operations of each
        kind as were planned; asked where the compiled program has fewer.
    """
    left = _Open(planned, rows, platform)
    for rule in (
        _nothing,
        _sliced,
        _equal,
        _other_ends,
        _added,
        _uncertain,
        _loops,
        _carried,
        _turned,
        _resized,
    ):
        rule(left)
    for p, e in left.both(lambda item: item.key):
        if e and e[0].axes is None:
            left.close(p, e, UNREAD)
        elif _total(p) > _total(e) and is_as_lowered():
            left.close(p, e, REMOVED)
        else:
            left.close(p, e, NOT_EXPLAINED)
    return tuple(left.lines)


def _sliced(left: _Open) -> None:
    """Permutes on several TPU slices: pairs between slices are sent apart from those inside."""
    if left.platform != "tpu" or not any(row.transfer for row in left.rows):
        return
    for p, e in left.both(lambda item: (item.kind, item.num_bytes, item.in_unknown_loop)):
        if not p or not e or p[0].kind != "collective-permute" or _alike(p, e):
            continue
        axes = {axis for item in p for axis in item.axes or ()}
        sends = [item for item in e if item.row is not None and item.row.transfer]
        within = axes == {axis for item in e for axis in item.axes or ()}
        if within and _total(sends) <= _total(p) <= _total(e):
            left.close(p, e, SLICED)


def _equal(left: _Open) -> None:
    for p, e in left.both(lambda item: item.key):
        own = [i for i in e if i.row is not None and i.row.made_by != "partitioner"]
        for emitted in (e, own):
            if _total(p) == _total(emitted):
                left.close(p, emitted, EQUAL)
                break


def _other_ends(left: _Open) -> None:
    sent: dict[Hashable, int] = {}
    for row in left.rows:
        if row.kind == "send":
            sent[row.transfer, row.axes] = sent.get((row.transfer, row.axes), 0) + row.runs
    ends = [item for item in left.emitted if item.kind == "recv"]
    for e in _grouped(ends, _sent_by).values():
        if _total(e) == sent.get(_sent_by(e[0])):
            left.close([], e, OTHER_END)


def _sent_by(item: _Item) -> Hashable:
    assert item.row is not None
    return item.row.transfer, item.axes


def _nothing(left: _Open) -> None:
    left.close([], [item for item in left.emitted if item.axes == ()], NOTHING)


def _added(left: _Open) -> None:
    found = [i for i in left.emitted if i.row is not None and i.row.made_by == "partitioner"]
    left.close([], found, ADDED)


def _uncertain(left: _Open) -> None:
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        kept = [item for item in p if item.promise is not None and not item.promise.is_certain]
        if kept and _total(kept) == _total(e):
            left.close(kept, e, UNCERTAIN)


def _loops(left: _Open) -> None:
    for p, e in left.both(lambda item: item.key[:3]):
        known_p, known_e = ([i for i in items if not i.in_unknown_loop] for items in (p, e))
        only_p = len(known_p) < len(p) and len(known_e) == len(e) > 0
        only_e = len(known_e) < len(e) and len(known_p) == len(p) > 0
        # What is known on both sides has to leave room for what one of them does not know.
        if (only_p and _total(known_p) <= _total(e)) or (only_e and _total(known_e) <= _total(p)):
            left.close(p, e, LOOP)


def _carried(left: _Open) -> None:
    if left.platform == "cpu":
        _pairs(
            left,
            lambda i: (i.kind, i.axes, 2 * i.num_bytes, i.in_unknown_loop),
            lambda i: i.key if i.row and {*i.row.dtypes} <= {"f32", "f16"} else None,
            CARRIED,
        )


def _turned(left: _Open) -> None:
    _turn(left, "all-reduce", "reduce-scatter", SCATTERED)
    if left.platform == "tpu":
        _turn(left, "reduce-scatter", "all-reduce", UNDONE)


def _turn(left: _Open, kind: str, other: str, verdict: str) -> None:
    def planned_key(item: _Item) -> Hashable | None:
        return (other, *item.key[1:]) if item.kind == kind else None

    _pairs(left, planned_key, lambda item: item.key, verdict)


def _resized(left: _Open) -> None:
    for p, e in left.both(lambda item: (item.kind, item.axes, item.in_unknown_loop)):
        before, after = _bytes(p), _bytes(e)
        if not p or not e:
            continue
        if before == after:
            left.close(p, e, COMBINED if _total(e) <= _total(p) else SPLIT)
        elif (
            left.platform == "tpu"
            and _total(e) <= _total(p)
            # At most, each element becomes a tile of 8 x 128.
            and before < after <= 1024 * before
            and all(_is_tiled(item.row) for item in e if item.row is not None)
        ):
            left.close(p, e, PADDED)


def _is_tiled(row: Row) -> bool:
    return all(dims and dims[-1] % 128 == 0 for _, dims in row.operands)


def _pairs(
    left: _Open,
    planned_key: Callable[[_Item], Hashable | None],
    emitted_key: Callable[[_Item], Hashable | None],
    verdict: str,
) -> None:
    """Closes planned and emitted items whose keys, both not None, and numbers are equal."""
    planned, emitted = _grouped(left.planned, planned_key), _grouped(left.emitted, emitted_key)
    for key, p in planned.items():
        e = emitted.get(key, [])
        if key is not None and e and _total(p) == _total(e):
            left.close(p, e, verdict)


def _alike(p: list[_Item], e: list[_Item]) -> bool:
    counts: dict[Any, int] = {}
    for sign, items in ((1, p), (-1, e)):
        for item in items:
            counts[item.key] = counts.get(item.key, 0) + sign * item.count
    return not any(counts.values())


def _grouped(
    items: Iterable[_Item], key: Callable[[_Item], Hashable]
) -> dict[Hashable, list[_Item]]:
    found: dict[Hashable, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _total(items: Iterable[_Item]) -> int:
    return sum(item.count for item in items)


def _bytes(items: Iterable[_Item]) -> int:
    return sum(item.num_bytes * item.count for item in items)
