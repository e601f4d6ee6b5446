"""Programs that users name on the command line: ``PATH.py:NAME``, which takes a mesh."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from xcoll.commands.usage import UsageError
from xcoll.errors import unknown

MODULE = "__audited__"
"""``__name__`` of the file while it is audited: not ``"__main__"``, so that it does not train."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class Program:
    """A function in a user's file that makes the program to be audited.

    Attributes:
      text: as it was typed.
      path: of the file.
      make: takes a mesh and returns ``(fn, args)``.
    """

    text: str
    path: str
    make: Callable[..., Any]

    def __call__(self, mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function and its arguments for a mesh.

        Raises:
          UsageError: the user's code failed, or returned something else.
        """
        try:
            inspect.signature(self.make).bind(mesh)
        except TypeError as err:
            raise UsageError(f"{self.text}: must take one argument, the mesh ({err})") from None
        with users_code(self.text, self.path):
            made = self.make(mesh)
        if not (
            isinstance(made, tuple)
            and len(made) == 2
            and callable(made[0])
            and isinstance(made[1], tuple | list)
        ):
            raise UsageError(
                f"{self.text}: returned {_described(made)}; must return (fn, args), a function and"
                " the tuple of its arguments: (fn, (x,)) for one"
            )
        return made[0], tuple(made[1])


def load(text: str) -> Program:
    """Runs a user's file and returns the function that it names.

    Raises:
      UsageError: malformed, no such file or function, or the file failed.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise UsageError(f"{text}: write PATH.py:NAME, a file and a function in it")
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise UsageError(f"{text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{text}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # As for a script: what lies beside the file can be imported, now and when it is traced.
    sys.path.insert(0, os.path.dirname(path))
    sys.modules[MODULE] = module
    with users_code(text, path):
        spec.loader.exec_module(module)
    made = getattr(module, name, None)
    if not callable(made):
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == MODULE)
        functions = [n for n in own if inspect.isfunction(getattr(module, n))]
        raise UsageError(unknown(os.path.basename(path), "function", name, functions))
    return Program(text, path, made)


@contextlib.contextmanager
def users_code(text: str, path: str) -> Iterator[None]:
    """Runs code of the user's, whose failures are shown with the user's own frames.

    What it prints goes to stderr: stdout is for the audit.

    Args:
      text: the program as it was typed.
      path: of its file.

    Raises:
      UsageError: the code failed, or what it made did not compile.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as stop:
        raise UsageError(
            f"{text}: the file called sys.exit({stop.code!r}); put what it runs as a script under"
            ' if __name__ == "__main__":'
        ) from None
    except Exception as err:
        frames = _users_frames(err.__traceback__)
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(frames)}
        if isinstance(err, jax.errors.JaxRuntimeError) and path not in files:
            first, _, rest = str(err).strip().partition("\n")
            details = "\n".join(rest.splitlines()[:_MOST_LINES])
            raise UsageError(f"{text}: the compiler refused it: {first}", details) from err
        if frames is None and isinstance(err, ValueError | TypeError):
            # Said by xcoll or jax, of what was given.
            first, _, rest = str(err).strip().partition("\n")
            raise UsageError(f"{text}: {first}", rest) from err
        if frames is None and not isinstance(err, SyntaxError):
            frames = err.__traceback__
        shown = "".join(traceback.format_exception(type(err), err, frames))
        what = f"{type(err).__name__}: {err}"
        raise UsageError(f"{text}: failed, as shown above: {what}", shown) from err


_MOST_LINES = 40
"""Of what XLA says when it refuses a program: its first lines name the largest buffers."""


def _users_frames(found: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the first frame that is neither xcoll's nor of the import system."""
    while found is not None:
        file = found.tb_frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<frozen importlib")):
            return found
        found = found.tb_next
    return None


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        kinds = ", ".join(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of ({kinds})"
    return f"a {type(value).__name__}" if value is not None else "None"
