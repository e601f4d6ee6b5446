"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and exits with code 2.

    Args:
      quick: defaults that ``--quick`` gives, wherever it stands; None: there is no such option.
      settings: of argparse.
    """

    def __init__(self, quick: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._quick = quick

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the command line."""
        words = sys.argv[1:] if args is None else list(args)
        if self._quick is not None and "--quick" in words:
            self.set_defaults(**self._quick)
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the first line of a message to stderr, and exits."""
        line = next(iter(message.splitlines()), "wrong options")
        print(f"{self.prog}: error: {line}", file=sys.stderr)
        raise SystemExit(2)


class _Defaults(argparse.HelpFormatter):
    """Tells the default of each option that takes something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.nargs != 0 and action.default is not None
        return f"{action.help} (%(default)s)" if has_default else action.help


def parser(doc: str | None, *, rounds: int | None = None, fewest: int = 1) -> Parser:
    """Returns a parser with what most benchmarks take.

    Args:
      doc: of the module; its first line describes the command.
      rounds: default of ``--rounds``; None: there are no rounds.
      fewest: rounds.
    """
    words = Parser(description=(doc or "").partition("\n")[0], formatter_class=_Defaults)
    if rounds is not None:
        words.add_argument(
            "--rounds", type=whole(fewest), default=rounds, metavar="N", help="timed rounds"
        )
    words.add_argument("--json", action="store_true", help="the figures as JSON")
    return words


def converted[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """Keeps the message of a ValueError, which argparse would replace by one of its own."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from err

    return convert


def whole(least: int, most: int | None = None, step: int = 1) -> Callable[[str], int]:
    """Returns what reads a whole number from ``least`` to ``most``, a multiple of ``step``."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else least - 1
        if value < least or (most is not None and value > most) or value % step:
            rule = f"of at least {least}" if most is None else f"from {least} to {most}"
            rule += f", a multiple of {step}" if step > 1 else ""
            raise ValueError(f"must be a whole number {rule}, not {text!r}")
        return value

    return converted(read)


def several[T](parse: Callable[[str], T], fewest: int = 1) -> Callable[[str], list[T]]:
    """Returns what reads a list separated by commas."""

    def read(text: str) -> list[T]:
        found = [parse(part) for part in text.split(",") if part]
        if len(found) < fewest:
            raise ValueError(f"{text!r}: nothing stands there; separate several by commas")
        return found

    return converted(read)


def file(text: str) -> Path:
    """Reads the path of a file that has to be there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def output_file(text: str) -> Path:
    """Reads the path of a file to be written, before it is worked for; makes its directory."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory")
    output_directory(str(path.parent))
    return path


def output_directory(text: str) -> Path:
    """Reads the path of a directory to be written in; makes it."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise argparse.ArgumentTypeError(f"{text!r}: {err.strerror}") from err
    return path
