"""What a choice may say: the names of the algorithms, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xcoll.errors import unknown
from xcoll.policy import Choice


@dataclass(frozen=True)
class Option:
    """An integer option of an algorithm: what it is when not given, and its bounds."""

    default: int
    minimum: int
    maximum: int | None = None


OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "native": {},
    "ring": {},
    "bidirectional_ring": {},
    "recursive_doubling": {},
    "halving_doubling": {},
    "tree": {"radix": Option(2, 2, 1024)},
    "double_tree": {"num_chunks": Option(8, 1, 1024)},
    "bruck": {},
    "pairwise": {},
    "direct": {"shots": Option(2, 1, 2)},
    "torus": {},
    "hierarchical": {"num_segments": Option(1, 1, 65536)},
}
"""Options by name, of every algorithm; `xcoll.algorithms.ALGORITHMS` says what they do."""


def check_choice(call: str, choice: Choice) -> None:
    """Checks that a choice names an algorithm and its options.

    Args:
      call: how the message names the call.
      choice: what to check; its levels are checked too.

    Raises:
      ValueError: the algorithm or an option is unknown, or an option is out of bounds or there
        twice.

    >>> check_choice("psum", Choice("rng"))
    Traceback (most recent call last):
    ValueError: psum: unknown algorithm 'rng'; valid: 'native', ... Did you mean 'ring'?
    """
    if choice.name not in OPTIONS:
        raise ValueError(unknown(call, "algorithm", choice.name, OPTIONS))
    options = OPTIONS[choice.name]
    for name, value in choice.options:
        if name not in options:
            raise ValueError(unknown(call, f"option of {choice.name}", name, options))
        option = options[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{call}: {choice.name}({name}={value!r}): must be an integer")
        if value < option.minimum or (option.maximum is not None and value > option.maximum):
            most = "" if option.maximum is None else f" and at most {option.maximum}"
            raise ValueError(
                f"{call}: {choice.name}({name}={value}): must be at least {option.minimum}{most}"
            )
    if len(dict(choice.options)) < len(choice.options):
        raise ValueError(f"{call}: {choice}: an option is there twice; give each once")
    if choice.levels and choice.name != "hierarchical":
        raise ValueError(f"{call}: {choice}: only hierarchical has levels, {choice.name} has none")
    for level in choice.levels:
        if level.name == "hierarchical":
            raise ValueError(
                f"{call}: {choice}: a level cannot be hierarchical; give hierarchical more levels"
            )
        check_choice(call, level)
