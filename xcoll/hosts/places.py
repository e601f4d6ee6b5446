"""Network addresses: as text, as a socket to listen on, and why nothing answers there."""

from __future__ import annotations

import errno
import socket


def split(address: str, argument: str = "coordinator_address") -> tuple[str, int]:
    """Returns the host and the port of an address, given as an argument of `initialize`.

    >>> split("10.77.0.1:8476"), split("[::1]:8476")
    (('10.77.0.1', 8476), ('::1', 8476))

    Raises:
      ValueError: there is no port.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(
            f"initialize({argument}={address!r}): no port from 1 to 65535; write HOST:PORT, for"
            " example '10.0.0.1:8476'"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """Listens on a port, on all addresses where ``host`` says so.

    Alone, unlike gRPC, which shares a port with any other program that shares it too: two runs
    would then mix.

    Raises:
      OSError: it can't be had.
    """
    if host in ("", "::", "0.0.0.0") and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(("" if host == "::" else host, port), family=family)


def why(error: OSError) -> str:
    """Says why no connection could be made."""
    if isinstance(error, socket.gaierror):
        return f"its name can't be looked up ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused: the host is there, but nothing listens on the port"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return (
            "nothing answered at all: the address is wrong, the host is down, or a firewall drops"
            " the packets"
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"there is no way to it ({error.strerror})"
    return str(error)
