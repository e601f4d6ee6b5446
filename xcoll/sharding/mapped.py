"""What a logical name maps to: no mesh axis, one, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from xcoll.errors import unknown

Axes = None | str | tuple[str, ...]
"""What users write: None, a mesh axis, or a tuple of them, the first outermost."""

_INSTEAD = {
    "sequence": "inner_sequence",
    "embed": "activation_embed",
    "mlp": "activation_mlp",
    "heads": "activation_heads",
    "kv_heads": "activation_kv_heads",
    "vocab": "activation_vocab",
}
"""Names of the presets that an activation may use where the first one's axis is taken."""


def normalised(call: str, name: str, axes: Any) -> Axes:
    """Returns mesh axes in their one form: None, a name, or a tuple of two or more.

    Raises:
      TypeError: they are something else.
      ValueError: one is empty, or there twice.
    """
    several = tuple(axes) if isinstance(axes, tuple | list) else (axes,) if axes is not None else ()
    if not all(isinstance(axis, str) for axis in several):
        raise TypeError(
            f"{call}({name}={axes!r}): must be a mesh axis such as 'data', a tuple of mesh axes, or"
            " None"
        )
    if not all(several) or len(set(several)) < len(several):
        raise ValueError(f"{call}({name}={axes!r}): must name each mesh axis once, none empty")
    return several if len(several) > 1 else several[0] if several else None


def as_tuple(axes: Axes) -> tuple[str, ...]:
    """Returns mesh axes as a tuple."""
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def check_names(call: str, names: Any) -> tuple[Any, ...]:
    """Returns logical names, one for each dimension, as a tuple.

    Raises:
      TypeError: they are no tuple, or hold something else than names and None.
    """
    if not isinstance(names, tuple | list | PartitionSpec):
        raise TypeError(
            f"{call}: the names {names!r} must be a tuple with a logical name, or None, for each"
            " dimension, such as ('batch', 'embed')"
        )
    for name in names:
        if not (name is None or isinstance(name, str) or name is PartitionSpec.UNCONSTRAINED):
            raise TypeError(
                f"{call}: the names {tuple(names)!r} hold {name!r}; each must be a logical name or"
                " None; where several mesh axes split one dimension, map its name to their tuple"
            )
    return tuple(names)


def mapped(rules: Mapping[str, Axes], names: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Returns what each dimension is split over, and what is wrong with that, as sentences."""
    entries: list[Any] = []
    wrong: list[str] = []
    taken: dict[str, int] = {}
    for position, name in enumerate(names):
        if not isinstance(name, str):
            entries.append(name)
            continue
        if name not in rules:
            wrong.append(_unknown_name(rules, name))
            entries.append(None)
            continue
        entries.append(rules[name])
        for axis in as_tuple(rules[name]):
            if axis in taken:
                wrong.append(_taken_twice(rules, names, axis, taken[axis], position))
            taken.setdefault(axis, position)
    return entries, wrong


def _unknown_name(rules: Mapping[str, Axes], name: str) -> str:
    text = unknown(f"dimension {name!r}", "logical name", name, rules)
    if name in {axis for axes in rules.values() for axis in as_tuple(axes)}:
        return f"{text} It is a mesh axis: add rules.extend({{{name!r}: {name!r}}}) to name it so."
    return f"{text} Add it with rules.extend({{{name!r}: None}}), or with mesh axes for None."


def _taken_twice(
    rules: Mapping[str, Axes], names: Sequence[Any], axis: str, first: int, second: int
) -> str:
    text = (
        f"names {tuple(names)!r} use mesh axis {axis!r} twice, for dimension {first}"
        f" ({names[first]!r}) and dimension {second} ({names[second]!r}); an axis splits one"
        " dimension only"
    )
    for position in (second, first):
        instead = _INSTEAD.get(names[position], "")
        if instead in rules and axis not in as_tuple(rules[instead]):
            return f"{text}; name dimension {position} {instead!r} if this is an activation"
    return f"{text}; write None for one of them, or map its name elsewhere"
