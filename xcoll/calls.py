"""What every functional collective checks, and how it becomes a region."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xcoll import _compat, marks
from xcoll.algorithms import check_choice, supports
from xcoll.errors import UnknownAxisError, unknown
from xcoll.permits import ALL
from xcoll.policy import COLLECTIVE_OF, Policy, check_policy
from xcoll.primitives import Region, bind, is_disabled

Axes = str | tuple[str, ...] | list[str]


class Call:
    """One call of a functional collective: its name, axes and policy, all checked.

    Args:
      name: the public function's name.
      axis_name: as the user gave it.
      policy: as the user gave it.
      collective: jax.lax's name where it differs from ``name``.
      key: the PRNG key, as the user gave it.
      takes_key: whether the function has that argument at all.

    Raises:
      UnknownAxisError: an axis is not bound, or nothing is: the call is outside shard_map.
      ValueError: an axis is repeated, the policy forces what cannot be, or needs a key.
      TypeError: the axis, the policy or the key is of a wrong type.
    """

    def __init__(
        self,
        name: str,
        axis_name: Axes,
        policy: Any,
        collective: str | None = None,
        *,
        key: Any = None,
        takes_key: bool = False,
    ):
        self.name = name
        self.axes = check_axes(name, axis_name)
        self.policy: Policy | None = None if policy is None else check_policy(name, policy)
        self.num_ranks = math.prod(jax.lax.axis_size(a) for a in self.axes)
        self._collective = COLLECTIVE_OF[collective or name]
        self.check_algorithm(collective or name)
        self._key = None if key is None else marks.check_key(name, key)
        if takes_key:
            self._check_random()

    def _check_random(self) -> None:
        """Checks that there is a key where the policy's codec needs one, and drops a needless."""
        if self.policy is None:
            return  # An `xcoll.optimize` around the call may have a policy that needs it.
        permits = self.policy.narrowed("psum" if self.name == "pmean" else self.name).permits
        random = [c for _, axis, c in permits if c and c.needs_key and axis in (ALL, *self.axes)]
        if random and self._key is None:
            raise ValueError(
                f"{self.name}(policy=...): {random[0]} rounds at random and needs a key; pass"
                f" {self.name}(..., key=jax.random.fold_in(key, step)), or rounding='nearest' to"
                " the codec"
            )
        if not random:
            self._key = None

    def check_algorithm(self, collective: str) -> None:
        """Checks that the algorithm forced for this call exists and can do it."""
        forced = self.policy.forced(collective) if self.policy else None
        if forced is None:
            return
        call = f"{self.name}(policy=Policy(algorithm={str(forced)!r}))"
        check_choice(call, forced)
        reason = supports(forced, COLLECTIVE_OF[collective])
        if reason is not None and forced.name != "native":
            raise ValueError(f"{call}: {reason}")

    def check_leaves(self, x: Any, *, numbers: bool = False, plain: bool = False) -> None:
        """Checks that ``x`` is a pytree of arrays.

        Args:
          x: the argument.
          numbers: of numbers or booleans, since they are combined.
          plain: not of extended dtypes (typed keys), whose bits are not ours to move.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            where = f"x{jax.tree_util.keystr(path)}"
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
                raise TypeError(
                    f"{self.name}: {where} is a {type(leaf).__name__}, not an array; pass arrays,"
                    " or leave it out of the pytree"
                )
            dtype = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
            if plain and jnp.issubdtype(dtype, jax.dtypes.extended):
                raise TypeError(
                    f"{self.name}: {where} has dtype {dtype}, which only jax.lax's own collectives"
                    " carry; pass jax.random.key_data(key) and wrap what comes back"
                )
            is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
            if numbers and not is_number:
                raise TypeError(
                    f"{self.name}: {where} has dtype {dtype}, which cannot be summed or compared;"
                    " only numbers and booleans can (gather or broadcast it instead)"
                )

    def check_dimension(self, x: Any, dimension: int, argument: str, extra: int = 0) -> None:
        """Checks that ``dimension`` is one of every leaf's, of which there are ``extra`` more."""
        if isinstance(dimension, bool) or not isinstance(dimension, int | np.integer):
            raise TypeError(f"{self.name}({argument}={dimension!r}): must be an integer")
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            ndim = np.ndim(leaf) + extra
            if not -ndim <= dimension < ndim:
                raise ValueError(
                    f"{self.name}({argument}={dimension}): out of range for"
                    f" x{jax.tree_util.keystr(path)} of shape {np.shape(leaf)}; valid: {-ndim} to"
                    f" {ndim - 1}"
                )

    def check_divides(
        self, x: Any, dimension: int, argument: str, tiled: bool, num_ranks: int
    ) -> None:
        """Checks that every leaf can be cut along ``dimension``, one piece a rank."""
        self.check_dimension(x, dimension, argument)
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            size = np.shape(leaf)[dimension]
            if tiled and size % num_ranks:
                rule = f"must be a multiple of the {num_ranks} ranks over {self.axes}; pad it"
            elif not tiled and size != num_ranks:
                rule = f"must be the {num_ranks} ranks over {self.axes}; or pass tiled=True"
            else:
                continue
            raise ValueError(
                f"{self.name}({argument}={dimension}, tiled={tiled}): dimension {dimension} of"
                f" x{jax.tree_util.keystr(path)} of shape {np.shape(leaf)} has {size} elements; it"
                f" {rule}"
            )

    def run(self, fn: Callable[[Any], Any], x: Any) -> Any:
        """Returns ``fn(x)`` with its collectives planned by the call's policy.

        Without a policy the call is part of the code around it: an `xcoll.optimize` there plans it
        together with its neighbours, else it is XLA's own. Where no leaf is traced there is
        nothing to communicate, and jax.lax folds constants.
        """
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
        if is_traced and self._key is not None and not is_disabled():
            fn = partial(_keyed, fn, self._key)
        if self.policy is None or not is_traced or is_disabled():
            return fn(x)
        return bind(fn, Region(self.policy, strict=self._collective), x)


def _keyed(fn: Callable[[Any], Any], key: jax.Array, x: Any) -> Any:
    return fn(marks.keyed(x, key))


def check_axes(name: str, axis_name: Any) -> tuple[str, ...]:
    """Returns the axes as a tuple, each bound and named once.

    Raises:
      UnknownAxisError: an axis is not bound, or nothing is.
      ValueError: an axis is repeated.
      TypeError: it is not a name or a tuple of names.
    """
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    bound = _compat.bound_axes()
    for axis in axes:
        try:
            known = axis in bound
        except TypeError:
            raise TypeError(
                f"{name}(axis_name={axis_name!r}): must be an axis name or a tuple of them"
            ) from None
        if not known and not bound:
            raise UnknownAxisError(
                f"{name}(axis_name={axis_name!r}): called outside jax.shard_map, where no mesh axis"
                " is bound; call it in the function given to jax.shard_map"
            )
        if not known:
            raise UnknownAxisError(
                unknown(f"{name}(axis_name={axis_name!r})", "mesh axis", axis, bound)
            )
    if len(set(axes)) < len(axes):
        repeated = next(a for i, a in enumerate(axes) if a in axes[:i])
        raise ValueError(
            f"{name}(axis_name={axis_name!r}): axis {repeated!r} is repeated; name each axis once"
        )
    return axes
