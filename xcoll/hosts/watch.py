"""How processes know that the others live: heartbeats to process 0 and back.

Process 0 hears all, and tells all who is lost; the others hear process 0. So each process keeps one
connection, and process 0 one to each. A process whose connection closes has ended, one that says
nothing for too long is stopped or cut off.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xcoll.hosts.lines import Line
from xcoll.hosts.members import Member

_TURN_S = 0.05
_ENDED = (
    "its connection closed, so its process has ended (killed, out of memory or crashed: see the end"
    " of its own output)"
)
_TAKEN_FOR_LOST = (
    "it took this process for lost, and left: this process was stopped or cut off for too long"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who is lost.

    Attributes:
      reasons: what is known of each, by process id.
      alone: nobody says anything any more, so that this host may be the one that is cut off.
    """

    reasons: Mapping[int, str]
    alone: bool


class Watch:
    """Beats and listens in a thread of its own, from `start` to `close`.

    Args:
      me: this process.
      lines: the connections by process id: process 0 has one to each, the others one to it.
      silence_s: whoever says nothing for so long is lost.
      on_loss: called once, in the thread of the watch, when there is a verdict.
    """

    def __init__(
        self,
        me: Member,
        lines: Mapping[int, Line],
        *,
        silence_s: float,
        on_loss: Callable[[], None],
    ) -> None:
        self.me = me
        self.verdict: Verdict | None = None
        self.all_done = threading.Event()
        self.judged = threading.Event()
        self._lines = dict(lines)
        self._silence_s = silence_s
        self._interval_s = min(max(silence_s / 10, 0.05), 1.0)
        self._on_loss = on_loss
        self._outbox: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._done: set[int] = set()
        self._gone: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._heard = dict.fromkeys(lines, time.monotonic())
        self._settled: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xcoll-watch", daemon=True)

    def start(self) -> None:
        """Starts to beat and to listen."""
        self._thread.start()

    def say(self, **message: Any) -> None:
        """Tells the other side; process 0 tells all."""
        with self._lock:
            self._outbox.append(message)

    def done(self) -> None:
        """Says that this process has come to the end; `all_done` is set once all have."""
        with self._lock:
            self._done.add(self.me.process_id)
        if self.me.process_id:
            self.say(done=True)

    def leave(self, reason: str, linger_s: float) -> None:
        """Says why this process leaves before the end, and stays until others may have heard."""
        self.say(failed=reason) if reason else self.say(left=True)
        deadline = time.monotonic() + linger_s
        while time.monotonic() < deadline and self._thread.is_alive():
            if not self._outbox and (self.me.process_id or len(self._gone) == len(self._lines)):
                break
            time.sleep(0.02)

    def close(self) -> None:
        """Stops; the connections are closed."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process_id, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, process_id)
            next_beat = turned = time.monotonic()
            while not self._closing.is_set():
                ready = [key.data for key, _ in selector.select(_TURN_S)]
                now = time.monotonic()
                if now - turned > self._silence_s / 2:
                    # This process itself stood still: what others said meanwhile is still to read.
                    self._heard = dict.fromkeys(self._lines, now)
                turned = now
                for process_id in ready:
                    self._heard[process_id] = now
                    self._hear(process_id)
                    if self._lines[process_id].closed:
                        selector.unregister(self._lines[process_id])
                        self._ended(process_id)
                self._look(now)
                self._speak(beat=now >= next_beat)
                if now >= next_beat:
                    next_beat = now + self._interval_s
            self._speak(beat=False)
            for line in self._lines.values():
                line.close()

    def _look(self, now: float) -> None:
        """Draws the conclusions."""
        for process_id, at in self._heard.items():
            if now - at > self._silence_s and process_id not in self._gone:
                self._lose(process_id, self._silent(now - at))
        if self._reasons and self.verdict is None:
            # Process 0 waits a moment for others that are lost by the same cause.
            self._settled = self._settled or now + (0 if self.me.process_id else self._interval_s)
            if now >= self._settled:
                self._judge()
        everyone = self.me.process_id == 0 and len(self._done) == self.me.num_processes
        if everyone and not self.all_done.is_set():
            self._send(all_done=True)
            self.all_done.set()

    def _speak(self, *, beat: bool) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, []
        for message in messages:
            self._send(**message)
        if beat:
            self._send(beat=True)

    def _send(self, **message: Any) -> None:
        for line in self._lines.values():
            if not line.closed:
                line.send(**message)

    def _hear(self, process_id: int) -> None:
        for message in self._lines[process_id].receive():
            if "failed" in message:
                self._lose(process_id, str(message["failed"]))
            elif "left" in message:
                # Who leaves so has lost somebody: if nobody is known here, it was this process.
                if not self._reasons:
                    self._lose(process_id, _TAKEN_FOR_LOST)
                self._gone.add(process_id)
            elif "done" in message:
                with self._lock:
                    self._done.add(process_id)
            elif "all_done" in message:
                self.all_done.set()
            elif "lost" in message:
                for other, reason in message["lost"].items():
                    mine = int(other) == self.me.process_id
                    self._lose(0 if mine else int(other), _TAKEN_FOR_LOST if mine else reason)

    def _ended(self, process_id: int) -> None:
        finished = self.all_done.is_set() or self._closing.is_set()
        if process_id not in self._gone and not finished:
            self._lose(process_id, _ENDED)
        self._gone.add(process_id)

    def _silent(self, silent_s: float) -> str:
        return (
            f"it has said nothing for {silent_s:.1f} s, so its process is stopped, or its host is"
            " down or cut off from the network"
        )

    def _lose(self, process_id: int, reason: str) -> None:
        if self.verdict is None:
            self._reasons.setdefault(process_id, reason)
        self._gone.add(process_id)

    def _judge(self) -> None:
        reasons = dict(sorted(self._reasons.items()))
        silent_since = time.monotonic() - self._silence_s
        alone = reasons.keys() >= self._lines.keys() and max(self._heard.values()) < silent_since
        self.verdict = Verdict(reasons=reasons, alone=alone)
        if self.me.process_id == 0:
            self._send(lost={str(i): reason for i, reason in self.verdict.reasons.items()})
        self.judged.set()
        self._on_loss()
