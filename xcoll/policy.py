"""Policies: what a user permits or forces, as hashable data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from xcoll.errors import unknown

COLLECTIVE_OF = {
    "psum": "all_reduce",
    "pmean": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "pprod": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
    "preduce": "reduce",
    "pgather": "gather",
    "pscatter": "scatter",
}
"""jax.lax's (and xcoll's) names of collectives, and the schedules' names for the same."""


@dataclass(frozen=True)
class Choice:
    """An algorithm by name, with its options.

    Made by the functions of `xcoll.algorithms`, for example ``xcoll.algorithms.tree(radix=4)``;
    a plain string such as ``"ring"`` stands for the name without options.

    Attributes:
      name: name of the algorithm.
      options: pairs of option and integer, sorted by option.
      levels: for ``hierarchical``, the choice for each level, innermost first.
    """

    name: str
    options: tuple[tuple[str, int], ...] = ()
    levels: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        """Reads like the call that makes it.

        >>> print(Choice("tree", (("radix", 4),)))
        tree(radix=4)
        """
        inner = [str(level) for level in self.levels] + [f"{k}={v}" for k, v in self.options]
        return f"{self.name}({', '.join(inner)})" if inner else self.name


Forced = tuple[tuple[str, Choice], ...]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What xcoll may do with the collectives it finds.

    Attributes:
      algorithm: None lets the planner choose. A name or `Choice` forces one for the whole
        pass: what it cannot do is kept native, with that reason. A mapping from collective
        (jax.lax's name or the schedules') to name or `Choice` forces it for those
        collectives: what it cannot do is an error. Stored as a `Choice` or as sorted pairs.
      deterministic: float sums are ``((x0 + x1) + x2) + ...`` in rank order, whatever the
        message size and mesh layout. Where no plan can, an error.
      where: selects sites; those for which it returns False are kept. Must be hashable (a
        plain function is).
      min_bytes: sites with a smaller operand (bytes per rank) are kept.

    Raises:
      TypeError: a field has the wrong type, or ``where`` is not hashable.
      ValueError: a mapping names an unknown collective, or ``min_bytes`` is negative.

    Example:
      >>> Policy(algorithm="ring").algorithm
      Choice(name='ring', options=(), levels=())
      >>> Policy(algorithm={"psum": "tree"}).forced("psum").name
      'tree'
      >>> Policy(algorithm={"psum": "tree"}).forced("all_gather") is None
      True
    """

    algorithm: str | Choice | Mapping[str, str | Choice] | Forced | None = None
    deterministic: bool = False
    where: Callable[[Any], bool] | None = None
    min_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", _normalise(self.algorithm))
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"Policy(deterministic={self.deterministic!r}): must be True or False")
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int):
            raise TypeError(f"Policy(min_bytes={self.min_bytes!r}): must be an integer of bytes")
        if self.min_bytes < 0:
            raise ValueError(f"Policy(min_bytes={self.min_bytes}): must not be negative")
        if self.where is not None:
            if not callable(self.where):
                raise TypeError(f"Policy(where={self.where!r}): must be a function of a site")
            try:
                hash(self.where)
            except TypeError:
                raise TypeError(
                    f"Policy(where={self.where!r}): must be hashable, since the policy is part of"
                    " the compilation cache's key; pass a plain function or a frozen dataclass"
                ) from None

    @classmethod
    def native(cls) -> Self:
        """Returns the policy that keeps every collective as it is."""
        return cls(algorithm="native")

    @property
    def by_name(self) -> bool:
        """Whether the algorithm is forced per collective, so that "cannot" is an error."""
        return isinstance(self.algorithm, tuple)

    def forced(self, name: str) -> Choice | None:
        """Returns the algorithm forced for a collective.

        Args:
          name: jax.lax's name of the collective, or the schedules' name.

        Returns:
          The choice, or None where the planner is free.
        """
        if isinstance(self.algorithm, tuple):
            table = dict(self.algorithm)
            return table.get(name) or table.get(COLLECTIVE_OF.get(name, name))
        assert self.algorithm is None or isinstance(self.algorithm, Choice)
        return self.algorithm


def check_policy(call: str, policy: Policy | None) -> Policy:
    """Returns ``policy``, or the default one for None.

    Raises:
      TypeError: ``policy`` is something else.
    """
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise TypeError(
            f"{call}(policy={policy!r}): must be an xcoll.Policy or None, not"
            f" {type(policy).__name__}; to force an algorithm write Policy(algorithm=...)"
        )
    return policy


def _normalise(algorithm: object) -> Choice | Forced | None:
    if algorithm is None or isinstance(algorithm, Choice):
        return algorithm
    if isinstance(algorithm, str):
        return Choice(algorithm)
    if isinstance(algorithm, tuple):
        algorithm = dict(algorithm)
    if not isinstance(algorithm, Mapping):
        raise TypeError(
            f"Policy(algorithm={algorithm!r}): must be a name, an xcoll.algorithms choice, or a"
            " mapping from collective to one of those"
        )
    pairs = []
    if "psum" in algorithm and "pmean" in algorithm:
        raise ValueError(
            f"Policy(algorithm={algorithm!r}): a pmean is a psum in the traced program, divided"
            " afterwards; name one of them, it stands for both"
        )
    for name, value in algorithm.items():
        if name not in COLLECTIVE_OF and name not in COLLECTIVE_OF.values():
            valid = [*COLLECTIVE_OF, *sorted(set(COLLECTIVE_OF.values()) - set(COLLECTIVE_OF))]
            raise ValueError(unknown(f"Policy(algorithm={algorithm!r})", "collective", name, valid))
        choice = Choice(value) if isinstance(value, str) else value
        if not isinstance(choice, Choice):
            raise TypeError(
                f"Policy(algorithm={{{name!r}: {value!r}}}): must be a name or a choice"
            )
        pairs.append(("psum" if name == "pmean" else name, choice))
    return tuple(sorted(pairs))
