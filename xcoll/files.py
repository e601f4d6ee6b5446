"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def prepare_file(path: str | os.PathLike[str]) -> None:
    """Makes the directory of a file, and sees that `write_text` can write the file.

    Raises:
      OSError: it can't, or there is something else than a file.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(errno.EEXIST, "it is there, and no regular file", os.fspath(path))
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target.parent, prefix=f".{target.name}."):
        pass


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes text to a file, which is replaced once it is complete.

    Raises:
      OSError: the file can't be written.
    """
    target = Path(os.path.realpath(path))
    # A pipe or a device: there is nothing to replace. /dev/stdout leads to one without a path.
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_text(text, "utf-8")
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")  # of the same file system
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, target)
    except OSError as err:
        raise OSError(err.errno, err.strerror, os.fspath(path)) from err  # not the temporary's name
    finally:
        temporary.unlink(missing_ok=True)
