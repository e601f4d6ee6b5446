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

import jax

from xcoll import _compat
from xcoll.errors import PlanMismatchError, XcollWarning
from xcoll.hosts.run import check_hosts
from xcoll.waits import Waits

_PREFIX = "xcoll/agreement"
_SUMMARY_LENGTH = 4000
_LOOK_S = 1.0

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

    def place(process_id: int, of_round: int) -> str:
        return f"{_PREFIX}/{key}/{of_round}/{process_id}"

    said = {here: (fingerprint, summary[:_SUMMARY_LENGTH])}
    client.key_value_set(place(here, number), json.dumps(said[here]), allow_overwrite=True)
    waits = Waits(client, here, key, said[here][1], process_ids)
    deadline = time.monotonic() + timeout_s
    for other in others:
        while other not in said:
            # At least a moment, to find what is there although an earlier wait used up the time.
            left_s = max(deadline - time.monotonic(), 0.01)
            text = _compat.key_value_wait(client, place(other, number), min(left_s, _LOOK_S))
            if text is not None:
                said[other] = tuple(json.loads(text))
            elif time.monotonic() >= deadline:
                break
            else:
                check_hosts()
                waits.check(other)
    if missing := [other for other in others if other not in said]:
        raise TimeoutError(
            f"agree({key!r}): process {here} waited {timeout_s:g} s, and {_named(missing)} did not"
            f" answer. Either {'it has' if len(missing) == 1 else 'they have'} stopped or not got"
            " to this program yet (give more time), or not all processes run the same program"
        )
    waits.over()
    if number > 1:
        # All have come to this round, so that all are done with the last one.
        client.key_value_delete(place(here, number - 1))
    if len({print_ for print_, _ in said.values()}) > 1:
        raise PlanMismatchError(_mismatch(key, here, said))


def _mismatch(key: str, here: int, said: dict[int, tuple[str, str]]) -> str:
    by_print: dict[str, list[int]] = {}
    for process_id in sorted(said):
        by_print.setdefault(said[process_id][0], []).append(process_id)
    parts = [
        f"{_named(ids)}: fingerprint {print_}\n{said[ids[0]][1]}"
        for print_, ids in by_print.items()
    ]
    return (
        f"agree({key!r}): the processes of this program plan it differently (this is process"
        f" {here}); run, they would deadlock or add up the wrong numbers. Give all of them the"
        " same policy, topology and versions of xcoll and jax.\n" + "\n".join(parts)
    )


def _named(process_ids: Sequence[int]) -> str:
    plural = "es" if len(process_ids) > 1 else ""
    return f"process{plural} {', '.join(map(str, process_ids))}"
