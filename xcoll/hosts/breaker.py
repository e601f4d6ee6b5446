"""What brings the main thread out of a collective when hosts are lost: catchable, or at the end."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import Any

from xcoll import _compat
from xcoll.hosts.gloo import break_connections

_LOOK_S = 0.5
_LOOK_SELDOM_S = 30.0
_LOOKS_UNCHANGED = 10
_AGAIN_S = 0.2
EXIT_CODE = 70


class Breaker:
    """Learns the addresses of Gloo's connections while all is well, and breaks them afterwards.

    Args:
      client: jax's key-value store.
      stuck_s: a process that is still in one and the same call so long after the loss is ended.
    """

    def __init__(self, client: Any, stuck_s: float) -> None:
        self.guarded: int | None = None
        self._client = client
        self._stuck_s = stuck_s
        self._addresses = b""
        self._stop = threading.Event()
        self._lost: str | None = None
        threading.Thread(target=self._learn, name="xcoll-gloo", daemon=True).start()

    def lost(self, message: str) -> None:
        """Begins to break connections, until `close`."""
        self._lost = message
        threading.Thread(target=self._break, name="xcoll-break", daemon=True).start()

    def close(self) -> None:
        """Stops."""
        self._stop.set()

    def _learn(self) -> None:
        unchanged = 0
        while not self._stop.is_set() and self._lost is None:
            try:
                found = _compat.gloo_addresses(self._client)
            except Exception:  # the store has gone: the watch knows more
                return
            unchanged = unchanged + 1 if found and found == self._addresses else 0
            self._addresses = found or self._addresses
            self._stop.wait(_LOOK_SELDOM_S if unchanged > _LOOKS_UNCHANGED else _LOOK_S)

    def _break(self) -> None:
        place, since = self._place(), time.monotonic()
        while not self._stop.is_set():
            if self._addresses:
                break_connections(self._addresses)
            if (now := self._place()) != place:
                place, since = now, time.monotonic()
            if self.guarded is not None and time.monotonic() - since > self._stuck_s:
                self._end()
            self._stop.wait(_AGAIN_S)

    def _place(self) -> object:
        """Where the guarded thread is: the same object and number as long as it does not move."""
        frame = sys._current_frames().get(self.guarded or 0)
        return (id(frame), frame.f_lasti) if frame else None

    def _end(self) -> None:
        print(
            f"xcoll: {self._lost}\nxcoll: this process has been in one call for {self._stuck_s:g} s"
            f" since then and can't be brought out of it: it is ended with exit code {EXIT_CODE}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)
        os._exit(EXIT_CODE)
