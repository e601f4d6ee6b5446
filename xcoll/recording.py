"""What planned groups are given and give, sent to the host while a program runs.

Only inside `recording`, whose state is part of jit's cache key: elsewhere programs have no trace of
it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xcoll.plan import Plan


@dataclass(frozen=True)
class Record:
    """One group of a program that is recorded.

    Attributes:
      number: no other group has it.
      sites: the rows of the report that it stands for, in order.
      copies: which of the group's distinct operands each of them has.
    """

    number: int
    sites: tuple[Any, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """What one device was given and gave, once.

    Attributes:
      rank: its rank over the axes of the group.
      replica: its place among the groups of ranks, over the other axes.
      operands: of each distinct site.
      results: the same.
    """

    rank: int
    replica: int
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]


@dataclass
class Recorded:
    """All of one group.

    Attributes:
      record: which.
      plan: what it did.
      params: of each distinct site, the parameters of the equation that it was.
      samples: from every device, for every time that it ran; in order for each device.
    """

    record: Record
    plan: Plan
    params: tuple[Mapping[str, Any], ...]
    samples: list[Sample] = field(default_factory=list)


class Recorder:
    """Collects the samples of one run."""

    def __init__(self) -> None:
        self.groups: dict[int, Recorded] = {}
        self._num_records = 0
        self._lock = threading.Lock()

    def record(self, sites: Sequence[Any], copies: Sequence[int]) -> Record:
        """Returns a record of its own for a group."""
        self._num_records += 1
        return Record(self._num_records, tuple(sites), tuple(copies))

    def send(
        self,
        record: Record,
        plan: Plan,
        params: Sequence[Mapping[str, Any]],
        other_axes: tuple[str, ...],
        operands: Sequence[jax.Array],
        results: Sequence[jax.Array],
    ) -> None:
        """Traces what brings one device's arrays to the host.

        Args:
          record: the group.
          plan: what it does.
          params: of each distinct site.
          other_axes: the mesh's axes that are not the group's, all manual here.
          operands: of each distinct site, on one device.
          results: the same.
        """
        group = Recorded(record, plan, tuple(params))
        with self._lock:
            self.groups[record.number] = group

        def add(rank: Any, replica: Any, *arrays: Any) -> None:
            host = tuple(np.array(array) for array in arrays)
            count = len(operands)
            with self._lock:
                group.samples.append(Sample(int(rank), int(replica), host[:count], host[count:]))

        rank = jax.lax.axis_index(plan.request.axes)
        replica = jax.lax.axis_index(other_axes) if other_axes else jnp.int32(0)
        jax.debug.callback(add, rank, replica, *operands, *results)


_active = jax.make_user_context(None)


def recording(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Records every planned group of the programs that are traced and run in the context."""
    return _active(recorder)


def recorder() -> Recorder | None:
    """Returns the recorder of the context, or None outside any."""
    return _active.value
