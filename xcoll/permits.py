"""Which codec a policy permits where: from what users write to sorted triples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcoll import codecs
from xcoll.codecs import Codec
from xcoll.errors import unknown
from xcoll.names import COLLECTIVE_OF

ALL = ""
"""Stands for all collectives, or all axes."""

Permits = tuple[tuple[str, str, Codec | None], ...]
"""Collective, axis and codec; a codec of None keeps what it names exact."""

Permitted = Codec | str | Mapping[str, Any] | Permits | None
"""What users may write."""


def permits(call: str, value: Permitted) -> Permits | None:
    """Returns the triples that a value stands for.

    Args:
      call: as errors name it, e.g. ``"Policy(codec=...)"``.
      value: a codec or its name, a mapping from axis or collective to one or None (a collective's
        may be a mapping from axis), what this function returned, or None.

    Raises:
      TypeError: a value is no codec; for a compressor, the right place is named.
      ValueError: a name is unknown; the valid ones are listed.

    Example:
      >>> [(collective, axis) for collective, axis, _ in permits("f", {"dcn": "int8"})]
      [('', 'dcn')]
      >>> [(collective, axis) for collective, axis, _ in permits("f", {"psum": "int8"})]
      [('psum', '')]
    """
    if isinstance(value, tuple):
        value = _nested(call, value)
    if value is None:
        return None
    if isinstance(value, Mapping) and "psum" in value and "pmean" in value:
        raise ValueError(
            f"{call}: {dict(value)!r} names psum and pmean; a pmean is a psum in the traced"
            " program, divided afterwards: name one of them, it stands for both"
        )
    entries = tuple(sorted(_entries(call, value), key=lambda entry: entry[:2]))
    if not any(codec is not None for _, _, codec in entries):
        return None
    return entries


def _nested(call: str, triples: tuple[Any, ...]) -> Mapping[str, Any]:
    nested: dict[str, dict[str, Any]] = {}
    for triple in triples:
        if not isinstance(triple, tuple) or len(triple) != 3 or not isinstance(triple[0], str):
            raise TypeError(
                f"{call}: {triples!r} is no codec; use one of xcoll.codecs, or its name, or a"
                " mapping from mesh axis or collective to one, as in {'data': 'int8'}"
            )
        collective, axis, codec = triple
        nested.setdefault(collective, {})[axis] = codec
    return nested


def _entries(call: str, value: Any) -> Iterator[tuple[str, str, Codec | None]]:
    if not isinstance(value, Mapping):
        yield ALL, ALL, _codec(call, value)
        return
    for key, inner in value.items():
        _check_key(call, key, "a mesh axis or a collective")
        if key in _COLLECTIVES or (key == ALL and isinstance(inner, Mapping)):
            by_axis = inner if isinstance(inner, Mapping) else {ALL: inner}
            # A pmean is a psum in the traced program, divided afterwards.
            collective = "psum" if key == "pmean" else key
            for axis, codec in by_axis.items():
                _check_key(call, axis, f"a mesh axis, within {key!r}")
                yield collective, axis, _codec(call, codec)
        elif isinstance(inner, Mapping):
            raise TypeError(
                f"{call}: {key!r} is no collective, so that its value must be a codec, not"
                f" {dict(inner)!r}; collectives stand outside:"
                f" {{'psum': {{{key!r}: 'int8'}}}}"
            )
        else:
            yield ALL, key, _codec(call, inner)


def _check_key(call: str, key: object, of: str) -> None:
    if not isinstance(key, str):
        raise TypeError(f"{call}: key {key!r} must be the name of {of}")


_COLLECTIVES = frozenset(COLLECTIVE_OF) | frozenset(COLLECTIVE_OF.values())


def _codec(call: str, value: Any) -> Codec | None:
    if value is None or isinstance(value, Codec):
        return value
    if isinstance(value, str):
        if value not in codecs.CODECS:
            raise ValueError(unknown(call, "codec", value, codecs.CODECS))
        return codecs.named(value)
    if hasattr(value, "init") and hasattr(value, "apply"):
        raise TypeError(
            f"{call}: {value!r} is a compressor, which keeps state; give it to"
            " xcoll.gradients.sync(axis_name, compressor=...)"
        )
    raise TypeError(
        f"{call}: {value!r} is no codec; use one of xcoll.codecs, for example codecs.int8(), or"
        f" its name: {', '.join(codecs.CODECS)}"
    )
