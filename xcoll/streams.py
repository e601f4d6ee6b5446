"""Standard output for what a program prints itself."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def python_alone() -> Iterator[None]:
    """Leaves standard output to Python: Gloo writes there, from C++, whom it is connected to.

    Does nothing where Python's standard output is elsewhere already, as under a test's capture.
    """
    try:
        is_ours = sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):
        is_ours = False
    if not is_ours:
        yield
        return
    before = sys.stdout
    before.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(kept, "w", encoding=before.encoding, errors=before.errors, closefd=False)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)
