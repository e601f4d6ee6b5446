"""A connection that carries lines of JSON, and never blocks."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from typing import Any

_MOST_BYTES = 1 << 22


class Line:
    """One connection.

    Attributes:
      closed: the other side can't be heard any more.
      foreign: it said something that is no line of JSON, so that it is another program.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.closed = False
        self.foreign = False
        self._out = b""
        self._in = b""

    def fileno(self) -> int:
        """The descriptor, for `selectors` and `select`."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message as soon as the other side takes it."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what has not gone yet."""
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            # Who does not listen has a bounded queue; it is lost before this matters.
            self._out = self._out[:_MOST_BYTES]
        except OSError:
            self._out = b""

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come."""
        try:
            while not self.closed and len(self._in) < _MOST_BYTES:
                data = self.socket.recv(65536)
                self._in += data
                self.closed = not data
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._in = self._in.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if isinstance(message, dict):
                messages.append(message)
            else:
                self.foreign = True
        self.foreign |= bool(self._in) and not self._in.startswith(b"{")
        return messages

    def wait(self, timeout_s: float) -> list[dict[str, Any]]:
        """Returns the messages that have come, after at most ``timeout_s`` seconds."""
        if not self.closed:
            select.select([self], [self] if self._out else [], [], max(timeout_s, 0.0))
        self.flush()
        return self.receive()

    def close(self) -> None:
        """Closes it in order: what was sent still arrives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()
