"""How the tests of gradient compression run steps, and what residuals they read off the state."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xcoll import codecs, gradients

U32 = 2.0**-24
"""Largest relative error of one rounding to float32."""

COMPRESSORS = {
    "int8": gradients.error_feedback(codecs.int8()),
    "int8 stochastic": gradients.error_feedback(codecs.int8(rounding="stochastic")),
    "int4": gradients.error_feedback(codecs.int4()),
    "bfloat16": gradients.error_feedback(codecs.cast("bfloat16")),
    "sign": gradients.sign(),
    "top_k": gradients.top_k(0.05),
    "random_k": gradients.random_k(0.1),
    "powersgd": gradients.powersgd(2),
}
"""Every compressor, so that a new one inherits every law."""

SHAPES = {"a": (37,), "b": (16, 24), "c": (1,), "d": (), "e": (61, 7), "f": (0, 3)}
"""Vectors, matrices, a scalar, one element, primes, nothing."""

CASES = [(1, True), (3, False), (5, True), (8, False)]
"""Numbers of ranks, with and without varying-axes types."""

SLOW_TO_COMPILE = ("int8 stochastic", "bfloat16")
"""Compressors that share their code with others: fewer cases of them."""


@dataclass
class Steps:
    """What a number of steps did.

    Attributes:
      applied: by leaf, ``(steps, ranks, ...)``: the update as each rank has it.
      state: the state after the last step, NumPy arrays.
      largest: largest magnitude that any residual had after any step.
    """

    applied: dict[str, np.ndarray]
    state: Any
    largest: float = field(default=0.0)


def run_steps(
    transformation: Any,
    grads: dict[str, np.ndarray],
    mesh: jax.sharding.Mesh,
    *,
    check_vma: bool = True,
    state: Any = None,
) -> Steps:
    """Runs ``update`` once for each leading index of ``grads``, ``(steps, ranks, ...)``.

    The steps are a scan inside one jitted `jax.shard_map`, whose state is donated.
    """
    if state is None:
        params = {k: jnp.zeros(v.shape[2:], v.dtype) for k, v in grads.items()}
        state = transformation.init(params)
    specs = gradients.state_specs(state)
    flat, structure = jax.tree.flatten(specs, is_leaf=lambda s: isinstance(s, jax.P))
    run = _runner(transformation, mesh, check_vma, structure, tuple(flat))
    updates, state, largest = run(grads, state)
    return Steps(
        applied=jax.tree.map(np.asarray, updates),
        state=jax.tree.map(np.asarray, state),
        largest=float(np.max(largest)),
    )


@functools.lru_cache(maxsize=8)
def _runner(transformation: Any, mesh: Any, check_vma: bool, structure: Any, flat: Any) -> Any:
    """Returns the jitted steps; the same for the same transformation, to compile once."""
    axes = mesh.axis_names
    specs = jax.tree.unflatten(structure, flat)

    def body(grads: Any, state: Any) -> Any:
        def step(state: Any, own: Any) -> Any:
            updates, state = transformation.update(jax.tree.map(lambda g: g[0], own), state)
            sizes = [jnp.max(jnp.abs(r), initial=0) for r in residual_leaves(state)]
            largest = jnp.max(jnp.stack([jnp.float32(0), *sizes]))
            updates = jax.tree.map(lambda u: as_varying(u, axes)[None], updates)
            return state, (updates, as_varying(largest, axes)[None])

        state, (updates, largest) = jax.lax.scan(step, state, grads)
        return updates, state, largest

    spec = jax.P(None, axes)
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(spec, specs),
            out_specs=(spec, specs, spec),
            check_vma=check_vma,
        ),
        donate_argnums=1,
    )


def as_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def residual_leaves(state: Any) -> list[Any]:
    found = []
    for bucket in getattr(state, "buckets", ()):
        found += [r.value for r in (bucket.contributed, bucket.reduced) if r is not None]
    return found


def residual_of(state: Any, names: list[str]) -> dict[str, np.ndarray]:
    """Returns, in float64 and by leaf, what the ranks of all axes together have not sent.

    Only for axes in the order exact, then compressed.
    """
    found = {}
    for bucket in state.buckets:
        layout = bucket.layout
        sizes = dict(layout.axes)
        shards = math.prod(sizes[a] for a in layout.exact)
        ranks = math.prod(sizes[a] for a in layout.compressed)
        contributed = np.float64(bucket.contributed.value).reshape(shards, ranks, -1).sum(1)
        rows = contributed
        if bucket.reduced is not None:
            rows = rows + np.float64(bucket.reduced.value).reshape(shards, -1)
        found.update(_by_leaf(rows, layout, names))
    return found


def _by_leaf(rows: np.ndarray, layout: Any, names: list[str]) -> dict[str, np.ndarray]:
    """Cuts ``(shards, elements)`` into leaves: side by side, or each cut by rows of a matrix."""
    shards = len(rows)
    total = sum(math.prod(s) for s in layout.shapes)
    if not layout.by_rows:
        width = -(-total // shards)
        flat, start, found = rows[:, :width].reshape(-1), 0, {}
        for leaf, shape in zip(layout.leaves, layout.shapes, strict=True):
            end = start + math.prod(shape)
            found[names[leaf]] = flat[start:end].reshape(shape)
            start = end
        return found
    start, found = 0, {}
    for leaf, shape in zip(layout.leaves, layout.shapes, strict=True):
        # The matrices of these tests have two dimensions.
        cut = -(-shape[0] // shards) * shape[1]
        matrix = rows[:, start : start + cut].reshape(-1, shape[1])
        found[names[leaf]] = matrix[: shape[0]]
        start += cut
    return found


def normal(
    rng: np.random.Generator, steps: int, ranks: int, shapes: dict[str, Any], dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Returns normal random gradients, ``(steps, ranks, ...)`` by leaf."""
    return {
        name: rng.standard_normal((steps, ranks, *shape)).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
    }


def conservation_bound(steps: int, ranks: int, largest: float, power_rank: int = 0) -> float:
    """Returns how far applied + residual may be from what was contributed.

    Let ``V`` bound every ``|x_i| / n + |r_i|``, so that it bounds what a rank gives to be sent and
    what it keeps, and ``2 V`` what it sends. In a step of ``n`` ranks the float32 roundings, each
    at most ``u`` of its result, are: n divisions of inputs (``V`` each), n additions of the
    residual (``V``), n subtractions of what was sent (``V``), n - 1 additions of the sum (each at
    most ``2 n V``), one of the carried residual (``2 n V + V``) and its subtraction (``V``). A
    factor of 1.01 is for the products of such errors.

    With PowerSGD of rank k, what all apply is ``P (sum Q_i)^T`` and what each sent ``P Q_i^T``.
    Columns of P are orthonormal, so a row of it has norm at most one, and ``|P| |Q_i|^T`` is at
    most the norm of a matrix column, ``8 V`` for up to 64 rows: k roundings in each product and n
    in the sum, of n ranks.
    """
    u = U32 * 1.01
    each = 3 * ranks + 2 * ranks * (ranks - 1) + 2 * ranks + 2
    low_rank = (2 * power_rank + ranks) * ranks * 8 if power_rank else 0
    return steps * u * largest * (each + low_rank)
