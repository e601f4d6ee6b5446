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
from dataclasses import dataclass, field
from typing import Any

from xcoll.hosts.lines import Line
from xcoll.hosts.members import Member

_ENDED = (
    "its connection closed, so its process has ended (killed, out of memory or crashed: see the end"
    " of its own output)"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who is lost.

    Attributes:
      reasons: what is known of each, by process id.
    """

    reasons: Mapping[int, str] = field(default_factory=dict)


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
        last_beat = 0.0
        settled: float | None = None
        heard = dict.fromkeys(self._lines, time.monotonic())
        turned = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for process_id, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, process_id)
            while not self._closing.is_set():
                ready = [key.data for key, _ in selector.select(min(self._interval_s, 0.05))]
                now = time.monotonic()
                if now - turned > self._silence_s / 2:
                    # This process itself stood still: what others said meanwhile is still to read.
                    heard = dict.fromkeys(heard, now)
                turned = now
                for process_id in ready:
                    heard[process_id] = now
                    self._hear(process_id)
                    if self._lines[process_id].closed:
                        selector.unregister(self._lines[process_id])
                        self._ended(process_id)
                for process_id, at in heard.items():
                    if now - at > self._silence_s and process_id not in self._gone | self._done:
                        self._lose(process_id, self._silent(process_id, now - at))
                if self._reasons and settled is None:
                    settled = now + (self._interval_s if self.me.process_id == 0 else 0.0)
                if settled is not None and now >= settled and self.verdict is None:
                    self._judge()
                self._speak(beat=now - last_beat >= self._interval_s)
                if now - last_beat >= self._interval_s:
                    last_beat = now
                if self.me.process_id == 0 and len(self._done) == self.me.num_processes:
                    if not self.all_done.is_set():
                        self._send(all_done=True)
                        self.all_done.set()
            self._speak(beat=False)
            for line in self._lines.values():
                line.close()

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
                self._gone.add(process_id)
            elif "done" in message:
                with self._lock:
                    self._done.add(process_id)
            elif "all_done" in message:
                self.all_done.set()
            elif "lost" in message:
                for other, reason in message["lost"].items():
                    self._lose(int(other), reason)

    def _ended(self, process_id: int) -> None:
        finished = self.all_done.is_set() or self._closing.is_set()
        if process_id not in self._gone and not finished:
            self._lose(process_id, _ENDED)
        self._gone.add(process_id)

    def _silent(self, process_id: int, silent_s: float) -> str:
        here = ", or this host itself is cut off" if process_id == 0 else ""
        return (
            f"it has said nothing for {silent_s:.1f} s: its process is stopped, its host is down or"
            f" cut off from the network{here}"
        )

    def _lose(self, process_id: int, reason: str) -> None:
        if self.verdict is None and process_id != self.me.process_id:
            self._reasons.setdefault(process_id, reason)
        self._gone.add(process_id)

    def _judge(self) -> None:
        self.verdict = Verdict(reasons=dict(sorted(self._reasons.items())))
        if self.me.process_id == 0:
            self._send(lost={str(i): reason for i, reason in self.verdict.reasons.items()})
        self._on_loss()
        self.judged.set()
