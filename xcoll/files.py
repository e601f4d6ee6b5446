"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes text to a file, which is replaced once it is complete.

    Raises:
      OSError: the file can't be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, "utf-8")  # a pipe or a device: there is nothing to replace
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")  # of the same file system
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, target)
    except OSError as err:
        raise OSError(err.errno, err.strerror, os.fspath(path)) from err  # not the temporary's name
    finally:
        temporary.unlink(missing_ok=True)
