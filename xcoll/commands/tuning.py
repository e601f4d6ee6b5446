"""``xcoll tune``: measures a mesh, and writes the profile that plans are made with."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xcoll.calibration import tune
from xcoll.commands.hardware import MOST_CPUS
from xcoll.commands.usage import UsageError, read_axes, say, show
from xcoll.errors import HostLostError, PlanMismatchError, StartError
from xcoll.hosts.start import initialize
from xcoll.streams import python_alone
from xcoll.units import read_time

_DESCRIPTION = """\
Measures a mesh: permutes along each axis, one way and both; XLA's own
collectives over each axis and over all, from 1 KiB to 64 MiB; and what a
device does by itself. Fits the cost model to it, shows how far off the fit is,
and writes a profile: xcoll.Topology.load(FILE, mesh) plans by it.

Over several processes, each of them runs the same command with --distributed.
"""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "tune",
        help="measure a mesh, and write the profile that plans are made with",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--mesh", required=True, help="its axes in order, host=2,device=4")
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--virtual-devices", type=int, metavar="N", help="split the CPU of this process into N"
    )
    where.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="ADDRESS,COUNT,INDEX",
        help="join the other processes: those of the cluster's manager, or as said",
    )
    command.add_argument("--budget", default="60s", help="time for everything (default: 60s)")
    command.add_argument(
        "--out", metavar="FILE", help="the profile (default: in the user's cache directory)"
    )
    command.add_argument("--json", action="store_true", help="print the profile")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        with python_alone(), contextlib.ExitStack() as run:
            return _tune(arguments, run)
    except (PlanMismatchError, StartError, HostLostError) as err:
        first, _, rest = str(err).partition("\n")
        raise UsageError(first, rest) from err


def _tune(arguments: argparse.Namespace, run: contextlib.ExitStack) -> int:
    started = time.monotonic()
    axes = read_axes("--mesh", arguments.mesh)
    budget_s = _budget(arguments.budget)
    _prepare(arguments, run)
    mesh = _mesh(axes)
    # Waiting for the other processes is in the budget, too.
    budget_s = max(budget_s - (time.monotonic() - started), 0.1 * budget_s)
    is_first = jax.process_index() == 0
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Elsewhere than on a terminal nothing would be left of the bar but an empty line.
    is_shown = is_first and console.is_terminal
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as bar:
        task = bar.add_task("xcoll tune", total=1.0)

        def progress(share: float, text: str) -> None:
            bar.update(task, completed=share, description=text)

        tuned = tune(mesh, budget_s=budget_s, out=arguments.out, progress=progress)
    if is_first and arguments.json:
        say(tuned.to_json().rstrip())
    elif is_first:
        show(tuned)
    return 0


def _budget(text: str) -> float:
    number = text.removesuffix("min")
    minutes = number != text
    try:
        picoseconds = read_time("--budget", f"{number}s" if minutes else text)
    except ValueError:
        raise UsageError(f"--budget {text}: no time; write it as 60s, 2min or 500ms") from None
    if not picoseconds:
        raise UsageError(f"--budget {text}: must be more than nothing")
    return (60 if minutes else 1) * picoseconds / 10**12


def _prepare(arguments: argparse.Namespace, run: contextlib.ExitStack) -> None:
    """Sets jax up before it looks for devices; ``run`` ends what it starts."""
    count = arguments.virtual_devices
    if count is not None:
        if not 1 <= count <= MOST_CPUS:
            raise UsageError(f"--virtual-devices {count}: must be from 1 to {MOST_CPUS}")
        jax.config.update("jax_platforms", "cpu")
        # Where devices are there already, their number stays; it is checked with the mesh.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    if arguments.distributed is not None:
        # Of CPU processes; others do not look at it.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        run.enter_context(_join(arguments.distributed))


def _join(text: str) -> contextlib.AbstractContextManager[Any]:
    process: tuple[Any, ...] = ()
    if text:
        address, _, numbers = text.partition(",")
        count, _, index = numbers.partition(",")
        if ":" not in address or not (count.isdecimal() and index.isdecimal()):
            raise UsageError(
                f"--distributed {text}: write ADDRESS,COUNT,INDEX, as in 10.0.0.1:1234,2,0"
            )
        process = (address, int(count), int(index))
    try:
        return initialize(*process)
    except ValueError as err:
        raise UsageError(
            f"--distributed {text}: {str(err).strip().splitlines()[0]}; say which process this is:"
            " ADDRESS,COUNT,INDEX"
        ) from err


def _mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    devices, wanted = jax.devices(), math.prod(axes.values())
    shown = ",".join(f"{name}={size}" for name, size in axes.items())
    if wanted > len(devices) or (wanted < len(devices) and jax.process_count() > 1):
        raise UsageError(
            f"--mesh {shown}: has {wanted} devices, and there are {len(devices)}; see"
            " --virtual-devices and --distributed"
        )
    return jax.sharding.Mesh(np.array(devices[:wanted]).reshape(*axes.values()), tuple(axes))
