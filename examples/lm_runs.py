"""Trains with several steps at once, in turn, and measures each."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

import xcoll
from xcoll import hlo
from xcoll.hlo.text import num_bytes as num_bytes_of

Tree = Any

BLOCK = 4
"""Steps that one run takes before the other has its turn."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run measured.

    Attributes:
      name: plain or optimised.
      losses: training loss of each step, nats a byte.
      held_out: loss on files that were not trained on.
      tokens_per_s: from the median time of the steps after the first.
      compile_s: time to trace, lower and compile.
      busiest: bytes that the busiest device sends a step, by mesh axis, counted in the compiled
        program.
      total: bytes that all devices together send a step, by mesh axis, counted likewise.
      collectives: how often each collective runs in a step of the compiled program.
      dtypes: for each mesh axis, the bytes in ``total`` by dtype, as HLO writes it.
      audit: every collective of the compiled program.
    """

    name: str
    losses: list[float] = field(repr=False)
    held_out: float
    tokens_per_s: float
    compile_s: float
    busiest: dict[str, int]
    total: dict[str, int]
    collectives: dict[str, int]
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    audit: hlo.Audit | None = field(default=None, repr=False)

    @property
    def figures(self) -> dict[str, Any]:
        """All but the audit, for a file."""
        return {name: value for name, value in vars(self).items() if name != "audit"}


class _Training:
    """A compiled step, its own state, and what has been measured so far."""

    def __init__(self, name: str, step: Any, state: tuple[Tree, Tree], tokens: jax.Array) -> None:
        self.name = name
        self.params, self.opt_state = state
        self.num_tokens = tokens.shape[0] * (tokens.shape[1] - 1)
        self.losses: list[float] = []
        self.times: list[float] = []
        start = time.perf_counter()
        self.program = step.lower(*state, tokens).compile()
        self.compile_s = time.perf_counter() - start

    def step(self, tokens: jax.Array) -> None:
        start = time.perf_counter()
        self.params, self.opt_state, loss = self.program(self.params, self.opt_state, tokens)
        self.losses.append(float(loss))
        self.times.append(time.perf_counter() - start)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / statistics.median(self.times[1:] or self.times)

    def run(
        self,
        held_out: Callable[[Tree], float],
        mesh: jax.sharding.Mesh,
        topology: xcoll.Topology | str | None,
    ) -> Run:
        collectives: Counter[str] = Counter()
        for collective in hlo.collectives(self.program):
            collectives[collective.kind] += collective.executions or 1
        return Run(
            name=self.name,
            losses=self.losses,
            held_out=held_out(self.params),
            tokens_per_s=self.tokens_per_s,
            compile_s=self.compile_s,
            busiest=hlo.wire_bytes(self.program, mesh),
            total={axis: hlo.crossing_bytes(self.program, mesh, axis) for axis in mesh.axis_names},
            collectives=dict(collectives),
            dtypes={axis: wire_dtypes(self.program, mesh, axis) for axis in mesh.axis_names},
            audit=hlo.audit(self.program, mesh=mesh, topology=topology),
        )


def wire_dtypes(program: Any, mesh: jax.sharding.Mesh, axis: str) -> dict[str, int]:
    """Returns the bytes that all devices send over an axis, by the dtype they travel in.

    Counted in the compiled program as `xcoll.hlo.crossing_bytes` does.
    """
    sent: Counter[str] = Counter()
    places = np.unravel_index(np.arange(mesh.devices.size), mesh.devices.shape)
    place = places[mesh.axis_names.index(axis)]
    for collective in hlo.collectives(program):
        crossing = sum(
            num_bytes
            for source, to, num_bytes in hlo.sends(collective, mesh)
            if place[source] != place[to]
        )
        if crossing:
            # Operations of several dtypes may have been combined.
            sizes: Counter[str] = Counter()
            for dtype, dims in collective.operands:
                sizes[dtype] += num_bytes_of(dtype, dims)
            for dtype, size in sizes.items():
                share = Fraction(size, sizes.total())
                sent[dtype] += int(crossing * share * (collective.executions or 1))
    return dict(sent)


def train(
    steps: Mapping[str, Any],
    make_state: Callable[[str], tuple[Tree, Tree]],
    batches: Iterator[jax.Array],
    *,
    num_steps: int,
    held_out: Callable[[Tree], float],
    mesh: jax.sharding.Mesh,
    console: Console,
    topology: xcoll.Topology | str | None = None,
) -> list[Run]:
    """Compiles and runs each ``step(params, opt_state, tokens)`` for a number of steps.

    All train on the same batches, each from a state of its own. They take turns, a few steps
    each and first one, then the other first, so that whatever else the machine does falls on
    both alike.

    Args:
      steps: jitted functions by name; they may donate the state.
      make_state: makes a step's parameters and optimizer state, the same each time.
      batches: one sharded array of tokens a step.
      num_steps: how many.
      held_out: maps parameters to the held-out loss.
      mesh: what the steps run on.
      console: where progress is shown.
      topology: what the mesh lies on, for the audits; None reads it off the devices.
    """
    first = next(batches)
    trainings = [_Training(name, step, make_state(name), first) for name, step in steps.items()]
    remaining = itertools.islice(itertools.chain([first], batches), num_steps)
    width = max(map(len, ("optimised", *steps)))
    columns = (
        TextColumn(f"{{task.description:>{width}}}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        turns: list[tuple[_Training, TaskID]] = [
            (t, progress.add_task(t.name, total=num_steps, loss=math.nan, rate=0.0))
            for t in trainings
        ]
        while block := list(itertools.islice(remaining, BLOCK)):
            for training, task in turns:
                for tokens in block:
                    training.step(tokens)
                    rate = training.tokens_per_s
                    progress.update(task, advance=1, loss=training.losses[-1], rate=rate)
            turns.reverse()
    return [training.run(held_out, mesh, topology) for training in trainings]
