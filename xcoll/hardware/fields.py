"""Checks of what users write: numbers, words, and names with few valid values."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from xcoll.errors import unknown

LARGEST = 2**62
"""The largest number that is taken; what is made of them still fits a float."""


def whole(call: str, name: str, value: Any, least: int, most: int = LARGEST) -> int:
    """Returns ``value`` as an integer; a float without a fraction, such as 25e6, is one.

    Raises:
      TypeError: it is no number.
      ValueError: it has a fraction, or is out of range.

    >>> whole("Link", "bandwidth_bytes_per_s", 25e6, 1)
    25000000
    """
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or _is_index(value)):
        raise TypeError(
            f"{call}({name}={value!r}): must be a whole number of at least {least}, such as 25 or"
            " 25e6"
        )
    if not _is_index(value) and not float(value).is_integer():
        raise ValueError(
            f"{call}({name}={value!r}): must be a whole number; round it to one of at least {least}"
        )
    number = int(value)
    if not least <= number <= most:
        bounds = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{call}({name}={_short(number)}): must be {bounds}")
    return number


def word(call: str, name: str, value: Any, *, empty: bool = False) -> str:
    """Returns ``value``, a string.

    Raises:
      TypeError: it is none.
      ValueError: it is empty, and must not be.
    """
    if not isinstance(value, str):
        raise TypeError(f"{call}({name}={value!r}): must be a string")
    if not value and not empty:
        raise ValueError(f"{call}({name}={value!r}): must not be empty")
    return value


def one_of(call: str, name: str, value: Any, valid: Iterable[str]) -> str:
    """Returns ``value``, one of the valid strings.

    Raises:
      TypeError: it is no string.
      ValueError: it is another; the valid ones and the nearest are named.
    """
    valid = tuple(valid)
    if word(call, name, value, empty=True) not in valid:
        # difflib tells cases apart, and the commonest slip is a case.
        near = f" Did you mean {value.lower()!r}?" if value.lower() in valid else ""
        raise ValueError(unknown(call, name, value, valid) + near)
    return str(value)


def many(call: str, name: str, value: Any, kind: type | None = None) -> tuple[Any, ...]:
    """Returns ``value``, a tuple or list, as a tuple; of one type where ``kind`` is given.

    Raises:
      TypeError: it is none, or holds something else.
    """
    of = f" of {kind.__name__}" if kind else ""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{call}({name}={value!r}): must be a tuple{of}")
    for item in value:
        if kind is not None and not isinstance(item, kind):
            raise TypeError(f"{call}({name}=...): must be a tuple{of}; it holds {item!r}")
    return tuple(value)


def axis_sizes(call: str, axes: Any) -> dict[str, int]:
    """Returns mesh axes and sizes, checked.

    Raises:
      TypeError: it is no mapping from names to integers.
      ValueError: a size is less than one.
    """
    if not isinstance(axes, Mapping):
        raise TypeError(
            f"{call}: axes={axes!r} must be a mapping from axis to size, such as"
            " {'host': 2, 'device': 4}"
        )
    for name, size in axes.items():
        if not isinstance(name, str):
            raise TypeError(f"{call}: axis {name!r} must be a string")
        if isinstance(size, bool) or not _is_index(size):
            raise TypeError(f"{call}: axis {name!r} has size {size!r}; write an integer, such as 8")
        if not 1 <= int(size) <= LARGEST:
            raise ValueError(
                f"{call}: axis {name!r} has size {_short(int(size))}; it must be at least 1, and"
                f" at most {LARGEST}"
            )
    return {name: int(size) for name, size in axes.items()}


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _short(number: int) -> str:
    # str() refuses integers of thousands of digits.
    return str(number) if abs(number) < 10**30 else f"an integer of {number.bit_length()} bits"
