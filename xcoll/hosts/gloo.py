"""Gloo's connections of this process, and how to break them.

A collective that waits for a lost host waits for long: its connection may still look whole, and
devices that are not its neighbours would wait even where it is known to be broken. Broken on this
side, all connections fail at once, and XLA raises an error that can be caught.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

_DESCRIPTORS = ("/proc/self/fd", "/dev/fd")


def break_connections(addresses: bytes) -> int:
    """Shuts down the connections of this process whose one end is a given address.

    Args:
      addresses: socket addresses as the kernel writes them, anywhere in these bytes.

    Returns:
      How many there were.
    """
    broken = 0
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):
            ends = connection.getsockname(), connection.getpeername()
            if any(_kernel_form(connection.family, end) in addresses for end in ends):
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def descriptors() -> list[str]:
    """Returns the numbers of this process's descriptors, where the system tells them."""
    place = next((place for place in _DESCRIPTORS if os.path.isdir(place)), None)
    return sorted(os.listdir(place)) if place else []


def _kernel_form(family: int, end: tuple[str, int]) -> bytes:
    """Returns family, port and address as they stand in C's ``sockaddr``."""
    port = struct.pack("!H", end[1])
    packed = socket.inet_pton(family, end[0].partition("%")[0])
    between = b"\0\0\0\0" if family == socket.AF_INET6 else b""
    return port + between + packed


def _sockets() -> Iterator[socket.socket]:
    """Yields copies of this process's TCP sockets."""
    for name in descriptors():
        with contextlib.suppress(OSError, ValueError):
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(number))
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy
            else:
                copy.close()
