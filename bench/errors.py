"""Errors that codecs really make, beside their laws: one rounding, and sums over 8 ranks.

Each codec encodes and decodes normal random numbers once; then a sum over 8 ranks runs through it
by each algorithm that has an encoded form. Every error is compared with float64, and has to be
within what the codec, or the plan, promises; that all ranks hold the same bits is checked too.

    python bench/errors.py [--elements 65536] [--json]
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import lm_devices
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import xcoll
from bench.options import parser, whole
from bench.printing import show
from xcoll import algorithms, codecs
from xcoll.codecs import FLOOR

NUM_RANKS = 8
AXES = {"host": 2, "device": 4}

ROUNDED: dict[str, codecs.Codec] = {
    **codecs.CODECS,
    'int8(scale="exact")': codecs.int8(scale="exact"),
    'int8(rounding="stochastic")': codecs.int8(rounding="stochastic"),
    'int4(scale="exact")': codecs.int4(scale="exact"),
    'int4(rounding="stochastic")': codecs.int4(rounding="stochastic"),
}
"""Codecs whose single rounding is measured."""

SUMMED: dict[str, codecs.Codec] = {
    **codecs.CODECS,
    "fixed_point(16)": codecs.fixed_point(16),
    "fixed_point(32)": codecs.fixed_point(32),
}
"""Codecs that sums run through."""

ALGORITHMS: dict[str, Any] = {
    "direct": "direct",
    "direct(shots=1)": algorithms.direct(shots=1),
    "ring": "ring",
    "halving_doubling": "halving_doubling",
    "recursive_doubling": "recursive_doubling",
    "hierarchical": "hierarchical",
}
"""Algorithms by what their column is called; the last one is exact over ``device``."""


def one_rounding(codec: codecs.Codec, x: np.ndarray) -> dict[str, float]:
    """Measures one encoding and decoding of normal numbers.

    Raises:
      SystemExit: an error is over the codec's law.
    """
    key = jax.random.key(1) if codec.needs_key else None

    @jax.jit
    def there_and_back(values: jax.Array) -> jax.Array:
        wire = codec.encode(values, dtype="float32", key=key)
        return codec.decode(wire, values.shape[-1], dtype="float32")

    error = np.asarray(there_and_back(jnp.asarray(x)), np.float64) - x
    magnitude = np.abs(x.astype(np.float64)).reshape(-1, codec.block).max(1)
    worst = np.abs(error).reshape(-1, codec.block).max(1)
    if np.any(worst > codec.max_error * magnitude + FLOOR):
        raise SystemExit(f"{codec}: an error is over its law, {codec.formula}")
    return {
        "bytes_an_element": codec.wire_bytes(x.shape, "float32") / x.size,
        "bound": codec.max_error,
        "largest": float(np.max(worst / magnitude)),
        "rms": float(np.sqrt(np.mean(error**2) / np.mean(x.astype(np.float64) ** 2))),
        "mean": float(np.mean(error) / np.sqrt(np.mean(x.astype(np.float64) ** 2))),
    }


def one_sum(
    codec: codecs.Codec, algorithm: str, x: np.ndarray, mesh: Any
) -> dict[str, float] | None:
    """Measures a sum over all ranks.

    Returns:
      The largest error and the plan's bound, relative to the sum over ranks of the block's largest
      magnitude; None where the algorithm has no such form.

    Raises:
      SystemExit: an error is over the bound, or ranks differ.
    """
    is_nested = algorithm == "hierarchical"
    if is_nested and codec.integers is not None:
        return None
    policy = xcoll.Policy(
        algorithm=ALGORITHMS[algorithm],
        codec={"host": codec} if is_nested else codec,
        min_bytes=0,
    )
    spec = jax.P(tuple(AXES))
    fn = xcoll.optimize(
        jax.shard_map(
            lambda rows: jax.lax.psum(rows, tuple(AXES)),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        ),
        policy=policy,
    )
    results = np.asarray(jax.jit(fn)(x), np.float64)
    (site,) = fn.reports[-1].sites
    if site.plan is None or not site.plan.is_lossy:
        return None
    if np.any(results != results[0]):
        raise SystemExit(f"{codec} by {algorithm}: ranks hold different sums")
    wide = x.astype(np.float64)
    # Slots of a rank each are whole blocks, so that blocks are those of the payload.
    size = codec.block or x.shape[1]
    magnitude = np.abs(wide).reshape(NUM_RANKS, -1, size).max(2).sum(0)
    worst = np.abs(results[0] - wide.sum(0)).reshape(-1, size).max(1)
    made = float(np.max(worst / magnitude))
    if made > site.plan.max_error:
        raise SystemExit(f"{codec} by {algorithm}: {made} is over the bound {site.plan.max_error}")
    return {"made": made, "bound": site.plan.max_error}


def run(elements: int, console: Console) -> dict[str, Any]:
    """Measures all codecs and algorithms; returns the figures."""
    x = np.random.default_rng(0).standard_normal((NUM_RANKS, elements)).astype(np.float32)
    mesh = lm_devices.make_mesh(AXES)
    pairs = [(name, algorithm) for name in SUMMED for algorithm in ALGORITHMS]
    sums: dict[str, dict[str, Any]] = {name: {} for name in SUMMED}
    for name, algorithm in track(pairs, "sums", console=console, transient=True):
        sums[name][algorithm] = one_sum(SUMMED[name], algorithm, x, mesh)
    return {
        "machine": platform.machine(),
        "jax": jax.__version__,
        "elements": elements,
        "num_ranks": NUM_RANKS,
        "one_rounding": {name: one_rounding(codec, x.ravel()) for name, codec in ROUNDED.items()},
        "sums": sums,
    }


def tables(figures: dict[str, Any]) -> tuple[Table, Table]:
    """Lays the figures out for people."""
    first = Table(
        title="one rounding of normal numbers; errors over the block's largest magnitude m",
        title_justify="left",
    )
    first.add_column("codec", no_wrap=True)
    for heading in (
        "bytes an element",
        "bound, of m",
        "largest, of m",
        "RMS, of RMS",
        "mean, of RMS",
    ):
        first.add_column(heading, justify="right")
    for name, row in figures["one_rounding"].items():
        first.add_row(
            name,
            f"{row['bytes_an_element']:.3f}",
            *(f"{row[column]:.1e}" for column in ("bound", "largest", "rms", "mean")),
        )
    second = Table(
        title=f"sums over {figures['num_ranks']} ranks: largest error / bound, over the sum over"
        " ranks of the block's largest magnitude",
        title_justify="left",
    )
    second.add_column("codec", no_wrap=True)
    for algorithm in ALGORITHMS:
        second.add_column(algorithm, justify="right")
    for name, by_algorithm in figures["sums"].items():
        cells = (
            f"{cell['made']:.1e} / {cell['bound']:.1e}" if cell else "-"
            for cell in by_algorithm.values()
        )
        second.add_row(name, *cells)
    return first, second


def main() -> int:
    """Runs the benchmark."""
    words = parser(__doc__)
    shares = NUM_RANKS * 256
    words.add_argument(
        "--elements", type=whole(shares, step=shares), default=65536, metavar="N",
        help=f"of each rank, a multiple of {shares}",
    )  # fmt: skip
    args = words.parse_args()
    lm_devices.use_virtual_devices(NUM_RANKS)
    figures = run(args.elements, Console(stderr=True))
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(*tables(figures), "ok   every error within its bound, all ranks alike", width=140)
    return 0


if __name__ == "__main__":
    sys.exit(main())
