"""How a process finds process 0, and hears from it that all are there."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from xcoll.errors import StartError
from xcoll.hosts.lines import Line
from xcoll.hosts.meeting import BUSY_S, SAY_S
from xcoll.hosts.members import Member, read_member
from xcoll.hosts.places import split, why

_ATTEMPT_S = 3.0
_PAUSE_S = 0.1
_ANSWER_S = 5.0
_logger = logging.getLogger("xcoll")


def join(
    me: Member, coordinator: str, *, timeout_s: float, silence_s: float
) -> tuple[dict[int, Member], Line]:
    """Returns all members and the connection to process 0, once all are there.

    Args:
      me: this process.
      coordinator: address and port of process 0.
      timeout_s: how long process 0 is looked for; once found, it bounds the wait for others.
      silence_s: how long process 0 may say nothing.

    Raises:
      StartError: process 0 can't be found, or says what is wrong.
    """
    deadline = time.monotonic() + timeout_s
    foreign_since = None
    reason, attempts, said = "", 0, False
    while True:
        attempts += 1
        left_s = max(deadline - time.monotonic(), 0.1)
        try:
            connection = socket.create_connection(split(coordinator), min(_ATTEMPT_S, left_s))
        except OSError as error:
            reason = why(error)
        else:
            line = Line(connection)
            line.send(**me.message())
            with contextlib.ExitStack() as closing:
                closing.callback(line.close)
                if members := _hear(line, coordinator, silence_s):
                    closing.pop_all()
                    return members, line
            reason = "something answers there, but it is not process 0 of a run that is starting"
            foreign_since = foreign_since or time.monotonic()
        now = time.monotonic()
        if not said and now >= deadline - timeout_s + SAY_S:
            said = True
            _logger.warning(
                "initialize: %s looks for process 0 at %s, at most %g s: %s",
                me,
                coordinator,
                timeout_s,
                reason,
            )
        if now >= deadline or (foreign_since is not None and now >= foreign_since + BUSY_S):
            break
        time.sleep(_PAUSE_S)
    if foreign_since is not None:
        raise StartError(
            f"initialize: {me} found at {coordinator} a program that is not process 0 of this run:"
            " the port is in use by another program, or by a run that is already going on, or"
            " process 0 called jax.distributed.initialize and not xcoll.initialize. Give all"
            " processes a port that is free on process 0's host"
        )
    raise StartError(
        f"initialize: {me} did not reach process 0 at {coordinator} within {timeout_s:g} s"
        f" ({attempts} attempts; the last time {reason}). Check coordinator_address and that"
        " process 0 runs, or give more time (initialization_timeout=)"
    )


def _hear(line: Line, coordinator: str, silence_s: float) -> dict[int, Member] | None:
    """Returns all members, or None if it is not process 0 that answers."""
    known = False
    heard = time.monotonic()
    while True:
        for message in line.wait(0.2):
            known |= not message.keys().isdisjoint(("waiting", "refused", "go"))
            heard = time.monotonic()
            if "refused" in message:
                raise StartError(str(message["refused"]))
            if "go" in message:
                members = [read_member(m) for m in message["go"]]
                return {m.process_id: m for m in members if m}
        silent_s = time.monotonic() - heard
        if line.foreign or (line.closed and not known):
            return None
        if line.closed or silent_s > (silence_s if known else _ANSWER_S):
            if not known:
                return None
            how = "closed the connection" if line.closed else f"said nothing for {silent_s:.0f} s"
            raise StartError(
                f"initialize: process 0 at {coordinator} {how} while processes gathered: it has"
                " ended or hangs; see its own output, and start all processes again"
            )
