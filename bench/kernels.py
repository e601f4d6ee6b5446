"""The kernels of compressed collectives: bytes over time against a copy, beside XLA's own fusion.

Correctness first: each kernel against the reference, bit for bit, on this machine's device (in
Pallas's interpreter on a CPU). Then, on a GPU or TPU, kernel, XLA's version of the reference and a
plain copy are timed in turn, round after round in one process.

Without an accelerator nothing can be timed. Both versions are compiled for a TPU v5e and an H100
instead, and the bytes that the compiled programs move are counted: for each operation of the
optimised program's entry (a fusion, a custom call, a copy), its operands and its result. What is a
view (bitcast, tuple) moves nothing; of an operand that a fusion only slices, the slices count;
buffers that the TPU compiler keeps in vector memory (memory space 1) do not count, nor does the
padding of tiles. It is what would cross the memory bus if no cache helped.

On a TPU the order of an array in memory depends on its shape: kernels are given arrays as rows of
128, XLA's version is given them as rows of blocks, which is the better form of each.

    python bench/kernels.py [--rounds 15] [--mib 64] [--check] [--json]
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xcoll_kernels
from jax.sharding import PartitionSpec as P
from rich.markup import escape
from rich.table import Table
from xcoll_kernels import gpu, reference, tpu

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.options import parser, whole
from bench.printing import show
from xcoll import aot
from xcoll.hlo import text as hlo_text

LARGEST = float(np.finfo(np.float32).max)
CODECS = {"int8": (8, 256), "int4": (4, 64)}
NUM_RANKS = 8
TARGET_OF_COPY = 0.85
MACHINES = {"TPU v5e": ("v5e:2x2", 4, "tpu"), "H100": ("h100:1", 1, "cuda")}
"""Name, topology to compile for, its devices, platform of the kernels."""

_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](\{[^{}]*\})?")
_VIEWS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all")
_KERNEL_CALLS = ("tpu_custom_call", "xla.gpu.triton")
_SLICES = ("slice", "dynamic-slice")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on a payload of blocks."""

    op: str
    codec: str
    num_blocks: int

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operation."""
        options: dict[str, Any] = {"bits": CODECS[self.codec][0]}
        if self.op != "quantize":
            options["saturate"] = LARGEST
        if self.op != "dequantize":
            options["limit"] = LARGEST
        return options

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of its arguments, as rows of blocks."""
        bits, block = CODECS[self.codec]
        ranks = (NUM_RANKS,) if self.op == "reduce_and_quantize" else ()
        code_bytes = block * bits // 8
        values = jax.ShapeDtypeStruct((self.num_blocks, block), jnp.float32)
        codes = jax.ShapeDtypeStruct((*ranks, self.num_blocks, code_bytes), jnp.int8)
        exponents = jax.ShapeDtypeStruct((*ranks, self.num_blocks), jnp.uint8)
        return {
            "quantize": [values],
            "accumulate_and_quantize": [values, codes, exponents],
        }.get(self.op, [codes, exponents])

    @property
    def least_bytes(self) -> int:
        """Bytes of its arguments and results, each once."""
        out = jax.eval_shape(functools.partial(getattr(reference, self.op), **self.options),
                             *self.arguments)  # fmt: skip
        return sum(a.size * a.dtype.itemsize for a in (*self.arguments, *jax.tree.leaves(out)))

    def function(self, platform: str, kernels: bool) -> Callable[..., Any]:
        """Returns the operation, which takes and gives rows of 128 where it is kernels'."""
        op = functools.partial(
            getattr(xcoll_kernels, self.op), platform=platform, kernels=kernels, **self.options
        )
        if not kernels:
            return op
        shapes = [a.shape for a in self.arguments]

        def of_lanes(*args: jax.Array) -> Any:
            out = op(*(a.reshape(s) for a, s in zip(args, shapes, strict=True)))
            return jax.tree.map(lambda a: a.reshape(-1, 128) if a.ndim > 1 else a, out)

        return of_lanes

    def shaped(self, kernels: bool) -> list[jax.ShapeDtypeStruct]:
        """Returns its arguments as `function` takes them."""
        return [
            jax.ShapeDtypeStruct((*a.shape[:-2], a.shape[-2] * a.shape[-1] // 128, 128), a.dtype)
            if kernels and a.dtype != jnp.uint8
            else a
            for a in self.arguments
        ]


def cases(mib: int) -> list[Case]:
    """Returns every operation with either codec, on ``mib`` MiB of float32 a contribution."""
    elements = mib * 2**20 // 4
    return [
        Case(op=op, codec=codec, num_blocks=elements // block)
        for op in ("reduce_and_quantize", "accumulate_and_quantize", "quantize", "dequantize")
        for codec, (_, block) in CODECS.items()
    ]


def example(case: Case) -> list[jax.Array]:
    """Makes arguments: normal values, and codes and exponents of such."""
    keys = iter(jax.random.split(jax.random.key(0), 3))
    made = []
    for a in case.arguments:
        key = next(keys)
        if a.dtype == jnp.float32:
            made.append(jax.random.normal(key, a.shape))
        elif a.dtype == jnp.int8:
            made.append(jax.random.randint(key, a.shape, -127, 128, jnp.int8))
        else:
            made.append(jax.random.randint(key, a.shape, 100, 140, jnp.int32).astype(jnp.uint8))
    return made


def check(backend: str) -> list[str]:
    """Compares every kernel with the reference on a small payload; stops where a bit differs.

    Returns:
      What was compared.
    """
    modules = {"cpu": {"TPU": tpu, "GPU": gpu}, "tpu": {"TPU": tpu}, "gpu": {"GPU": gpu}}[backend]
    for case in cases(1):
        small = Case(op=case.op, codec=case.codec, num_blocks=1031)
        args = example(small)
        want = jax.jit(functools.partial(getattr(reference, case.op), **case.options))(*args)
        for name, module in modules.items():
            kernel = functools.partial(getattr(module, case.op), interpret=backend == "cpu")
            got = jax.jit(functools.partial(kernel, **case.options))(*args)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                    raise SystemExit(f"{name} {case.op} {case.codec}: differs from the reference")
    how = "in the interpreter" if backend == "cpu" else "on the device"
    return [f"{name} kernels {how} = reference, bit for bit" for name in modules]


def moved_bytes(program: Any) -> int:
    """Returns the bytes that a compiled program's entry moves, as the module's docstring says.

    Raises:
      NotImplementedError: it has a loop or a branch, whose trips the text may not show.
    """
    module = hlo_text.parse(hlo_text.program_text(program))
    entry = module.computations[module.entry].instructions
    total = 0
    for i in entry.values():
        if i.opcode in _VIEWS or i.opcode.endswith("-done"):
            continue
        if i.opcode in ("while", "conditional", "call"):
            raise NotImplementedError(f"cannot count the bytes of {i.opcode} {i.name}")
        result = _arrays(i.type)
        # A started copy's type holds its source and a token beside its result.
        total += sum(result[:1] if i.opcode.endswith("-start") else result)
        called = [module.computations[name] for key, name in i.calls() if key == "calls"]
        for position, operand in enumerate(i.operands):
            read = sum(_arrays(entry[operand].type))
            if called and i.opcode == "fusion":
                name = called[0].parameter(position)
                users = [u for u in called[0].instructions.values() if name in u.operands]
                if read and users and all(u.opcode in _SLICES for u in users):
                    read = min(read, sum(sum(_arrays(u.type)) for u in users))
            total += read
    return total


def _arrays(type_text: str) -> list[int]:
    """Returns the bytes of each array of a type; 0 for one outside main memory."""
    return [
        0
        if "S(1)" in layout
        else hlo_text.num_bytes(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims, layout in _ARRAY.findall(type_text)
    ]


def compiled(case: Case, machine: str, kernels: bool) -> int:
    """Compiles a case for a machine that is not here; returns the bytes it moves, per device."""
    topology, num_devices, for_platform = MACHINES[machine]
    ranked = case.op == "reduce_and_quantize"
    spec = P(None, "x") if ranked else P("x")
    shapes = [
        jax.ShapeDtypeStruct(
            tuple(s * (num_devices if dim == ranked else 1) for dim, s in enumerate(a.shape)),
            a.dtype,
        )
        for a in case.shaped(kernels)
    ]
    program = aot.compile(
        case.function(for_platform, kernels),
        *shapes,
        mesh=aot.mesh(topology, (num_devices,), ("x",)),
        in_specs=tuple(spec for _ in shapes),
        out_specs=P("x"),
    )
    if kernels != any(call in (program.as_text() or "") for call in _KERNEL_CALLS):
        raise SystemExit(f"{machine} {case.op} {case.codec}: kernels={kernels} is not what runs")
    return moved_bytes(program)


def timed(backend: str, rounds: int, mib: int) -> list[dict[str, Any]]:
    """Times kernel, XLA's version and a copy of as many bytes, in turn; returns rows."""
    rows = []
    for case in cases(mib):
        args = example(case)
        block = jnp.zeros(case.least_bytes // 8, jnp.float32)  # read and written: half each
        runs: dict[str, tuple[Callable[..., Any], list[jax.Array]]] = {
            "copy": (jax.jit(lambda x: x + 1), [block])
        }
        for name, kernels in (("kernel", True), ("xla", False)):
            shaped = case.shaped(kernels)
            placed = [a.reshape(s.shape) for a, s in zip(args, shaped, strict=True)]
            runs[name] = (jax.jit(case.function(backend, kernels)), placed)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(rounds + 2):  # the first two compile and warm
            for name, (fn, placed) in runs.items():
                start = time.perf_counter()
                for _ in range(10):
                    out = fn(*placed)
                jax.block_until_ready(out)
                if index >= 2:
                    seconds[name].append((time.perf_counter() - start) / 10)
        row: dict[str, Any] = {"op": case.op, "codec": case.codec, "least_bytes": case.least_bytes}
        for name, values in seconds.items():
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            row[name] = {"median_s": middle, "low_s": low, "high_s": high}
        row["of_copy"] = row["copy"]["median_s"] / row["kernel"]["median_s"]
        row["times_xla"] = row["xla"]["median_s"] / row["kernel"]["median_s"]
        rows.append(row)
    return rows


def counted(mib: int) -> list[dict[str, Any]]:
    """Counts the bytes of both versions of every case on every machine; returns rows."""
    rows = []
    for case in cases(mib):
        row: dict[str, Any] = {"op": case.op, "codec": case.codec, "least_bytes": case.least_bytes}
        for machine in MACHINES:
            row[machine] = {
                name: compiled(case, machine, kernels)
                for name, kernels in (("kernel", True), ("xla", False))
            }
        rows.append(row)
    return rows


def table(figures: dict[str, Any]) -> Table:
    """Lays the figures out for people."""
    title = f"{figures['device']}; {figures['machine']}; jax {figures['jax']}; {figures['mib']} MiB"
    if figures["timed"]:
        title += f"; {figures['rounds']} rounds, median [quartiles]"
    out = Table(title=escape(title), title_justify="left")
    out.add_column("operation")
    out.add_column("codec")
    if figures["timed"]:
        quantiles = ("median_s", "high_s", "low_s")
        for name in ("copy", "kernel", "xla"):
            out.add_column(f"{name}, GB/s", justify="right")
        out.add_column("of copy", justify="right")
        out.add_column("times XLA", justify="right")
        for row in figures["rows"]:
            rates = [
                "{:.0f} [{:.0f}, {:.0f}]".format(
                    *(row["least_bytes"] / row[name][quantile] / 1e9 for quantile in quantiles)
                )
                for name in ("copy", "kernel", "xla")
            ]
            out.add_row(row["op"], row["codec"], *map(escape, rates), f"{row['of_copy']:.0%}",
                        f"{row['times_xla']:.2f}")  # fmt: skip
        return out
    out.add_column("least, MiB", justify="right")
    for machine in MACHINES:
        out.add_column(f"{machine}: kernel", justify="right")
        out.add_column("XLA", justify="right")
    for row in figures["rows"]:
        cells = [
            f"{row[machine][name] / 2**20:.1f}"
            for machine in MACHINES
            for name in ("kernel", "xla")
        ]
        out.add_row(row["op"], row["codec"], f"{row['least_bytes'] / 2**20:.1f}", *cells)
    return out


def main() -> int:
    """Runs the benchmark; returns 1 where a GPU misses the target."""
    words = parser(__doc__, rounds=15, fewest=2)
    add = words.add_argument
    add("--mib", type=whole(1), default=64, metavar="N", help="float32 MiB of one contribution")
    add("--check", action="store_true", help="correctness only")
    args = words.parse_args()
    backend = jax.default_backend()
    say = functools.partial(show, stderr=args.json)
    checked = check(backend)
    say(*(f"ok   {line}" for line in checked))
    if args.check:
        if args.json:
            print(json.dumps({"checked": checked}, indent=1))
        return 0
    figures: dict[str, Any] = {
        "checked": checked,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "mib": args.mib,
        "timed": backend != "cpu",
    }
    if figures["timed"]:
        figures |= {"rounds": args.rounds, "rows": timed(backend, args.rounds, args.mib)}
    else:
        figures["rows"] = counted(args.mib)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(table(figures))
    if not figures["timed"]:
        say(
            f"No accelerator here: MiB moved by the programs compiled for one, nothing timed. On a"
            f" GPU, reduce_and_quantize is to reach {TARGET_OF_COPY:.0%} of a copy's bandwidth."
        )
        return 0
    missed = 0
    for row in figures["rows"]:
        if row["op"] == "reduce_and_quantize":
            ok = row["of_copy"] >= TARGET_OF_COPY and row["times_xla"] > 1
            say(
                f"{'ok  ' if ok else 'MISS'} reduce_and_quantize {row['codec']}:"
                f" {row['of_copy']:.0%} of copy bandwidth, {row['times_xla']:.2f} x XLA's version"
            )
            missed += not ok
    return int(bool(missed) and backend == "gpu")


if __name__ == "__main__":
    sys.exit(main())
