"""How the processes of a run meet before jax starts: all there, all of one mind, or an error.

Process 0 listens on the coordinator's port, which jax takes over afterwards. The connections stay:
over them the processes watch each other until the end.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time

from xcoll.errors import StartError
from xcoll.hosts.lines import Line
from xcoll.hosts.members import Member, disagreement, named, read_member
from xcoll.hosts.places import listen

BUSY_S = 5.0
"""How long a port may still be in use: by a run that is just ending."""
SAY_S = 5.0
"""After this a process that waits says so."""
_SETTLE_S = 1.0
_STATUS_S = 0.5


def take_port(host: str, port: int, timeout_s: float = BUSY_S) -> socket.socket:
    """Listens on the coordinator's port; waits so long if another program still has it.

    Raises:
      StartError: another program has it, or this host may not.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            in_use = error.errno == errno.EADDRINUSE
            raise StartError(
                f"initialize: process 0 can't listen on port {port}: "
                + (
                    f"another program of this host uses it (ss -ltnp 'sport = :{port}' shows"
                    " which). End that, perhaps an earlier run, or give all processes another port"
                    if in_use
                    else f"{error}. Give a coordinator_bind_address that this host has, and a port"
                    " that it may use"
                )
            ) from error


_logger = logging.getLogger("xcoll")


class Meeting:
    """What process 0 knows of those that have come.

    Args:
      me: process 0.
      listener: on the coordinator's port.
    """

    def __init__(self, me: Member, listener: socket.socket) -> None:
        self.me = me
        self.listener = listener
        self.here: dict[Line, Member] = {}
        self._unknown: dict[Line, str] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def hold(self, timeout_s: float) -> dict[int, tuple[Member, Line]]:
        """Returns all others with their connections, once they are here.

        Raises:
          StartError: they don't agree, or have not all come in time; all that are here are told.
        """
        start = time.monotonic()
        deadline = start + timeout_s
        next_status, said = 0.0, False
        problem, settled = None, deadline
        try:
            while True:
                self._listen(0.1)
                now = time.monotonic()
                if found := disagreement([self.me, *self.here.values()]):
                    if problem is None:
                        settled = min(now + _SETTLE_S, deadline)  # who else comes is named too
                    problem = found
                    if now >= settled:
                        raise StartError(
                            f"initialize: {problem}. Start all processes again, each with the same"
                            " num_processes and versions, and a process_id of its own"
                        )
                elif len(self.here) == self.me.num_processes - 1:
                    break
                if now >= deadline:
                    raise StartError(self._missing(timeout_s))
                if not said and now >= start + SAY_S:
                    said = True
                    _logger.warning(
                        "initialize: %s waits for %s, at most %g s",
                        self.me,
                        self._absent(),
                        timeout_s,
                    )
                if now >= next_status:
                    next_status = now + _STATUS_S
                    self._tell(waiting=True)
        except StartError as error:
            self._tell(refused=str(error))
            self._leave()
            raise
        self._selector.close()
        self.listener.close()
        for stranger in self._unknown:
            stranger.close()
        everyone = [self.me, *self.here.values()]
        self._tell(go=[member.message() for member in everyone])
        return {member.process_id: (member, line) for line, member in self.here.items()}

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self.listener:
                try:
                    connection, (address, *_) = self.listener.accept()
                except OSError:  # it has gone again, or strangers have taken all descriptors
                    for stranger in list(self._unknown):
                        self._forget(stranger)
                    continue
                line = Line(connection)
                self._unknown[line] = address.removeprefix("::ffff:")
                self._selector.register(line, selectors.EVENT_READ)
                continue
            line = key.data or key.fileobj  # type: ignore[assignment]
            messages = line.receive()
            if messages and line in self._unknown:
                member = read_member(messages[0], self._unknown.pop(line))
                if member is not None:
                    self.here[line] = member
            if line.closed or line.foreign:
                self._forget(line)
        for line in self.here:
            line.flush()

    def _forget(self, line: Line) -> None:
        self._selector.unregister(line)
        self.here.pop(line, None)
        self._unknown.pop(line, None)
        line.close()

    def _absent(self) -> str:
        come = {member.process_id for member in self.here.values()}
        others = range(1, self.me.num_processes)
        return named((i for i in others if i not in come), len(others) - len(come))

    def _missing(self, timeout_s: float) -> str:
        here = ", ".join(str(member) for member in (self.me, *self.here.values()))
        return (
            f"initialize: {self._absent()} of {self.me.num_processes} did not come within"
            f" {timeout_s:g} s. Here: {here}. Start the missing ones, with this coordinator's"
            " address, or give more time (initialization_timeout=)"
        )

    def _tell(self, **message: object) -> None:
        for line in self.here:
            line.send(**message)

    def _leave(self) -> None:
        """Closes all once they have heard why."""
        self.listener.close()
        deadline = time.monotonic() + 1.0
        for line in [*self.here, *self._unknown]:
            while line in self.here and not line.closed and time.monotonic() < deadline:
                line.wait(0.1)
            line.close()
        self._selector.close()
