"""The programs that are timed: each one operation, on all devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from xcoll.calibration.families import CHAIN, OVERLAP, Family
from xcoll.codecs.table import named


class Programs:
    """Programs on a mesh, with the arrays they run on; both are made once.

    Args:
      mesh: the mesh.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self.mesh = mesh
        self._spec = jax.P(mesh.axis_names)
        self._arrays: dict[int, jax.Array] = {}
        self._calls: dict[tuple[Family, int], Callable[[], Any]] = {}

    def call(self, family: Family, num_bytes: int) -> Callable[[], Any]:
        """Returns what runs an operation, compiled; its result is to be waited for."""
        key = (family, num_bytes)
        if key not in self._calls:
            x = self._array(num_bytes // 4)
            if family.kind == "decode":
                encode = self._sharded(_body(Family(kind="encode", axes=(), of=family.of), 1, 1))
                x = jax.jit(encode)(x)
            body = _body(family, self._num_ranks(family.axes), num_bytes // 4, self.mesh.axis_names)
            compiled = jax.jit(self._sharded(body)).lower(x).compile()
            self._calls[key] = lambda: compiled(x)
        return self._calls[key]

    def _sharded(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=self._spec, out_specs=self._spec, check_vma=False
        )

    def _num_ranks(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _array(self, elements: int) -> jax.Array:
        """Returns float32 values, so many on each device; none is a subnormal number."""
        if elements not in self._arrays:
            sharding = jax.NamedSharding(self.mesh, self._spec)
            values = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
            self._arrays[elements] = jax.make_array_from_callback(
                (elements * self.mesh.size,), sharding, lambda _: values
            )
        return self._arrays[elements]


def _body(
    family: Family, num_ranks: int, elements: int, names: tuple[str, ...] = ()
) -> Callable[[jax.Array], Any]:
    """Returns what one device does to its own payload."""
    kind, axes = family.kind, family.axes
    if kind in OVERLAP:
        return _overlap(family, names)
    if kind in ("chain", "lone"):
        return lambda x: _chain(x, names, family)
    if family.pairs:
        return lambda x: lax.ppermute(x, names, family.pairs)
    if kind == "all_reduce":
        return lambda x: lax.psum(x, axes)
    if kind == "reduce_scatter":
        return lambda x: lax.psum_scatter(x, axes, tiled=True)
    if kind == "all_gather":
        return lambda x: lax.all_gather(x, axes, tiled=True)
    if kind == "all_to_all":
        return lambda x: lax.all_to_all(x.reshape(num_ranks, -1), axes, 0, 0).reshape(-1)
    if kind in ("launch", "copy"):
        return lambda x: x + 1
    if kind == "sum":
        # What is added up lies apart, as in a fold.
        return lambda x: x[: x.size // 2] + x[x.size // 2 :]
    codec = named(family.of)
    platform = jax.default_backend()
    if kind == "encode":
        return lambda x: codec.encode(x[None], dtype="float32", platform=platform).reshape(-1)
    assert kind == "decode", kind
    return lambda wire: codec.decode(
        wire.reshape(1, -1), elements, dtype="float32", platform=platform
    ).reshape(-1)


def _chain(x: jax.Array, names: tuple[str, ...], family: Family) -> jax.Array:
    there = family.pairs
    # What one device brought to another, that one sends back.
    back = [(to, of) for of, to in there] if family.kind == "lone" else there
    for number in range(CHAIN):
        x = x + lax.ppermute(x, names, back if number % 2 else there)
    return x


_WIRE_PART = 8
_NUM_ENCODINGS = 4


def _overlap(family: Family, names: tuple[str, ...]) -> Callable[[jax.Array], Any]:
    """Returns a permute of a part of the payload, encodings of all of it, or both."""
    encode = _body(Family(kind="encode", axes=(), of="int8"), 1, 1)

    def wire(x: jax.Array) -> Any:
        return lax.ppermute(x[: x.size // _WIRE_PART], names, family.pairs)

    def work(x: jax.Array) -> Any:
        return [encode(x * (1 + number)) for number in range(_NUM_ENCODINGS)]

    found: Any = {"wire": wire, "work": work, "both": lambda x: (wire(x), work(x))}[family.kind]
    return cast(Callable[[jax.Array], Any], found)
