"""How the tests of collectives run per-shard functions, and what they compare with.

Values of all ranks are one NumPy array (or a pytree of them) with a leading dimension of ranks,
row-major over the mesh axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_RANKS = (1, 2, 3, 5, 7, 8)
CHECK_VMA = (True, False)

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int32", "uint8")
NUMBERS = (*FLOATS, *INTEGERS, "complex64")

# Largest relative error of one rounding to nearest.
UNIT_ROUNDOFF = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    # A complex product is two products and a sum for each part.
    "complex64": 2.0**-22,
}


def mesh_of(*sizes: int, names: tuple[str, ...] = ("i", "j", "k")) -> jax.sharding.Mesh:
    """Returns a mesh of Auto axes over the first devices."""
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, names[: len(sizes)])


def sharded(
    fn: Callable[..., Any], mesh: jax.sharding.Mesh, check_vma: bool = True, *, num_args: int = 1
) -> Callable[..., Any]:
    """Returns ``fn``, which is of one rank's values, as a function of all ranks' values."""
    spec = jax.P(mesh.axis_names)

    def body(*args: Any) -> Any:
        out = fn(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda y: jnp.asarray(y)[None], out)

    return jax.shard_map(
        body, mesh=mesh, in_specs=(spec,) * num_args, out_specs=spec, check_vma=check_vma
    )


def on_ranks(
    fn: Callable[..., Any], mesh: jax.sharding.Mesh, *args: Any, check_vma: bool = True
) -> Any:
    """Runs ``fn`` of one rank's values on all ranks, compiled; returns NumPy arrays."""
    run = jax.jit(sharded(fn, mesh, check_vma, num_args=len(args)))
    return jax.tree.map(np.asarray, run(*args))


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random values of a dtype: small where sums and products must not overflow."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    if dtype == "complex64":
        return (rng.uniform(0.5, 1.5, shape) + 1j * rng.uniform(-1, 1, shape)).astype(dtype)
    signs = rng.choice([-1.0, 1.0], shape)
    return (signs * rng.uniform(0.5, 1.5, shape)).astype(np.dtype(dtype))


def special_values(dtype: str) -> np.ndarray:
    """Returns the values of a float dtype that arithmetic changes and a copy must not."""
    wide = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1.0, -1.5]).astype(np.dtype(dtype))
    unsigned = np.dtype(f"u{wide.itemsize}")
    nan = np.array(np.nan).astype(wide.dtype).view(unsigned)
    # Another payload, the other sign, and the smallest subnormal.
    odd = np.array([nan | 1, nan | 1 << (8 * wide.itemsize - 1), 1], unsigned).view(wide.dtype)
    return np.concatenate([wide, odd])


def assert_same_bits(got: Any, want: Any, message: str = "") -> None:
    """Fails unless two pytrees of arrays have equal structure, dtypes, shapes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want), message
    for (path, g), w in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        g, w = np.asarray(g), np.asarray(w)
        where = f"{message}{jax.tree_util.keystr(path)}"
        assert (g.dtype, g.shape) == (w.dtype, w.shape), f"{where}: {g.dtype} {g.shape}"
        np.testing.assert_array_equal(_bits(g), _bits(w), where)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.atleast_1d(np.ascontiguousarray(x)).view(np.uint8)


def sum_bound(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the bound on the error of summing ``terms`` over ranks, in any order.

    With ``g = (n - 1) u / (1 - (n - 1) u)`` the error is at most ``g sum |x|`` (Higham, Accuracy
    and Stability of Numerical Algorithms, 2nd edition, section 4.2). A backend that adds in a wider
    format and rounds once at the end stays below it.
    """
    return _gamma(terms.shape[0], dtype) * np.abs(_wide(terms)).sum(0)


def product_bound(factors: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the bound on the error of multiplying over ranks: ``g prod |x|``, as above."""
    return _gamma(factors.shape[0], dtype) * np.abs(_wide(factors)).prod(0)


def _gamma(num_ranks: int, dtype: str) -> float:
    roundings = (num_ranks - 1) * UNIT_ROUNDOFF[dtype]
    return roundings / (1 - roundings)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def reduced(x: np.ndarray, op: str) -> np.ndarray:
    """Returns the reduction over the leading dimension: exact, or in double precision."""
    fn = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}[op]
    if x.dtype.kind in "iu" and op in ("sum", "prod"):
        return fn(x, axis=0, dtype=x.dtype)
    if op in ("sum", "prod"):
        return fn(_wide(x), axis=0)
    if x.dtype.kind in "biu" or x.shape[0] == 0:
        return fn(x, axis=0)
    return fn(x.astype(np.float64), axis=0).astype(x.dtype)


def assert_reduced(got: np.ndarray, x: np.ndarray, op: str, message: str = "") -> None:
    """Fails unless ``got`` is ``op`` over the ranks of ``x``: exact, or within its bound."""
    want = reduced(x, op)
    assert got.dtype == x.dtype and got.shape == x.shape[1:], f"{message}: {got.dtype} {got.shape}"
    if x.dtype.kind in "biu" or op in ("max", "min"):
        np.testing.assert_array_equal(got, want, message)
        return
    name = x.dtype.name
    bound = (sum_bound if op == "sum" else product_bound)(x, name)
    error = np.abs(_wide(got) - want)
    assert (error <= bound).all(), f"{message}: error {error.max()} > {bound.max()}"
