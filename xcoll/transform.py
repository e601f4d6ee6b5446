"""`optimize` and `explain`: the pass over a whole function."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from xcoll import _compat, graphs, marks
from xcoll.algorithms import check_choice
from xcoll.errors import XcollWarning
from xcoll.meshes import Hardware, check_topology
from xcoll.policy import Policy, check_policy
from xcoll.primitives import Region, bind, is_disabled
from xcoll.report import Report
from xcoll.rewrite import Rewriter
from xcoll.sites import Scope
from xcoll.topology import Topology

MAX_TRACES = 4
"""Traces of one function with the same arguments after which a warning is given."""


def optimize(
    fn: Callable[..., Any] | None = None,
    *,
    policy: Policy | None = None,
    topology: Topology | str | None = None,
) -> Any:
    """Returns ``fn`` with every collective planned, and rewritten where that helps.

    The collectives of ``fn``, of the functions it calls and of its derivatives (taken inside
    or outside) are found when the program is lowered, grouped, and planned for the mesh at hand.
    What the program means does not change: exact data movement and integer sums, float sums within
    ``(n - 1) u Σ|x|``, the same types. Where XLA's own collective is predicted best, the program is
    unchanged.

    Use it as ``jax.jit(xcoll.optimize(step), donate_argnums=...)``, or as a decorator, in any order
    with `jax.jit` and `jax.shard_map`. A jitted function gives a jitted function with the same
    options.

    Args:
      fn: a function of pytrees. Arrays and tracers among the arguments are traced, everything
        else is closed over. Flax NNX modules and optimizers are split, and updated in place.
        None returns a decorator.
      policy: what xcoll may do; None for the default.
      topology: what the mesh lies on: a `Topology`, its text (such as ``"2*cpu:4@200Mbit"``, read
        against the mesh), or None to read it off the devices.

    Returns:
      The function, with ``reports``: a list with one `Report` per lowering.

    Raises:
      TypeError: ``fn``, ``policy`` or ``topology`` is of a wrong type.
      ValueError: the policy names an unknown algorithm.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> @jax.jit
      ... @optimize
      ... @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      ... def total(x):
      ...     return jax.lax.psum(x, "data")
      >>> print(total(jnp.arange(4.0)))
      [6.]
    """
    policy = checked("optimize", policy, topology)
    if fn is None:
        return functools.partial(optimize, policy=policy, topology=topology)
    if isinstance(fn, Optimized) or isinstance(getattr(fn, "__wrapped__", None), Optimized):
        return fn  # Planned already: the innermost policy holds.
    if _compat.is_jitted(fn):
        return _optimize_jitted(fn, policy, topology)
    if not callable(fn):
        raise TypeError(f"optimize(fn={fn!r}): must be a function, not {type(fn).__name__}")
    return Optimized(fn, policy, topology)


def explain(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    topology: Topology | str | None = None,
    **kwargs: Any,
) -> Report:
    """Returns what `optimize` would do to ``fn``, from its traced program alone.

    Nothing is compiled or run. Collectives that differentiation from outside would add, and those
    of the partitioner under jit with shardings, are not in the traced program.

    Args:
      fn: as for `optimize`.
      *args: arguments of ``fn``; `jax.ShapeDtypeStruct` will do.
      policy: as for `optimize`.
      topology: as for `optimize`.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      The report.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> f = jax.shard_map(
      ...     lambda x: jax.lax.psum(x, "data"),
      ...     mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(),
      ... )
      >>> explain(f, jnp.arange(4.0)).summary()
      '1 collective, 0 rewritten, 1 kept'
    """
    policy = checked("explain", policy, topology)
    flat, leaves = flattened(fn, args, kwargs)
    jaxpr = jax.make_jaxpr(flat)(*leaves)
    if policy.is_lossy:
        jaxpr = marks.insert(jaxpr)
    rewriter = Rewriter(policy, Hardware(topology, jax.default_backend()))
    rewriter.run(jaxpr, Scope())
    return rewriter.report()


def flattened(fn: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Returns ``fn``, without `optimize` around it, as a function of its arrays; and these."""
    while isinstance(fn, Optimized):
        fn = fn.__wrapped__
    split = graphs.split((args, kwargs))
    leaves, rebuild = _partition(split.arrays)

    def flat(*traced: Any) -> Any:
        merged_args, merged_kwargs = split.merge(rebuild(traced))
        return split.outputs(fn(*merged_args, **merged_kwargs))

    return flat, leaves


