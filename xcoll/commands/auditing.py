"""``xcoll audit``: every collective of a program, held to a budget, or compared with another's."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from rich.console import Console

from xcoll.commands import hardware, programs
from xcoll.commands.usage import UsageError, read_axes, say, show
from xcoll.hlo.auditing import audit
from xcoll.hlo.budget_checks import breaches
from xcoll.hlo.budgets import Budget, read_budget
from xcoll.hlo.comparing import compare
from xcoll.hlo.result import Audit
from xcoll.units import counted

_DESCRIPTION = """\
Compiles a program for hardware that need not be there, and shows every
collective in it.

NAME is a function in PATH.py that takes a jax.sharding.Mesh (with Auto axes)
and returns (fn, args): the function to audit, jitted or not, and the tuple of
its arguments, for which jax.ShapeDtypeStruct with shardings will do. The file
is run with __name__ set to "__audited__", and jax_platforms to "cpu": no
accelerator is used or looked for.

Exit code: 0; 1 if the budget is broken; 2 if something is wrong with what was
given.
"""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "audit",
        help="show every collective of a compiled program, hold it to a budget, compare two",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("program", nargs="?", metavar="PATH.py:NAME", help="what to audit")
    command.add_argument("--topology", help="v5p:4x4x4, '2*v5e:4x4', '4*h100:8', cpu:8, ...")
    command.add_argument("--mesh", help="its axes in order, data=16,model=4")
    command.add_argument("--budget", metavar="BUDGET.toml", help="limits; broken: exit code 1")
    command.add_argument("--timeline", metavar="FILE", help="write one step for Perfetto")
    command.add_argument(
        "--compare",
        nargs=2,
        metavar=("A.json", "B.json"),
        help="show what a change did, from two audits written with --json",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    given = {
        "PATH.py:NAME": arguments.program,
        "--topology": arguments.topology,
        "--mesh": arguments.mesh,
    }
    if arguments.compare is not None:
        given |= {"--budget": arguments.budget, "--timeline": arguments.timeline}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise UsageError(f"--compare takes two audits, and not {', '.join(extra)}")
        return _compare(*arguments.compare, as_json=arguments.json)
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")
    return _audit(arguments)


def _compare(before: str, after: str, *, as_json: bool) -> int:
    compared = compare(_read(before), _read(after))
    if as_json:
        say(compared.to_json())
    else:
        show(compared)
    return 0


def _read(path: str) -> Audit:
    with open(path, encoding="utf-8") as file:
        try:
            return Audit.from_json(file.read())
        except ValueError as err:
            raise UsageError(f"{path}: {err}") from err


def _audit(arguments: argparse.Namespace) -> int:
    axes = read_axes("--mesh", arguments.mesh)
    budget = None
    if arguments.budget is not None:
        # Before the program is compiled, which can take minutes.
        budget = read_budget(arguments.budget)
        budget.check_axes(axes)
    if arguments.timeline is not None:
        _check_file("--timeline", arguments.timeline)
    num_cpus = hardware.prepare(arguments.topology)
    program = programs.load(arguments.program)
    mesh, topology = hardware.mesh_on(arguments.topology, axes, num_cpus)
    fn, args = program(mesh)
    with (
        _working(f"compiling {program.text} for {arguments.topology}"),
        programs.users_code(program.text, program.path),
    ):
        audited = audit(fn, *args, mesh=mesh, topology=topology)
    if arguments.timeline is not None:
        audited.timeline(arguments.timeline)
    if arguments.json:
        say(audited.to_json())
    else:
        show(audited)
    return 0 if budget is None else _hold(audited, budget, quiet=arguments.json)


def _check_file(option: str, path: str) -> None:
    """Checks that a file can be there, before it is waited for."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no directory {folder}")
    if not path or os.path.isdir(path):
        raise UsageError(f"{option} {path}: a file is expected, and that is a directory")


def _hold(audited: Audit, budget: Budget, *, quiet: bool) -> int:
    broken = breaches(audited, budget)
    if broken:
        print(f"xcoll: {budget.name} is broken", *broken, sep="\n", file=sys.stderr)
        return 1
    if not quiet:
        say(f"{budget.name}: {counted(len(budget.limits), 'limit')} kept")
    return 0


@contextlib.contextmanager
def _working(text: str) -> Any:
    """Says what is done while it is, if someone looks on."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"xcoll: {text} ..."):
            yield
    else:
        yield
