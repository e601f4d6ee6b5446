"""How long the device computes in a compiled program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from xcoll.hardware import Device
from xcoll.hlo.loops import trip_count
from xcoll.hlo.peaks import Peaks
from xcoll.hlo.products import products
from xcoll.hlo.reader import KINDS
from xcoll.hlo.text import Instruction, Module, num_bytes, shapes
from xcoll.hlo.touched import Touched
from xcoll.units import readable_seconds

# Nothing is computed, or what is costs where its result is used (a prefetch runs beside the rest).
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "opt-barrier",
    "optimization-barrier",
    "partition-id",
    "replica-id",
    "domain",
    "copy-start",
    "slice-start",
    "dynamic-slice-start",
    "custom-call-start",  # to the SparseCores of a TPU: its own cores go on
)
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "SliceId", "AsyncCollective")
# A kernel that sends by itself (a custom call) computes as well.
_COLLECTIVES = frozenset(KINDS) - {"custom-call"}
_MOVES = _COLLECTIVES | {f"{kind}-start" for kind in _COLLECTIVES}

_PREFETCHES = {"copy-start", "copy-done", "slice-start", "slice-done"}

_PLAUSIBLE = (0.75, 2.0)
"""What ``optimal_seconds`` may be of a roofline that counts as it does."""


class Compute:
    """How long the instructions of a program compute.

    Made by `compute_of`.

    Attributes:
      time_s: of one run of the program, loops multiplied; None where the device is unknown. It is
        the sum of `instruction_s` over the program's entry computation.
      source: in words, where the figures come from.
      platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``; empty where the device is unknown.
    """

    time_s: float | None
    source: str
    platform: str

    def __init__(self, module: Module, peaks: Peaks | None):
        """Takes the roofline of a device.

        Args:
          module: the program.
          peaks: peak rates of the device; None where they are unknown.
        """
        self._module = module
        self._peaks = peaks
        self._scale = 1.0
        self._touched = {once: Touched(module, on_chip=once) for once in (False, True)}
        self._arithmetic: dict[tuple[str, str], float] = {}
        self._times: dict[tuple[str, str, bool], float] = {}
        self.time_s = None if peaks is None else self._sum_s(module.entry)
        self.source = ""
        self.platform = ""

    def instruction_s(self, computation: str, name: str) -> float:
        """Returns how long one execution of an instruction computes, in seconds.

        Loops in it are multiplied, the most expensive branch is taken; a loop of unknown trip count
        runs once. Collectives, what only names values, and prefetches compute nothing.

        Args:
          computation: name of the computation that the instruction stands in; none that is fused: a
            fusion computes as a whole.
          name: the instruction's.

        Returns:
          0.0 also where the device is unknown.
        """
        return 0.0 if self._peaks is None else self._time_s(computation, name) * self._scale

    def scale_to(self, optimal_s: float) -> float | None:
        """Multiplies all times by the ratio of the compiler's estimate to a like roofline.

        That counts what XLA counts: loop bodies once, arrays on chip as if in memory, and what
        collectives and prefetches read and write.

        Args:
          optimal_s: what the compiler estimates.

        Returns:
          The factor; None, and nothing is multiplied, where the program computes nothing.
        """
        assert self._peaks is not None
        moved_s = self._peaks.memory_s(_moved_bytes(self._module))
        once_s = self._sum_s(self._module.entry, once=True) + moved_s
        if not once_s:
            return None
        factor = optimal_s / once_s
        if _PLAUSIBLE[0] <= factor <= _PLAUSIBLE[1]:
            self._scale = factor
            self.time_s = self._sum_s(self._module.entry) * factor
        return factor

    def _sum_s(self, computation: str, once: bool = False) -> float:
        names = self._module.computations[computation].instructions
        return math.fsum(self._time_s(computation, name, once) for name in names)

    def _time_s(self, computation: str, name: str, once: bool = False) -> float:
        """Returns an instruction's roofline; with ``once``, as ``optimal_seconds`` counts."""
        key = computation, name, once
        if key not in self._times:
            i = self._module.computations[computation].instructions[name]
            called = [self._sum_s(callee, once) for callee in self._called(i)]
            if i.opcode == "while":
                trips = 1 if once else trip_count(self._module, computation, i)
                trips = 1 if trips is None else trips
                test_s, body_s = called
                self._times[key] = (trips + 1) * test_s + trips * body_s
            elif i.opcode == "conditional":
                self._times[key] = max(called)
            elif called:
                self._times[key] = math.fsum(called)
            else:
                self._times[key] = self._alone_s(computation, i, once)
        return self._times[key]

    def _called(self, i: Instruction) -> list[str]:
        """Returns the computations that take an instruction's time."""
        if i.opcode == "while":
            names = dict(i.calls())
            return [names["condition"], names["body"]]
        if i.opcode in ("conditional", "call", "async-start", "call-start"):
            return [callee for _, callee in i.calls()]
        return []

    def _alone_s(self, computation: str, i: Instruction, once: bool) -> float:
        if _is_free(i):
            return 0.0
        assert self._peaks is not None
        key = computation, i.name
        if key not in self._arithmetic:
            made = products(self._module, computation, i)
            self._arithmetic[key] = math.fsum(map(self._peaks.product_s, made))
        touched = self._touched[once].num_bytes(computation, i)
        return max(self._arithmetic[key], self._peaks.memory_s(touched))


