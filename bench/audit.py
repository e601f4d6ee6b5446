"""What an audit costs: time and memory beside the compilation of a 48-layer transformer step.

The step is `examples/flax_transformer.py`, FSDP x tensor parallel, compiled for 512 chips. Its
blocks are one loop, as in programs that are to compile soon; --unrolled makes them stand one by
one (two blocks take minutes to compile then, and 48 hours).
Correctness first: the rows must be as many as a plain count of opcodes over the program's text
finds, all of them read, and the audit must survive JSON. Time is that of the whole audit of the
compiled program, its text included, in rounds after the first; memory is the peak of Python's
allocations, in a round of its own, not timed.

    python bench/audit.py [--layers 48] [--topology v5p:8x8x8] [--rounds 3] [--unrolled] [--json]
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
from flax_transformer import Config, train_step
from rich.console import Console
from rich.table import Table

import xcoll
from bench.options import parser, whole
from bench.printing import show
from xcoll import aot, hlo, sharding

LIMIT = 0.20
"""An audit may take this fraction of the compile time."""

MESHES = {
    "v5p:8x8x8": (64, 8),
    "v5p:4x4x4": (16, 4),
    "v5e:4x4": (4, 4),
    "4*h100:8": (8, 4),
}
"""Systems, and sizes of their mesh's axes ``data`` and ``model``."""

_OPCODE = re.compile(
    r" (?:all-reduce|reduce-scatter|all-gather|(?:ragged-)?all-to-all|collective-permute"
    r"|collective-broadcast|send|recv)(?:-start)?\("
)


def plain_count(text: str) -> int:
    """Counts collective opcodes, those that are printed again for steps of one transfer once."""
    chains: set[str] = set()
    count = 0
    for line in text.splitlines():
        head = line.partition(" metadata=")[0]
        if not _OPCODE.search(head):
            continue
        chain = re.search(r'chain_id="([^"]*)"', line)
        if chain is None or chain[1] not in chains:
            count += 1
        if chain is not None:
            chains.add(chain[1])
    return count


def check(found: hlo.Audit, text: str) -> None:
    """Stops where the audit is not one of this program."""
    kernels = found.counts().get("custom-call", 0)
    counted, rows = plain_count(text), len(found.rows) - kernels
    if rows != counted:
        raise SystemExit(f"{rows} rows, but the program has {counted} collectives")
    unread = [row for row in found.rows if row.unread or row.axes is None]
    if unread:
        raise SystemExit(f"{len(unread)} rows were not read: {unread[0]}")
    if hlo.Audit.from_json(found.to_json()) != found:
        raise SystemExit("the audit does not survive JSON")


def measure(topology: str, config: Config, rounds: int, console: Console) -> dict[str, Any]:
    """Compiles once, audits several times."""
    mesh = aot.mesh(topology, MESHES[topology], ("data", "model"))
    step, args = train_step(config, sharding.fsdp_tensor(), mesh)
    start = time.perf_counter()
    with console.status(f"compiling {config.layers} layers for {topology} ..."):
        lowered = step.lower(*args)
        lower_s = time.perf_counter() - start
        compiled = lowered.compile()
    compile_s = time.perf_counter() - start - lower_s
    text = compiled.as_text()
    first = time.perf_counter()
    found = xcoll.audit(compiled)
    first_s = time.perf_counter() - first
    check(found, text)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        xcoll.audit(compiled)
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    xcoll.audit(compiled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    median = statistics.median(times)
    return {
        "topology": topology,
        "layers": config.layers,
        "is_scanned": config.is_scanned,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device_kind": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "lower_s": lower_s,
        "compile_s": compile_s,
        "audit_first_s": first_s,
        "audit_s": times,
        "audit_median_s": median,
        "share": median / compile_s,
        "peak_bytes": peak,
        "text_bytes": len(text),
        "rows": len(found.rows),
        "instructions": text.count(" = "),
    }


def table(figures: dict[str, Any]) -> Table:
    """Returns the figures as a table."""
    out = Table(title=f"audit of {figures['layers']} layers on {figures['topology']}")
    out.add_column("")
    out.add_column("", justify="right")
    spread = f"({min(figures['audit_s']):.2f} to {max(figures['audit_s']):.2f})"
    rows = [
        ("machine", figures["machine"]),
        ("compiled for", f"{figures['device_kind']}, jax {figures['jax']}"),
        ("program", f"{figures['text_bytes'] / 1e6:.1f} MB of text, {figures['rows']} collectives"),
        ("lowering", f"{figures['lower_s']:.1f} s"),
        ("compilation", f"{figures['compile_s']:.1f} s"),
        ("audit, median, spread", f"{figures['audit_median_s']:.2f} s {spread}"),
        ("audit, the first", f"{figures['audit_first_s']:.2f} s"),
        (f"audit / compilation (limit {LIMIT:.0%})", f"{figures['share']:.1%}"),
        ("peak memory of the audit", f"{figures['peak_bytes'] / 2**20:.0f} MiB"),
    ]
    for row in rows:
        out.add_row(*row)
    return out


def main() -> int:
    """Prints the figures; the exit code says whether the limit is kept."""
    words = parser(__doc__, rounds=3)
    add = words.add_argument
    add("--layers", type=whole(1), default=48, metavar="N", help="blocks of the transformer")
    add("--topology", choices=MESHES, default="v5p:8x8x8", metavar="NAME",
        help=f"to compile for: {', '.join(MESHES)}")  # fmt: skip
    add("--unrolled", action="store_true", help="the blocks are no loop")
    options = words.parse_args()
    sequences = 4 * MESHES[options.topology][0]
    config = Config(layers=options.layers, batch=sequences, is_scanned=not options.unrolled)
    figures = measure(options.topology, config, options.rounds, Console(stderr=True))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(table(figures))
    return int(figures["share"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
