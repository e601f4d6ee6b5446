"""The command line: ``xcoll plan``, ``xcoll audit`` and ``xcoll tune``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from xcoll.commands import auditing, planning, tuning
from xcoll.commands.usage import UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; None takes those of the process.

    Returns:
      The exit code: 0; 1 where a budget is broken; 130 on Ctrl-C; or 2 where the input was bad (one
      line on stderr says how, below the traceback where a user's own file has failed).
    """
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.run(arguments))
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("xcoll: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except OverflowError as err:
        return _failed(f"too large a number to plan with: {err}")
    except UsageError as err:
        return _failed(str(err), err.details)
    except ValueError as err:
        return _failed(str(err))
    except OSError as err:
        return _failed(f"{err.filename}: {err.strerror}" if err.filename else str(err))


def _failed(message: str, details: str = "") -> int:
    if details:
        print(details.rstrip(), file=sys.stderr)
    line = next(iter(message.splitlines()), "")
    print(f"xcoll: error: {line}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="xcoll", description="A collective compiler pass for JAX.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    planning.add(commands)
    auditing.add(commands)
    tuning.add(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("jax-xcoll")
    except metadata.PackageNotFoundError:
        return "not installed: run from its source"


if __name__ == "__main__":
    sys.exit(main())
