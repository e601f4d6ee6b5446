"""Flax NNX modules and optimizers among the arguments of a function.

Their mutation would be lost in a traced call: the tracer updates a copy. So graph nodes are split
into arrays and structure, merged inside, and the caller's objects are updated afterwards.
"""

from __future__ import annotations

import sys
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
        self._arguments = arguments
        self._structure, self.arrays = nnx.split(arguments)
        self._inside: Any = None
        self._out_structure: Any = None

    def merge(self, arrays: Any) -> Any:
        """Returns copies of the arguments that hold ``arrays``, for the function to mutate."""
        self._inside = self._nnx.merge(self._structure, arrays)
        return self._inside

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
        self._nnx.update(self._arguments, state)
        return out


def split(arguments: Any) -> Plain | Split:
    """Returns the arguments taken apart, by whether NNX graph nodes are among them."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not _has_nodes(arguments, nnx):
        return Plain(arguments)
    return Split(arguments, nnx)


def _has_nodes(tree: Any, nnx: Any) -> bool:
    def is_node(value: Any) -> bool:
        return isinstance(value, nnx.Module | nnx.Optimizer | nnx.Object | nnx.Variable)

    return any(is_node(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_node))
