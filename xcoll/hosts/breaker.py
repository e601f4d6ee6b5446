"""What brings the main thread out of a collective when hosts are lost: catchable, or at the end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from xcoll import _compat
from xcoll.hosts.gloo import break_connections, descriptors

_LOOK_S = 0.1
_LOOK_SELDOM_S = 5.0
_JOIN_S = 0.5
_STORE_S = 3.0
_AGAIN_S = 0.2
EXIT_CODE = 70


class Breaker:
    """Learns the addresses of Gloo's connections while all is well, and breaks them afterwards.

    Args:
      client: jax's key-value store.
      stuck_s: a process that is still in one and the same call so long after the loss is ended.

    Attributes:
      guarded: the thread that is to come out, by its identifier; None: none has to.
    """

    def __init__(self, client: Any, stuck_s: float) -> None:
        self.guarded: int | None = None
        self._client = client
        self._stuck_s = stuck_s
        self._addresses = b""
        self._stop = threading.Event()
        self._learner = threading.Thread(target=self._learn, name="xcoll-gloo", daemon=True)
        self._last_look = threading.Thread(target=self._look, name="xcoll-gloo", daemon=True)
        self._learner.start()

    def lost(self, message: str, then: Callable[[], None]) -> None:
        """Begins to break connections, until `close`.

        Args:
          message: what is printed if this process has to be ended.
          then: called once the store is not needed any more.
        """
        work = threading.Thread(
            target=self._break, args=(message, then), name="xcoll-break", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # Python is ending, and so is this process
            work.start()

    def close(self) -> None:
        """Stops."""
        self._stop.set()
        # They should not be inside the client when Python ends; they may hang there for good.
        for thread in (self._learner, self._last_look):
            if thread.is_alive():
                thread.join(_JOIN_S)

    def _learn(self) -> None:
        seen: object = None
        next_look = 0.0
        while not self._stop.wait(_LOOK_S):
            # New connections are new descriptors: the store is asked only when there are some.
            now = descriptors()
            if now != seen and time.monotonic() >= next_look:
                seen, before = now, self._addresses
                if not self._look():
                    return
                known = bool(before) and before == self._addresses
                next_look = time.monotonic() + (_LOOK_SELDOM_S if known else 0.0)

    def _look(self) -> bool:
        try:
            self._addresses = _compat.gloo_addresses(self._client) or self._addresses
        except Exception:  # the store has gone: the watch knows more
            return False
        return True

    def _break(self, message: str, then: Callable[[], None]) -> None:
        self._last_look.start()
        start = time.monotonic()
        place, since, done = self._place(), start, False
        while not self._stop.is_set():
            if self._addresses:
                break_connections(self._addresses)
            if not done and time.monotonic() - start > _STORE_S:
                done = True
                then()
            if (now := self._place()) != place:
                place, since = now, time.monotonic()
            if self.guarded is not None and time.monotonic() - since > self._stuck_s:
                self._end(message)
            self._stop.wait(_AGAIN_S)

    def _place(self) -> object:
        """Where the guarded thread is: the same object and number as long as it does not move."""
        frame = sys._current_frames().get(self.guarded or 0)
        return (id(frame), frame.f_lasti) if frame else None

    def _end(self, message: str) -> None:
        print(
            f"xcoll: {message}\nxcoll: this process has been in one call for {self._stuck_s:g} s"
            f" since then and can't be brought out of it: it is ended with exit code {EXIT_CODE}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)
        os._exit(EXIT_CODE)
