"""Which transfers of a compiled program run beside compute, and beside how much of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xcoll.hlo.loops import trip_count
from xcoll.hlo.reader import Collective
from xcoll.hlo.shared_links import share_links
from xcoll.hlo.spans import Span
from xcoll.hlo.text import Instruction, Module
from xcoll.hlo.work import Compute


@dataclass(frozen=True)
class Overlap:
    """What the schedule puts beside one transfer.

    Attributes:
      is_async: the device goes on while it runs: it has a start and a done.
      work_s: time that the device computes between them, in one execution.
    """

    is_async: bool
    work_s: float


def overlaps(
    module: Module,
    collectives: Sequence[Collective],
    placed: Sequence[Span],
    compute: Compute,
    times_s: Mapping[str, float] | None = None,
) -> dict[str, Overlap]:
    """Finds for every collective whether it is asynchronous, and what compute runs beside it.

    The order of a scheduled program is its schedule (see `xcoll.hlo.spans`). Between start and done
    counts what `Compute.instruction_s` says: collectives take none of it. A loop, branch or call
    between them counts with what it computes and has not hidden inside itself.

    Compute hides a second of each link once: of several transfers over the same links, the one that
    started first is hidden first, for as long as it takes; what is left hides the next. Transfers
    over different links (see `xcoll.hlo.shared_links`) are hidden by the same compute.

    Args:
      module: the program.
      collectives: all of it has, as `xcoll.hlo.reader.collectives_of` returns them.
      placed: where those that are asynchronous run, as `xcoll.hlo.spans.spans` returns it.
      compute: its compute, of the same module.
      times_s: how long each transfer takes, by name; one that is missing takes all compute until
        its done.

    Returns:
      One entry for each of the collectives, by its name; ``work_s`` is no more than the
      time that is given.
    """
    rows = {row.name: row for row in collectives}
    found = {name: Overlap(is_async=False, work_s=0.0) for name in rows}
    hidden = _Hidden(module, compute, rows, placed, times_s or {})
    for computation in {span.computation for span in placed}:
        hidden.used_s(computation)
    return found | {name: Overlap(is_async=True, work_s=s) for name, s in hidden.work_s.items()}


class _Hidden:
    """Shares the compute of each computation out among its transfers."""

    def __init__(
        self,
        module: Module,
        compute: Compute,
        rows: Mapping[str, Collective],
        placed: Sequence[Span],
        times_s: Mapping[str, float],
    ) -> None:
        self._module = module
        self._compute = compute
        self._rows = rows
        self._times_s = times_s
        self._spans: dict[str, list[Span]] = {}
        for span in placed:
            self._spans.setdefault(span.computation, []).append(span)
        self._shared: dict[tuple[str, str], bool] = {}
        self._used: dict[str, float] = {}
        self.work_s: dict[str, float] = {}

    def used_s(self, computation: str) -> float:
        """Returns how much of a computation's time hides transfers that start in it or below."""
        if computation not in self._used:
            self._used[computation] = self._share_out(computation)
        return self._used[computation]

    def _share_out(self, computation: str) -> float:
        instructions = list(self._module.computations[computation].instructions.values())
        times = [self._compute.instruction_s(computation, i.name) for i in instructions]
        inside = [
            min(time, self._inside_s(computation, i))
            for time, i in zip(times, instructions, strict=True)
        ]
        # For each instruction: the transfers that it hides, and for how long.
        takers: list[list[tuple[Collective, float]]] = [[] for _ in times]
        filled = list(inside)
        for span in sorted(self._spans.get(computation, []), key=lambda s: s.steps[0]):
            row = self._rows[span.row]
            left = self._times_s.get(span.row, math.inf)
            self.work_s[span.row] = 0.0
            for step in span.steps:
                if times[step] <= inside[step]:
                    continue
                before = inside[step] + math.fsum(
                    s for other, s in takers[step] if self._share(row, other)
                )
                part = min(max(times[step] - before, 0.0), left)
                if part > 0:
                    takers[step].append((row, part))
                    filled[step] = max(filled[step], before + part)
                    left -= part
                    self.work_s[span.row] += part
        return math.fsum(filled)

    def _share(self, one: Collective, other: Collective) -> bool:
        key = one.name, other.name
        if key not in self._shared:
            torus = self._compute.platform == "tpu"
            self._shared[key] = share_links(one, other, torus=torus)
        return self._shared[key]

    def _inside_s(self, computation: str, i: Instruction) -> float:
        """Returns how much of an instruction's time hides transfers inside it."""
        if i.opcode not in ("while", "conditional", "call", "async-start", "call-start"):
            return 0.0
        used = [self.used_s(callee) for _, callee in i.calls()]
        if i.opcode != "while":
            return max(used, default=0.0)
        trips = trip_count(self._module, computation, i)
        return math.fsum(used) * (1 if trips is None else trips)
