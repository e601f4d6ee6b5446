"""The codecs by name, and from the data that a plan keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from xcoll.codecs.base import Codec
from xcoll.codecs.block_int4 import Int4, int4
from xcoll.codecs.block_int8 import Int8, int8
from xcoll.codecs.casting import CASTS, Cast, cast
from xcoll.codecs.fixed import FixedPoint
from xcoll.codecs.plain import Plain
from xcoll.errors import unknown

CODECS: dict[str, Codec] = {
    "int8": int8(),
    "int4": int4(),
    **{dtype: cast(dtype) for dtype in CASTS},
}
"""The codecs that have a name, with their default options."""

KINDS = {"int8": Int8, "int4": Int4, "cast": Cast, "fixed_point": FixedPoint, "plain": Plain}
"""The classes of codecs, by `Codec.kind`."""


def named(name: str) -> Codec:
    """Returns the codec of that name, with its default options.

    Args:
      name: a key of `CODECS`.

    Raises:
      ValueError: there is no such codec; the message lists them.

    Example:
      >>> named("int8") == int8()
      True
    """
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(unknown(f"codecs.named({name!r})", "codec", name, CODECS))
    return CODECS[name]


def from_dict(data: Mapping[str, Any]) -> Codec:
    """Returns the codec that ``dataclasses.asdict`` was called on.

    Args:
      data: ``kind`` and every field of that kind, as read from JSON.

    Raises:
      ValueError: a field is missing, unknown or has a bad value.

    Example:
      >>> import dataclasses
      >>> from_dict(dataclasses.asdict(int4(block=32))) == int4(block=32)
      True
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"codecs.from_dict({data!r}): must be a mapping of fields")
    call = f"codecs.from_dict({dict(data)!r})"
    rest = dict(data)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(unknown(call, "kind", kind, KINDS))
    cls = KINDS[kind]
    names = [f.name for f in fields(cls) if f.init]
    for name in rest:
        if name not in names:
            raise ValueError(unknown(call, "field", name, names))
    for name in names:
        if name not in rest:
            raise ValueError(f"{call}: field {name!r} is missing")
    try:
        return cls(**rest)
    except TypeError as error:
        raise ValueError(f"{call}: {error}") from error
