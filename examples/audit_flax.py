"""Audits a Flax transformer, FSDP x tensor parallel, on hardware that is not there.

No one wrote a collective in `flax_transformer.py`: all of them come from the sharding rules, by way
of the partitioner and of differentiation. Here they are, as the TPU and GPU compilers make them:
over which mesh axis, how many bytes, how long, how much of it the devices wait, and which line of
the model asks for it. Compiling takes one to three minutes for each system.

    python examples/audit_flax.py [--topology v5p:4x4x4] [--layers 16] [--timeline DIR] [--json]

The same from the shell, for one system and with a budget:

    xcoll audit examples/audit_flax.py:fsdp_tensor --topology v5p:4x4x4 --mesh data=16,model=4
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

# Nothing runs on an accelerator, so that none is looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from flax_transformer import Config, train_step
from jax.sharding import Mesh
from rich.console import Console

import xcoll
from xcoll import aot, hlo, sharding

SYSTEMS: dict[str, dict[str, int]] = {
    "v5p:4x4x4": {"data": 16, "model": 4},
    "4*h100:8": {"data": 8, "model": 4},
}
"""What to compile for: 64 chips, and 32 GPUs in 4 hosts; mesh axes and their sizes."""


def fsdp_tensor(mesh: Mesh, config: Config | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Returns a training step for a mesh with axes ``data`` and ``model``, and its arguments."""
    return train_step(config or Config(), sharding.fsdp_tensor(), mesh)


def audited(topology: str, axes: dict[str, int], config: Config) -> hlo.Audit:
    """Compiles the step for a system and audits it."""
    mesh = aot.mesh(topology, tuple(axes.values()), tuple(axes))
    step, args = fsdp_tensor(mesh, config)
    return xcoll.audit(step, *args)


def main() -> int:
    """Prints an audit for each system."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", choices=SYSTEMS, help="one of them (both)")
    parser.add_argument("--layers", type=int, default=Config.layers, metavar="N",
                        help="blocks of the model (%(default)s)")  # fmt: skip
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="for what Perfetto shows")
    parser.add_argument("--json", action="store_true", help="print the audits as JSON, one a line")
    options = parser.parse_args()
    if options.layers < 1:
        parser.error(f"--layers {options.layers}: must be at least 1")
    if options.timeline:  # before minutes of compiling
        try:
            options.timeline.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            parser.error(f"--timeline {options.timeline}: {err.strerror}")
    config = Config(layers=options.layers)
    out, progress = Console(), Console(stderr=True)
    for topology in [options.topology] if options.topology else SYSTEMS:
        with progress.status(f"compiling for {topology} ..."):
            found = audited(topology, SYSTEMS[topology], config)
        if options.json:
            print(found.to_json().replace("\n", ""))
        else:
            out.print(found, "", highlight=False, markup=False)
        if options.timeline:
            name = topology.replace("*", "x").replace(":", "-")
            found.timeline(options.timeline / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
