"""`xcoll.initialize`: `jax.distributed.initialize` with bounds, checks and a watch."""

from __future__ import annotations

import math
import operator
import os
from typing import Any

import jax

from xcoll import _compat
from xcoll.hosts import places
from xcoll.hosts.bounds import JAX_TIMEOUT_S, Bounds
from xcoll.hosts.joining import join
from xcoll.hosts.lines import Line
from xcoll.hosts.meeting import BUSY_S, Meeting, take_port
from xcoll.hosts.members import Member, this_process
from xcoll.hosts.relay import Relay
from xcoll.hosts.run import Hosts


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Any = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: float = 60,
    heartbeat_timeout_seconds: float = 12,
    shutdown_timeout_seconds: float = 300,
    coordinator_bind_address: str | None = None,
    *,
    collective_timeout_seconds: int = 300,
    stuck_timeout_seconds: float = 60,
    **kwargs: Any,
) -> Hosts:
    """Starts `jax.distributed` so that a lost, late or wrong host is an error that names it.

    Takes the place of `jax.distributed.initialize`, in all processes of a run, before anything that
    starts jax's backends; the ``with`` block starts them. Arguments that are None are found as jax
    finds them.

    Args:
      coordinator_address: host and port of process 0.
      num_processes: how many there are.
      process_id: which this one is.
      local_device_ids: as jax takes it.
      cluster_detection_method: as jax takes it.
      initialization_timeout: seconds for all processes to be there. One that comes late is waited
        for; one that does not come is named.
      heartbeat_timeout_seconds: a process that says nothing for so many seconds is lost: it is
        stopped or cut off. One that ends is known at once.
      shutdown_timeout_seconds: seconds that the end of the ``with`` block waits for the others.
      coordinator_bind_address: where process 0 listens; all addresses of its host by default.
      collective_timeout_seconds: for one collective on CPU; more than the slowest takes, plus what
        the fastest process waits in it for the slowest (to compile, for example). Not used
        if ``XLA_FLAGS`` has ``--xla_cpu_collective_timeout_seconds``.
      stuck_timeout_seconds: a process that is still in one and the same call so many seconds after
        a loss prints the error and is ended with exit code 70: nothing else is left there.
      **kwargs: others of `jax.distributed.initialize`. With certificates (``mtls_…``) the loss of
        process 0 itself ends the others without an error that can be caught.

    Returns:
      The run; use it as a context manager around the training loop.

    Raises:
      StartError: process 0 can't be reached or its port is taken, processes are missing, or they do
        not agree on their number, ids or versions; in all processes that are there.
      HostLostError: at the end of the ``with`` block or inside (see `Hosts`).
      ValueError: an argument is missing or malformed.
      RuntimeError: `jax.distributed` is already initialised, or jax's backends have started.

    Example:
      >>> import jax, xcoll
      >>> def main(train_step, state, batches, save):  # the same in each process
      ...     try:
      ...         with xcoll.initialize("10.0.0.1:8476", num_processes=2, process_id=0) as hosts:
      ...             for batch in batches:
      ...                 state = train_step(state, batch)
      ...             save(state)
      ...     except xcoll.HostLostError as error:
      ...         print(f"{error.hosts} lost")  # exit; the launcher starts all again
      ...         raise
    """
    bounds = Bounds(
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        collective_timeout_seconds=collective_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
        stuck_timeout_seconds=stuck_timeout_seconds,
    )
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "initialize: jax.distributed is already initialised; call this once, and in place of"
            " jax.distributed.initialize"
        )
    address, count, here, device_ids = _compat.distributed_parameters(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        cluster_detection_method,
        int(initialization_timeout),
    )
    me, address = _checked(address, count, here)
    bind = (
        coordinator_bind_address
        or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        or f"[::]:{places.split(address)[1]}"
    )
    bounds.apply()
    members, lines = _meet(me, address, bind, bounds)
    relay = None
    if me.process_id and not any(name.startswith("mtls") for name in kwargs):
        relay = Relay(places.split(address), bounds.initialization_timeout)
    hosts = Hosts(me, members, lines, relay, bounds)

    def start() -> None:
        jax.distributed.initialize(
            coordinator_address=relay.address if relay else address,
            num_processes=me.num_processes,
            process_id=me.process_id,
            local_device_ids=device_ids,
            cluster_detection_method="deactivate",
            # All are there. Its own end of waiting is one that can't be caught.
            initialization_timeout=JAX_TIMEOUT_S,
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=JAX_TIMEOUT_S,
            shutdown_timeout_seconds=math.ceil(shutdown_timeout_seconds),
            **kwargs,
        )

    hosts.start_jax(start)
    _compat.set_coordinator_address(address)
    return hosts


def _checked(address: str | None, count: int | None, here: int | None) -> tuple[Member, str]:
    found = {"coordinator_address": address, "num_processes": count, "process_id": here}
    if missing := [name for name, value in found.items() if value is None]:
        raise ValueError(
            f"initialize: {', '.join(missing)} neither given nor found in the environment; pass"
            " coordinator_address='HOST:PORT', num_processes and process_id"
        )
    assert address is not None and count is not None and here is not None
    try:
        count, here = operator.index(count), operator.index(here)
    except TypeError:
        raise ValueError(
            f"initialize(num_processes={count!r}, process_id={here!r}): must be whole numbers;"
            " convert them with int()"
        ) from None
    if not 0 <= here < count:
        raise ValueError(
            f"initialize(num_processes={count}, process_id={here}): ids run from 0 to"
            " num_processes - 1"
        )
    places.split(address)
    return this_process(here, count), address


def _meet(
    me: Member, address: str, bind: str, bounds: Bounds
) -> tuple[dict[int, Member], dict[int, Line]]:
    """Returns all members, and this process's connections by the id of the other side."""
    if me.process_id:
        members, line = join(
            me,
            address,
            timeout_s=bounds.initialization_timeout,
            silence_s=bounds.heartbeat_timeout_seconds,
        )
        return members, {0: line}
    listener = take_port(
        *places.split(bind, "coordinator_bind_address"), min(BUSY_S, bounds.initialization_timeout)
    )
    come = Meeting(me, listener).hold(bounds.initialization_timeout)
    members = {0: me, **{i: member for i, (member, _) in sorted(come.items())}}
    return members, {i: line for i, (_, line) in come.items()}
