"""Records that were written as JSON, read back by the types of their fields."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from xcoll import codecs
from xcoll.codecs import Codec
from xcoll.errors import unknown


def decode[T](
    call: str, what: str, text: str, version: int, make: Callable[[dict[str, Any]], T]
) -> T:
    """Returns what JSON text holds: an object that says its version.

    Args:
      call: the public function, for the message.
      what: what is expected, for the message.
      text: the JSON.
      version: the one that ``make`` reads.
      make: makes it of the other fields; raises TypeError or ValueError where they are wrong.

    Raises:
      ValueError: no JSON, no object, another version, or what ``make`` said.
    """
    try:
        data = json.loads(text)
        found = data.pop("version", None) if isinstance(data, dict) else None
        if not is_version(found, version):
            raise ValueError(f"an object with 'version': {version} is expected")
        return make(data)
    except (ValueError, TypeError) as err:
        raise ValueError(f"{call}: not {what}: {err}") from err
    except RecursionError:
        raise ValueError(f"{call}: the text is nested too deeply") from None


def is_version(found: Any, version: int) -> bool:
    """Returns whether decoded JSON is a version's number.

    >>> is_version(1, 1), is_version(2, 1), is_version(True, 1), is_version(1.0, 1)
    (True, False, False, False)
    """
    return type(found) is int and found == version


def read(kind: Any, value: Any, where: str) -> Any:
    """Returns decoded JSON as a value of a type.

    Args:
      kind: a data class, a tuple or a dict of such, str, int, float, bool, a codec, or one of these
        or None. Numbers must not be negative, and finite.
      value: what `json.loads` returned.
      where: what is read, for the message.

    Raises:
      ValueError: a field is missing, unknown, or has a wrong value.

    Example:
      >>> read(tuple[int, ...], [1, 2], "sizes")
      (1, 2)
    """
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: an object is expected, not {value!r}")
        types = _types(kind)
        for key in value:
            if key not in types:
                raise ValueError(unknown(where, "field", key, types))
        for key in types:
            if key not in value:
                raise ValueError(f"{where}: {key!r} is missing")
        return kind(**{k: read(t, value[k], f"{where}.{k}") for k, t in types.items()})
    inner = get_args(kind)
    if Codec in inner:
        return None if value is None else codecs.from_dict(value)
    if type(None) in inner and (is_dataclass(inner[0]) or get_origin(inner[0])):
        return None if value is None else read(inner[0], value, where)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: an object is expected, not {value!r}")
        return {k: read(inner[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: a list is expected, not {value!r}")
        if inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        if len(inner) != len(value):
            raise ValueError(f"{where}: {len(inner)} items are expected, not {value!r}")
        pairs = enumerate(zip(inner, value, strict=True))
        return tuple(read(t, v, f"{where}[{i}]") for i, (t, v) in pairs)
    # By type(), since a bool is no integer here.
    if type(value) not in (inner or (kind,)):
        names = " or ".join(t.__name__ for t in inner or (kind,))
        raise ValueError(f"{where}: {names} is expected, not {value!r}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{where}: must not be negative, but is {value}")
    if isinstance(value, float) and not 0 <= value < math.inf:
        raise ValueError(f"{where}: must be finite and not negative, but is {value}")
    return value


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
