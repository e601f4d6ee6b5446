"""A run of several processes that watch each other: what `xcoll.initialize` returns."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import jax

from xcoll import _compat
from xcoll.errors import HostLostError
from xcoll.hosts.bounds import Bounds
from xcoll.hosts.breaker import Breaker
from xcoll.hosts.lines import Line
from xcoll.hosts.members import Member, named
from xcoll.hosts.relay import Relay
from xcoll.hosts.watch import Watch

_LINGER_S = 5.0
_LAST_WORDS_S = 2.0
# What XLA's errors of a broken collective or key-value store have in them.
_OF_THE_NETWORK = (
    "gloo", "nccl", "unavailable", "deadline_exceeded", "connection", "timed out", "aborted",
    "cancelled", "coordination",
)  # fmt: skip
_STATUS = re.compile("[A-Z]+(_[A-Z]+)*: ")


_current: Hosts | None = None


def check_hosts() -> None:
    """Raises a `HostLostError` if this is a watched run and a process of it is lost."""
    if _current is not None:
        _current.check()


def unless_lost(call: Callable[[], None]) -> None:
    """Makes a call that waits for other processes.

    Raises:
      HostLostError: this is a watched run, and a process of it is lost.
    """
    if _current is None:
        call()
    else:
        _current.unless_lost(call)


class Hosts:
    """The processes of a run, from `xcoll.initialize` to the end of the ``with`` block.

    The block begins with the start of jax's backends, where all processes wait for each other too.
    In it, an error of jax that comes of a lost process becomes a `HostLostError`. At the end
    of the block all processes wait for each other; then `jax.distributed` is shut down.

    Attributes:
      members: all processes, by id.
    """

    def __init__(
        self,
        me: Member,
        members: Mapping[int, Member],
        lines: Mapping[int, Line],
        relay: Relay | None,
        bounds: Bounds,
    ) -> None:
        self.members = dict(members)
        self._me = me
        self._bounds = bounds
        self._relay = relay
        self._breaker: Breaker | None = None
        self._open = True
        self._watch = Watch(
            me, lines, silence_s=bounds.heartbeat_timeout_seconds, on_loss=self._on_loss
        )
        self._pid = os.getpid()
        global _current
        _current = self
        self._watch.start()
        atexit.register(self._at_exit)

    def check(self) -> None:
        """Raises a `HostLostError` if a process is lost; takes no time.

        For a loop that computes for long between two collectives.

        Raises:
          HostLostError: a process is lost.
        """
        if self._watch.verdict is not None and (error := self._error()):
            raise error

    def start_jax(self, start: Callable[[], None]) -> None:
        """Lets jax connect; leaves if that fails."""
        with self._leaving():
            self.unless_lost(start)
        self._breaker = Breaker(_compat.key_value_client(), self._bounds.stuck_timeout_seconds)

    def __enter__(self) -> Hosts:
        with self._leaving():
            self.unless_lost(jax.devices)
        if self._breaker:
            self._breaker.guarded = threading.get_ident()
        return self

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def unless_lost(self, call: Callable[[], object]) -> None:
        """Makes a call that waits for other processes in jax, and can't be brought out of that.

        It is made in a thread of its own, so that this one can leave. A call that can end soon
        after a loss should: a thread that comes out of jax while Python ends, aborts the process.

        Raises:
          HostLostError: a process is lost.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                call()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        threading.Thread(target=work, name="xcoll-start", daemon=True).start()
        last = None
        while last is None or time.monotonic() < last:
            with contextlib.suppress(queue.Empty):
                error = done.get(timeout=0.05)
                if error is not None:
                    raise error
                return
            if last is None and self._watch.verdict:
                # The others may have left over what this call is about to find out as well.
                last = time.monotonic() + _LAST_WORDS_S
        self.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._breaker:
            self._breaker.guarded = None
        if not self._open:
            return
        if error is None:
            self._finish()
            return
        lost = self._explain(error)
        self._abandon("" if lost else _short(error))
        if lost and not isinstance(error, HostLostError):
            raise lost from error

    def _explain(self, error: BaseException) -> HostLostError | None:
        """Returns the loss that an error comes of, or None if it is the program's own."""
        if isinstance(error, HostLostError):
            return error
        if not _is_of_jax(error):
            return None
        text = str(error).lower()
        if any(word in text for word in _OF_THE_NETWORK):
            # It may be seen here before the watch is sure.
            wait_s = 2.0 * self._bounds.heartbeat_timeout_seconds
            self._watch.judged.wait(wait_s)
            if self._watch.verdict is None:
                error.add_note(
                    f"xcoll: all {len(self.members)} processes of the run still answered"
                    f" {wait_s:g} s after this. A link between two of them may be cut, or they run"
                    " different programs, or one was slower than collective_timeout_seconds"
                )
        return self._error()

    def _finish(self) -> None:
        """Waits for all to come to the end, then shuts jax's connection down."""
        self._watch.done()
        deadline = time.monotonic() + self._bounds.shutdown_timeout_seconds
        while not self._watch.all_done.wait(0.05):
            if lost := self._error():
                self._abandon("")
                raise lost
            if time.monotonic() > deadline:
                self._abandon("it waited too long for others at the end")
                raise TimeoutError(
                    f"Hosts: {self._me} waited {self._bounds.shutdown_timeout_seconds:g} s at the"
                    " end of the block for the others. Give more time"
                    " (shutdown_timeout_seconds=), or let all do the same work"
                )
        jax.distributed.shutdown()
        self._close()

    def _abandon(self, reason: str) -> None:
        """Leaves without waiting for anybody."""
        self._watch.leave(reason, _LINGER_S if self._me.process_id == 0 else 1.0)
        if self._relay:
            self._relay.freeze()
        _compat.abandon_distributed()
        self._close()

    def _close(self) -> None:
        global _current
        self._open, _current = False, None
        if self._breaker:
            self._breaker.close()
        self._watch.close()

    def _on_loss(self) -> None:
        freeze = self._relay.freeze if self._relay else lambda: None
        if self._breaker:
            self._breaker.lost(str(self._error()), freeze)
        else:
            freeze()

    def _error(self) -> HostLostError | None:
        verdict = self._watch.verdict
        if verdict is None:
            return None
        ids = tuple(verdict.reasons)
        lost = f"{named(ids, len(ids))} of {len(self.members)}"
        said = "; ".join(f"{self.members[i]}: {reason}" for i, reason in verdict.reasons.items())
        alone = " Or this host itself is cut off: it hears nobody." if verdict.alone else ""
        return HostLostError(
            f"{lost} {'are' if len(ids) > 1 else 'is'} lost. {said}."
            f"{alone} (Seen by {self._me}.) The step that ran is lost in all processes, which all"
            " end. Start them again, from the last checkpoint",
            process_ids=ids,
            hosts=tuple(self.members[i].host for i in ids),
        )

    def _at_exit(self) -> None:
        """Leaves in order where the program has no ``with`` block or did not come to its end."""
        if not self._open or os.getpid() != self._pid:
            return
        error = getattr(sys, "last_exc", None)
        if error is None:
            self._finish()
        else:
            self._abandon("" if self._watch.verdict else _short(error))


def _is_of_jax(error: BaseException) -> bool:
    """Whether a program of jax failed while it ran.

    Where a process has one device, XLA:CPU runs a small program in the thread that calls it, and
    jax raises what failed as a plain `ValueError`: the name of a status and its message.
    """
    plain = type(error) is ValueError and _STATUS.match(str(error)) is not None
    return plain or isinstance(error, jax.errors.JaxRuntimeError)


def _short(error: BaseException) -> str:
    text = str(error)
    return f"it stopped with {type(error).__name__}{': ' if text else ''}{text[:2000]}"
