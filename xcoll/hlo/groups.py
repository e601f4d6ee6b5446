"""Which devices a collective connects: every way that XLA prints groups and pairs."""

from __future__ import annotations

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?= \{|$))?(?: \{(.*)\})?$")
_MESH_AXIS = re.compile(r"'?([^',=\s]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


def parse_groups(text: str, num_devices: int) -> Groups:
    """Reads a ``replica_groups`` attribute.

    Args:
      text: as printed: lists, the iota form or the form over mesh axes.
      num_devices: devices of the program; an empty list means all of them in one group.

    Returns:
      Groups of device numbers, each in the order of its ranks.

    Raises:
      ValueError: the form is none of those.

    >>> parse_groups("{{0,2},{1,3}}", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['x'=2,'y'=2] {'x'}", 4)
    ((0, 2), (1, 3))
    """
    text = text.strip()
    if text == "{}":
        return (tuple(range(num_devices)),)
    if text.startswith("{"):
        return parse_lists(text)
    if match := _IOTA.fullmatch(text):
        return _groups(_iota(match[2], match[3]).reshape(_ints(match[1])))
    if match := _MESH.fullmatch(text):
        return _mesh_groups(match[1], match[2], match[3] or "")
    raise ValueError(f"hlo: unknown form of replica groups: {text!r}")


def parse_lists(text: str) -> Groups:
    """Reads ``{{0,1},{2,3}}``: replica groups as lists, or ``source_target_pairs``."""
    return tuple(_ints(inner) for inner in re.findall(r"\{([\d,\s]+)\}", text))


def parse_transfer_target(text: str) -> tuple[Groups | None, Pairs | None]:
    """Reads the target of a transfer between TPU slices.

    Args:
      text: ``{{100000->200000},...}`` (pairs) or ``{{100000,200000},...}`` (groups), of device ids;
        or ``"{1,2}x{0:3}"``: each device of a slice, from 0 to 3, with its like in slices 0 and 1.

    Returns:
      Groups and pairs, one of them None, of device ids (100000 * (slice + 1) + number in it).

    Raises:
      ValueError: the form is none of those.

    >>> parse_transfer_target('"{1,2}x{0:1}"')
    (((100000, 200000), (100001, 200001)), None)
    """
    text = text.strip().strip('"')
    if "->" in text:
        return None, tuple((int(a), int(b)) for a, b in re.findall(r"(\d+)\s*->\s*(\d+)", text))
    if match := re.fullmatch(r"\{([\d,:]+)\}x\{([\d,:]+)\}", text):
        slices, numbers = _ranges(match[1]), _ranges(match[2])
        return tuple(tuple(100_000 * s + d for s in slices) for d in numbers), None
    if re.fullmatch(r"\{(\{[\d,\s]+\},?\s*)+\}", text):
        return parse_lists(text), None
    raise ValueError(f"hlo: unknown form of a transfer's target: {text!r}")


def _mesh_groups(axes_text: str, ids_text: str | None, groups_text: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes_text)}
    ids = np.arange(math.prod(sizes.values()))
    if ids_text and ids_text.startswith("["):
        shape, _, order = ids_text.partition("]")
        ids = _iota(shape[1:], order[2:-1] or None)
    elif ids_text:
        ids = np.array(_ints(ids_text))
    # Each axis becomes (before, part, after) so that a group over a part of an axis,
    # 'a':(before)part, is a group over a whole dimension like any other.
    grouped = [
        (axis, int(before or 1), int(part or sizes[axis]))
        for axis, before, part in _GROUP_AXIS.findall(groups_text)
    ]
    dims: list[int] = []
    where: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for _, before, part in sorted(g for g in grouped if g[0] == name):
            dims.append(before // done)
            where[name, before] = len(dims)
            dims.append(part)
            done = before * part
        dims.append(size // done)
    last = [where[name, before] for name, before, _ in grouped]
    first = [i for i in range(len(dims)) if i not in last]
    length = math.prod(dims[i] for i in last)
    return _groups(ids.reshape(dims).transpose(first + last).reshape(-1, length))


def _iota(dims: str, order: str | None) -> np.ndarray:
    array = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return array.transpose(_ints(order)).reshape(-1) if order else array.reshape(-1)


def _groups(array: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in array)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.split(",") if i.strip())


def _ranges(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
