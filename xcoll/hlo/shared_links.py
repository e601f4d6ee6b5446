"""Whether two transfers of a program use the same links."""

from __future__ import annotations

from xcoll.hlo.reader import Collective


def share_links(one: Collective, other: Collective, *, torus: bool) -> bool:
    """Says whether two transfers that are in flight together slow each other down.

    Behind one port, as on GPU, all do. On a torus, where each neighbour has a link of its own, two
    do not

    * where one goes between TPU slices and the other stays in a slice;
    * where one is a send between slices and the other a recv: links carry both ways at once;
    * where they are permutes and no device sends to the same in both: the two directions of a ring;
    * where no two devices are connected by both: groups along different mesh axes.

    What could not be read shares.

    Args:
      one: a row of `xcoll.hlo.collectives`.
      other: another of the same program.
      torus: whether they run on TPU.
    """
    if not torus:
        return True
    if (one.transfer is None) != (other.transfer is None) or {one.kind, other.kind} == {
        "send",
        "recv",
    }:
        return False
    if one.pairs is not None and other.pairs is not None:
        return not set(one.pairs).isdisjoint(other.pairs)
    if not (one.pairs or one.groups) or not (other.pairs or other.groups):
        return True
    if one.pairs is None and other.pairs is None:
        return _meet(one, other)
    permute, grouped = (one, other) if one.pairs is not None else (other, one)
    group = _group_of(grouped)
    return any(group.get(a, -1) == group.get(b, -2) for a, b in permute.pairs or ())


def _group_of(row: Collective) -> dict[int, int]:
    return {device: n for n, group in enumerate(row.groups or ()) for device in group}


def _meet(one: Collective, other: Collective) -> bool:
    """Says whether two devices are in one group in both."""
    first, second = _group_of(one), _group_of(other)
    seen: set[tuple[int, int]] = set()
    for device in first.keys() & second.keys():
        both = first[device], second[device]
        if both in seen:
            return True
        seen.add(both)
    return False
