"""The codecs by name."""

from __future__ import annotations

from xcoll.codecs.base import Codec
from xcoll.codecs.block_int4 import int4
from xcoll.codecs.block_int8 import int8
from xcoll.codecs.casting import cast
from xcoll.errors import unknown

CODECS: dict[str, Codec] = {
    "int8": int8(),
    "int4": int4(),
    "bfloat16": cast("bfloat16"),
}
"""The codecs that have a name, with their default options."""


def named(name: str) -> Codec:
    """Returns the codec of that name, with its default options.

    Raises:
      ValueError: there is no such codec.

    Example:
      >>> named("int8") == int8()
      True
    """
    if name not in CODECS:
        raise ValueError(unknown(f"codec {name!r}", "codec", name, CODECS))
    return CODECS[name]
