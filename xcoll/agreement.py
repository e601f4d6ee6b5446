"""The check that all processes of a program plan alike.

Processes that run different plans wait for each other for ever or, where the sizes happen to
match, add up the wrong numbers. So before a program that spans processes is run, each writes
the fingerprint of its plans to the key-value store of `jax.distributed` and reads the others'.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from xcoll import _compat
from xcoll.errors import PlanMismatchError, XcollWarning
from xcoll.hosts.members import named
from xcoll.hosts.run import check_hosts, unless_lost
from xcoll.waits import Waits

_PREFIX = "xcoll/agreement"
_SUMMARY_LENGTH = 4000
_LOOK_S = 0.25

_lock = threading.Lock()
_rounds: Counter[str] = Counter()


def participants(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """Returns the processes that own devices of a mesh, and so have to agree on what it runs.

    Args:
      mesh: any mesh.

    Returns:
      Process ids in increasing order. Empty where there is nobody to agree with: one process, or
      a mesh of compile-only devices, which no process runs.
    """
    if jax.process_count() == 1:
        return ()
    devices = set(mesh.devices.flat)
    try:
        present = set(jax.devices(next(iter(devices)).platform))
    except RuntimeError:  # compile-only devices of a platform that is not here
        return ()
    found = sorted({device.process_index for device in devices})
    return tuple(found) if len(found) > 1 and devices <= present else ()


def agree(
    key: str,
    fingerprint: str,
    summary: str,
    process_ids: Sequence[int],
    timeout_s: float = 60.0,
) -> None:
    """Returns once all processes have come here with the same fingerprint.

    Every process of ``process_ids`` has to call this. A key may be used again: the n-th call with
    it is compared with the n-th of the others.

    Args:
      key: names the program and the mesh, not the plans: processes that plan differently must
        find each other under it.
      fingerprint: short text that is equal exactly where the plans are.
      summary: the plans for a reader, shown if they differ.
      process_ids: the processes that take part (`participants`). Others return at once, as
        everybody does where fewer than two are named.
      timeout_s: seconds to wait, for all other processes together.

    Raises:
      PlanMismatchError: the fingerprints differ, or another process waits for this one at another
        program; on every process, naming them all.
      HostLostError: a process is lost (`xcoll.initialize`).
      TimeoutError: a process has not come here in time; the message says which.

    Warns:
      XcollWarning: `jax.distributed` is not initialised, so that nothing can be compared.
    """
    here = jax.process_index()
    others = sorted(set(process_ids) - {here})
    if not others or here not in process_ids:
        return
    client = _compat.key_value_client()
    if client is None:
        warnings.warn(
            f"agree({key!r}): processes {sorted(process_ids)} run one program, but jax.distributed"
            " is not initialised, so that their plans cannot be compared; call"
            " jax.distributed.initialize() first",
            XcollWarning,
            stacklevel=2,
        )
        return
    with _lock:
        _rounds[key] += 1
        number = _rounds[key]

    exchange = Exchange(
        client=client,
        key=key,
        number=number,
        here=here,
        others=others,
        fingerprint=fingerprint,
        summary=summary[:_SUMMARY_LENGTH],
        timeout_s=timeout_s,
    )
    unless_lost(exchange.run)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What this process says in one round of a key, and what it hears.

    Attributes:
      client: the key-value store.
      key: of the program.
      number: the round.
      here: this process.
      others: those that it is compared with.
      fingerprint: of its plans.
      summary: of its plans, for a reader.
      timeout_s: how long it waits.
    """

    client: Any
    key: str
    number: int
    here: int
    others: Sequence[int]
    fingerprint: str
    summary: str
    timeout_s: float

    def run(self) -> None:
        """Returns once all have said the same; raises as `agree` does."""
        said = {self.here: (self.fingerprint, self.summary)}
        text = json.dumps(said[self.here])
        self.client.key_value_set(self._place(self.here, self.number), text, allow_overwrite=True)
        waits = Waits(self.client, self.here, self.key, self.summary, self.others)
        deadline = time.monotonic() + self.timeout_s
        for other in self.others:
            if (heard := self._hear(other, deadline, waits)) is not None:
                said[other] = tuple(json.loads(heard))
        if missing := [other for other in self.others if other not in said]:
            raise TimeoutError(
                f"agree({self.key!r}): process {self.here} waited {self.timeout_s:g} s, and"
                f" {named(missing, len(missing))} did not answer. Either"
                f" {'it has' if len(missing) == 1 else 'they have'} stopped or not got to this"
                " program yet (give more time), or not all processes run the same program"
            )
        waits.over()
        if self.number > 1:
            # All have come to this round, so that all are done with the last one.
            self.client.key_value_delete(self._place(self.here, self.number - 1))
        if len({print_ for print_, _ in said.values()}) > 1:
            raise PlanMismatchError(_mismatch(self.key, self.here, said))

    def _hear(self, other: int, deadline: float, waits: Waits) -> str | None:
        """Returns what another process says, or None if that has not come by the deadline."""
        while True:
            # At least a moment, to find what is there although an earlier wait used up the time.
            left_s = max(deadline - time.monotonic(), 0.01)
            place = self._place(other, self.number)
            text = _compat.key_value_wait(self.client, place, min(left_s, _LOOK_S))
            if text is not None or time.monotonic() >= deadline:
                return text
            waits.check(other)
            check_hosts()

    def _place(self, process_id: int, number: int) -> str:
        return f"{_PREFIX}/{self.key}/{number}/{process_id}"


def _mismatch(key: str, here: int, said: dict[int, tuple[str, str]]) -> str:
    by_print: dict[str, list[int]] = {}
    for process_id in sorted(said):
        by_print.setdefault(said[process_id][0], []).append(process_id)
    parts = [
        f"{named(ids, len(ids))}: fingerprint {print_}\n{said[ids[0]][1]}"
        for print_, ids in by_print.items()
    ]
    return (
        f"agree({key!r}): the processes of this program plan it differently (this is process"
        f" {here}); run, they would deadlock or add up the wrong numbers. Give all of them the"
        " same policy, topology and versions of xcoll and jax.\n" + "\n".join(parts)
    )
