"""Flax NNX modules and optimizers among the arguments of a function.

Their mutation would be lost in a traced call: the tracer updates a copy. So graph nodes are split
into arrays and structure, merged inside, and the caller's objects are updated afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from xcoll.errors import UnsupportedError


class Plain:
    """Arguments without graph nodes: nothing to do."""

    def __init__(self, arguments: Any):
        self.arrays = arguments

    def merge(self, arrays: Any) -> Any:
        """Returns the arguments for the function."""
        return arrays

    def outputs(self, out: Any) -> Any:
        """Returns what the traced call shall return."""
        return out

    def finish(self, result: Any) -> Any:
        """Returns what the caller gets."""
        return result


class Split:
    """Arguments with graph nodes: arrays outside, structure here."""

    def __init__(self, arguments: Any, nnx: Any):
        self._nnx = nnx
        leaves, self._tree = jax.tree.flatten(arguments, is_leaf=_is_leaf(nnx))
        self._is_node = [_is_node(nnx)(leaf) for leaf in leaves]
        pairs = list(zip(leaves, self._is_node, strict=True))
        self._nodes = tuple(leaf for leaf, is_node in pairs if is_node)
        # Split together, so that what is shared between arguments stays shared.
        self._structure, state = nnx.split(self._nodes)
        self.arrays = (state, [leaf for leaf, is_node in pairs if not is_node])
        self._inside: Any = None

    def merge(self, arrays: Any) -> Any:
        """Returns copies of the arguments that hold ``arrays``, for the function to mutate."""
        state, others = arrays
        self._inside = self._nnx.merge(self._structure, state)
        nodes, rest = iter(self._inside), iter(others)
        leaves = [next(nodes) if is_node else next(rest) for is_node in self._is_node]
        return jax.tree.unflatten(self._tree, leaves)

    def outputs(self, out: Any) -> Any:
        """Returns the result and the state of the arguments after the call, as arrays."""
        structure, state = self._nnx.split(self._inside)
        if structure != self._structure:
            raise UnsupportedError(
                "xcoll.optimize: the function changes the structure of an NNX argument (it adds,"
                " removes or replaces variables or modules), which a traced call cannot hand back;"
                " make them before the call, or put nnx.jit around: nnx.jit(xcoll.optimize(step))"
            )
        if _has_nodes(out, self._nnx):
            raise UnsupportedError(
                "xcoll.optimize: the function returns an NNX module; return its state"
                " (nnx.state(module)), or mutate the argument and return nothing"
            )
        return out, state

    def finish(self, result: Any) -> Any:
        """Updates the caller's objects, and returns the function's result."""
        out, state = result
        self._nnx.update(self._nodes, state)
        return out


def split(arguments: Any) -> Plain | Split:
    """Returns the arguments taken apart, by whether NNX graph nodes are among them."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not _has_nodes(arguments, nnx):
        return Plain(arguments)
    return Split(arguments, nnx)


def _is_node(nnx: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, nnx.Module | nnx.Optimizer | nnx.Object | nnx.Variable)


def _is_leaf(nnx: Any) -> Callable[[Any], bool]:
    # What nnx.split gives, a State, is a pytree of arrays although it is made of variables.
    is_node = _is_node(nnx)
    return lambda value: is_node(value) or isinstance(value, nnx.State)


def _has_nodes(tree: Any, nnx: Any) -> bool:
    return any(map(_is_node(nnx), jax.tree.leaves(tree, is_leaf=_is_leaf(nnx))))