def compute_of(
    module: Module,
    counts: Mapping[str, int | None],
    device: Device | None,
    cost_analysis: Mapping[str, Any] | None,
) -> Compute:
    """Works out how long the device computes in one run of a program.

    Each instruction takes its roofline: its matrix products at the device's peak rate for their
    dtype, or what it reads and writes at memory bandwidth, whichever is longer.

    Where the TPU compiler gives its own estimate, ``optimal_seconds``, all times are multiplied by
    one factor: its ratio to a roofline that counts as it does, loop bodies once, arrays on chip as
    if in memory, and the memory traffic of collectives and prefetches too. It is 1.0 to 1.2 in
    programs of matrix products (libtpu takes 85 to 100 % of the peak rates). Where it is not
    between 0.75 and 2 it is not used: it is negative where the compiler has no estimate of some
    instruction (each counts -1 s).

    Args:
      module: the program.
      counts: executions of each computation, from `xcoll.hlo.loops.executions`.
      device: what it runs on; its figures are those of the hardware table of its kind.
      cost_analysis: the compiler's (``compiled.cost_analysis()``), or None.

    Returns:
      Times of all instructions, and of the run; with ``time_s`` None where there is no hardware
      table for the device.
    """
    peaks = Peaks.of(device)
    compute = Compute(module, peaks)
    compute.platform = "" if device is None else device.platform
    if device is None or peaks is None:
        kind = "no device is known" if device is None else f"no peak rates for {device.kind!r}"
        compute.source = f"unknown: {kind}"
        return compute
    roofline = f"roofline of the compiled program at the peak rates of {device.kind}"
    optimal = (cost_analysis or {}).get("optimal_seconds")
    if device.platform != "tpu":
        compute.source = roofline
    elif optimal is None:
        compute.source = f"{roofline} (the compiler gives no optimal_seconds)"
    else:
        factor = compute.scale_to(optimal)
        if factor is None or _PLAUSIBLE[0] <= factor <= _PLAUSIBLE[1]:
            compute.source = (
                f"optimal_seconds of the TPU compiler ({_time(optimal)}), with loops multiplied and"
                " without the memory traffic of collectives and prefetches"
            )
        else:
            why = f"{factor:.2g} times a roofline that counts as it does"
            if optimal <= 0:
                why = "not positive: the compiler has no estimate of some instructions"
            compute.source = f"{roofline} (optimal_seconds, {_time(optimal)}, is {why})"
    if any(number is None for number in counts.values()):
        compute.source += "; loops of unknown trip count counted once"
    return compute


def _time(time_s: float) -> str:
    """Returns an estimate as people read it; one that is no time, as it is."""
    is_time = 0 <= time_s < math.inf
    return readable_seconds(time_s) if is_time else f"{time_s:.3g} s"


def _is_free(i: Instruction) -> bool:
    if i.opcode in _FREE or i.opcode.endswith(("-update", "-done")):
        return True
    if i.opcode in _MOVES:
        return True
    return i.opcode == "custom-call" and any(
        target in (i.attribute("custom_call_target") or "") for target in _FREE_TARGETS
    )


def _moved_bytes(module: Module) -> int:
    """Returns what XLA counts for transfers: operands and results, and results of dones again."""
    total = 0
    for computation in module.computations.values():
        for i in computation.instructions.values():
            if {i.opcode, i.opcode.replace("-done", "-start")} & _MOVES or i.opcode in _PREFETCHES:
                types = [i.type]
                if not i.opcode.endswith("-done"):
                    types += [computation.instructions[name].type for name in i.operands]
                total += sum(num_bytes(*array) for text in types for array in shapes(text))
    return total
