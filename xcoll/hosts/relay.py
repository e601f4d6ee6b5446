"""A stand-in for the coordinator on this host, so that its loss does not end this process.

jax's client ends its process, with no way to catch that, as soon as its connection to the
coordinator breaks (a callback for this exists, but can't be written in Python: its argument has no
conversion). It is therefore connected to this relay, which passes everything on, and keeps the
client's side open and silent when the coordinator's side breaks or `freeze` is called.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator

_BUFFER_BYTES = 1 << 18
_ATTEMPT_S = 3.0


class Relay:
    """Listens on loopback and passes on what comes, both ways.

    Args:
      target: host and port of the coordinator.
      timeout_s: how long to try to reach it.
    """

    def __init__(self, target: tuple[str, int], timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="xcoll-relay", daemon=True).start()

    def freeze(self) -> None:
        """Passes nothing on any more; the client's connections stay open until the process ends."""
        self._stopped.set()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            client, _ = self._listener.accept()
            with self._lock:
                self._open.append(client)
            threading.Thread(
                target=self._pass_on, args=(client,), name="xcoll-relay", daemon=True
            ).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = self._connect()
        if server is None:
            return
        with self._lock:
            self._open.append(server)
        with selectors.DefaultSelector() as selector:
            for here, there in ((client, server), (server, client)):
                here.settimeout(None)
                selector.register(here, selectors.EVENT_READ, there)
            for data, here, there in self._chunks(selector):
                if not data:
                    if here is client:  # it has shut down, so the coordinator may know
                        with contextlib.suppress(OSError):
                            there.shutdown(socket.SHUT_WR)
                            client.close()
                    return
                try:
                    there.sendall(data)
                except OSError:
                    if there is client:
                        server.close()
                    return

    def _chunks(
        self, selector: selectors.DefaultSelector
    ) -> Iterator[tuple[bytes, socket.socket, socket.socket]]:
        """Yields what came, from where, and to where it goes, until it is frozen."""
        while not self._stopped.is_set():
            for key, _ in selector.select(0.5):
                here: socket.socket = key.fileobj  # type: ignore[assignment]
                try:
                    data = here.recv(_BUFFER_BYTES)
                except OSError:
                    data = b""
                if self._stopped.is_set():
                    return
                yield data, here, key.data

    def _connect(self) -> socket.socket | None:
        deadline = time.monotonic() + self._timeout_s
        while not self._stopped.is_set() and time.monotonic() < deadline:
            try:
                server = socket.create_connection(self._target, _ATTEMPT_S)
            except OSError:
                time.sleep(0.05)
                continue
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return server
        return None