class Planned:
    """A function, wrapped, whose collectives are planned and reported when it is lowered.

    Attributes:
      reports: one `Report` per lowering, latest last.
      policy: what xcoll may do.
      topology: what the user said of the hardware.
    """

    def __init__(self, fn: Callable[..., Any], policy: Policy, topology: Topology | str | None):
        functools.update_wrapper(self, fn, updated=())
        self.policy = policy
        self.topology = topology
        self.reports: list[Report] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; each kind of wrapper in its own way."""
        raise NotImplementedError

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds as functions do, so that methods can be decorated."""
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        bound.reports, bound.policy, bound.topology = self.reports, self.policy, self.topology
        return bound


class Optimized(Planned):
    """What `optimize` returns."""

    __wrapped__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], policy: Policy, topology: Topology | str | None):
        super().__init__(fn, policy, topology)
        self._traces: dict[Any, int] = {}
        self._last_trace: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function inside a region; traces it each time, as jax functions do."""
        if is_disabled():
            return self.__wrapped__(*args, **kwargs)
        split = graphs.split((args, kwargs))
        leaves, rebuild = _partition(split.arrays)
        self._count(leaves, rebuild)
        region = Region(self.policy, self.topology, sink=self.reports.append)

        def call(*traced: Any) -> Any:
            merged_args, merged_kwargs = split.merge(rebuild(traced))
            out = self.__wrapped__(*merged_args, **merged_kwargs)
            return split.outputs(out)

        return split.finish(bind(call, region, *leaves))

    def __repr__(self) -> str:
        return f"xcoll.optimize({getattr(self.__wrapped__, '__qualname__', self.__wrapped__)})"

    def _count(self, leaves: list[Any], rebuild: Any) -> None:
        state = get_opaque_trace_state(convention="flax")
        is_traced = any(isinstance(v, jax.core.Tracer) for v in leaves)
        if is_traced and state == self._last_trace:
            return  # One program that calls the function several times, a layer for example.
        self._last_trace = state
        shapes = tuple((np.shape(v), str(getattr(v, "dtype", type(v)))) for v in leaves)
        key = (shapes, str(rebuild.tree), repr(rebuild.closed))
        self._traces[key] = count = self._traces.get(key, 0) + 1
        if count == MAX_TRACES:
            warnings.warn(
                f"{self!r} has been traced {count} times with arguments of the same shapes; each"
                " trace and lowering costs a multiple of a step. Call it through one jax.jit:"
                " step = jax.jit(xcoll.optimize(step), donate_argnums=...)",
                XcollWarning,
                stacklevel=3,
            )


class _Rebuild:
    """Puts traced leaves and closed-over values back into their pytree."""

    def __init__(self, tree: Any, leaves: list[Any], traced: list[int]):
        self.tree, self.closed, self._traced = tree, leaves, traced

    def __call__(self, values: Any) -> Any:
        leaves = list(self.closed)
        for index, value in zip(self._traced, values, strict=True):
            leaves[index] = value
        return jax.tree.unflatten(self.tree, leaves)


def _partition(tree: Any) -> tuple[list[Any], _Rebuild]:
    leaves, treedef = jax.tree.flatten(tree)
    kinds = (jax.Array, np.ndarray, np.generic, jax.core.Tracer, jax.ShapeDtypeStruct)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    closed = [None if i in set(traced) else leaf for i, leaf in enumerate(leaves)]
    return [leaves[i] for i in traced], _Rebuild(treedef, closed, traced)


def _optimize_jitted(fn: Any, policy: Policy, topology: Topology | str | None) -> Any:
    inner = Optimized(fn.__wrapped__, policy, topology)
    jitted: Any = jax.jit(inner, **_compat.jit_options(fn))
    jitted.reports = inner.reports
    return jitted


def checked(call: str, policy: Any, topology: Any) -> Policy:
    """Returns the policy, or the default one for None, once it and the topology are checked."""
    policy = check_policy(call, policy)
    check_topology(call, topology)
    forced = dict(policy.algorithm) if policy.by_name else {"": policy.algorithm}
    for choice in forced.values():
        if choice is not None:
            check_choice(f"{call}(policy=...)", choice)
    return policy
