"""Operations that were planned and operations that were emitted, until each has its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xcoll.hlo.promised import Given, Promise
from xcoll.hlo.rows import Row
from xcoll.hlo.text import num_bytes

EQUAL = "equal"
COMBINED = "combined by XLA"
SLICED = "split by the TPU compiler: between slices, and inside"
PADDED = "padded by the TPU compiler to whole tiles"
UNDONE = "a reduce-scatter, undone by the TPU compiler"
SCATTERED = "planned as an all-reduce: the TPU compiler scatters the shares"
GATHERED = "an all-gather, carried out as an all-reduce by the TPU compiler"
SHIFTED = "moves padded shares into place (the TPU compiler)"
CARRIED = "carried twice as wide by XLA:CPU"
CUT = "cut over axes that are the partitioner's"
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
class Item:
    """One promise, or one row: exactly one of them is not None."""

    kind: str
    axes: tuple[str, ...] | None
    num_bytes: int
    count: int
    in_unknown_loop: bool
    promise: Promise | None = None
    row: Row | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes items one line."""
        return self.kind, self.axes, self.num_bytes, self.in_unknown_loop


class Open:
    """What is planned and emitted and not yet compared; closing turns it into lines.

    Args:
      planned: all promises.
      rows: all rows of the audit.
      platform: what the program was compiled for.
      given: the program that XLA was given.
    """

    def __init__(
        self, planned: Sequence[Promise], rows: Sequence[Row], platform: str, given: Given
    ):
        self.platform, self.given = platform, given
        self.rows, self.promises = rows, planned
        self.lines: list[Compared] = []
        self.planned = [
            Item(
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
            Item(
                kind="recv" if row.kind == "recv" else row.transfer or row.kind,
                axes=row.axes,
                num_bytes=row.num_bytes,
                count=row.runs,
                in_unknown_loop=row.executions is None,
                row=row,
            )
            for row in rows
        ]

    def close(self, planned: Sequence[Item], emitted: Sequence[Item], verdict: str) -> None:
        """Makes lines of open items, with one verdict for all of them."""
        gone = {id(item) for item in (*planned, *emitted)}
        self.planned = [item for item in self.planned if id(item) not in gone]
        self.emitted = [item for item in self.emitted if id(item) not in gone]
        for items in grouped((*planned, *emitted), lambda item: item.key).values():
            kind, axes, num_bytes, in_unknown_loop = items[0].key
            rows = [item.row.name for item in items if item.row is not None]
            sources = [item.promise.source for item in items if item.promise is not None]
            self.lines.append(
                Compared(
                    kind=kind,
                    axes=axes,
                    num_bytes=num_bytes,
                    planned=total(item for item in items if item.promise is not None),
                    emitted=total(item for item in items if item.row is not None),
                    in_unknown_loop=in_unknown_loop,
                    verdict=verdict,
                    rows=tuple(rows),
                    sources=tuple(dict.fromkeys(sources)),
                )
            )

    def both(self, key: Callable[[Item], Hashable]) -> list[tuple[list[Item], list[Item]]]:
        """Returns what is open with equal keys, planned and emitted."""
        planned, emitted = grouped(self.planned, key), grouped(self.emitted, key)
        keys = dict.fromkeys((*planned, *emitted))
        return [(planned.get(k, []), emitted.get(k, [])) for k in keys]


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Hashable, list[Item]]:
    """Returns items by a key, in their order."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def total(items: Iterable[Item]) -> int:
    """Returns how many operations items are."""
    return sum(item.count for item in items)


def total_bytes(items: Iterable[Item]) -> int:
    """Returns the operand bytes of all of them."""
    return sum(item.num_bytes * item.count for item in items)


def runs_of(items: Sequence[Item]) -> Counter[int]:
    """Returns how many operations run so often."""
    runs: Counter[int] = Counter()
    for item in items:
        number = 1 if item.promise is None else item.promise.written
        runs[item.count // number] += number
    return runs


def operands_of(item: Item) -> list[int]:
    """Returns the bytes of each operand of a row; of a promise nothing."""
    return [] if item.row is None else [num_bytes(*operand) for operand in item.row.operands]
