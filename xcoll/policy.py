"""Policies: what a user permits or forces, as hashable data."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from xcoll.codecs import Codec
from xcoll.errors import unknown
from xcoll.names import COLLECTIVE_OF as COLLECTIVE_OF
from xcoll.permits import ALL, Permits, Permitted, permits


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

LOSSY_MIN_BYTES = 64 << 10
"""Payloads under this stay exact unless the policy says otherwise: the loss, norms, statistics."""


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
      min_bytes: sites with a smaller operand (bytes per rank) are kept. By default none are, but
        those under 64 KiB stay exact; a number is the limit for codecs too.
      codec: permits lossy transport. A codec of `xcoll.codecs` (or its name) for all axes; a
        mapping from mesh axis, or from collective, to a codec or None; a collective's value may
        be a mapping from axis again. Used where that is predicted to be 10 % faster than XLA's
        own collective, and wherever the algorithm is forced. Stored as sorted triples of
        collective, axis (empty: all) and codec.
      max_error: permits every codec whose plan keeps ``|error| <= max_error * sum over ranks of the
        block's largest magnitude``, in every block, but for what is smaller than a normal number of
        the payload's dtype. With ``codec``, a limit on its plans.
      over_budget: where no plan keeps ``max_error``: ``"error"`` raises, naming the best bound;
        ``"exact"`` goes on without a codec.
      accumulate: ``"float32"`` sums bfloat16 and float16 in float32 and rounds once, at the wire
        bytes of the narrow type.
      backward_codec: as ``codec``, for the collectives that differentiating the code from outside
        adds. By default these are exact.
      kernels: use the Pallas kernels of `xcoll_kernels` on TPU and GPU where they take the shape.

    Raises:
      TypeError: a field has the wrong type, or ``where`` is not hashable.
      ValueError: a mapping names an unknown collective or codec, ``min_bytes`` is negative, or
        ``max_error`` is not positive.

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
    min_bytes: int | None = None
    codec: Permitted = None
    max_error: float | None = None
    over_budget: str = "error"
    accumulate: str | None = None
    backward_codec: Permitted = None
    kernels: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", _normalise(self.algorithm))
        for name in ("codec", "backward_codec"):
            object.__setattr__(self, name, permits(f"Policy({name}=...)", getattr(self, name)))
        for name in ("deterministic", "kernels"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Policy({name}={getattr(self, name)!r}): must be True or False")
        _check_numbers(self)
        if self.max_error is not None:
            object.__setattr__(self, "max_error", float(self.max_error))
        for name, valid in (("over_budget", ("error", "exact")), ("accumulate", (None, "float32"))):
            given = getattr(self, name)
            if not isinstance(given, str | None) or given not in valid:
                raise ValueError(f"Policy({name}={given!r}): must be one of {valid}")
        if self.deterministic and self.is_lossy:
            raise ValueError(
                "Policy(deterministic=True) with a codec or max_error: sums in rank order are of"
                " exact terms; for the same bits in any order use codec=codecs.fixed_point(16)"
            )
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

    @property
    def is_lossy(self) -> bool:
        """Whether any collective may lose precision on the wire."""
        return bool(self.codec or self.backward_codec) or self.max_error is not None

    def codecs(self) -> Iterator[Codec]:
        """Yields every codec of the policy."""
        for entries in (self.codec, self.backward_codec):
            assert entries is None or isinstance(entries, tuple)
            yield from (codec for _, _, codec in entries or () if codec is not None)

    @property
    def permits(self) -> Permits:
        """What ``codec`` was normalised to: triples of collective, axis and codec."""
        assert self.codec is None or isinstance(self.codec, tuple)
        return self.codec or ()

    def lossy_min_bytes(self) -> int:
        """Returns the bytes under which payloads stay exact."""
        return LOSSY_MIN_BYTES if self.min_bytes is None else self.min_bytes

    def narrowed(self, name: str) -> Policy:
        """Returns what the policy says of one collective: a choice, codecs by axis, the rest.

        Args:
          name: jax.lax's name of the collective, or the schedules' name.
        """
        names = ("", name, COLLECTIVE_OF.get(name, name))
        by_axis: dict[str, Codec | None] = {}
        # Entries of a collective stand behind those of all, and so have the last word; one for all
        # its axes replaces what was said of single axes.
        for collective, axis, codec in self.permits:
            if collective in names:
                if axis == ALL and collective:
                    by_axis.clear()
                by_axis[axis] = codec
        entries = tuple((ALL, axis, codec) for axis, codec in by_axis.items())
        return replace(self, algorithm=self.forced(name), codec=entries or None)

    def codec_over(self, axes: tuple[str, ...]) -> Codec | None:
        """Returns the codec that a narrowed policy has for traffic over axes: all must agree."""
        by_axis = {axis: codec for _, axis, codec in self.permits}
        found = {by_axis.get(axis, by_axis.get(ALL)) for axis in axes}
        return found.pop() if len(found) == 1 else None

    def exact(self) -> Policy:
        """Returns the policy without codecs."""
        return replace(self, codec=None, backward_codec=None, max_error=None)

    def derived(self) -> Policy:
        """Returns the policy for collectives that differentiation from outside has added."""
        return replace(self.exact(), codec=self.backward_codec)


def _check_numbers(policy: Policy) -> None:
    least, budget = policy.min_bytes, policy.max_error
    if least is not None and (isinstance(least, bool) or not isinstance(least, int)):
        raise TypeError(f"Policy(min_bytes={least!r}): must be an integer of bytes")
    if least is not None and least < 0:
        raise ValueError(f"Policy(min_bytes={least}): must not be negative")
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise TypeError(f"Policy(max_error={budget!r}): must be a number, such as 0.01")
    if not 0 < budget <= sys.float_info.max:
        raise ValueError(
            f"Policy(max_error={budget}): must be positive and finite: the error allowed, as a"
            " fraction of the sum over ranks of a block's largest magnitude"
        )


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
