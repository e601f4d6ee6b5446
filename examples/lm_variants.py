"""One model trained in several ways at once: what each variant is, and what it has done so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import lm_codecs
import lm_runs
from jax.sharding import Mesh
from lm_job import Job, initializer, parameters

import xcoll
from xcoll import hlo

Tree = Any

ALONE = "without collectives"
"""The step that each device does for itself: what there is to compute."""


def compressions(mesh: Mesh) -> dict[str, lm_codecs.Compression]:
    """Returns what gradients are sent through over the first axis: codecs with error feedback."""
    axis = mesh.axis_names[0]
    return {
        name: feedback
        for name in ("int8", "int4")
        if (feedback := lm_codecs.compression(lm_codecs.parse_codec(f"{name}@{axis}"), None, True))
    }


class Variant:
    """A compiled step, its own state, and what was measured.

    Attributes:
      name: plain, exact, int8, int4, or `ALONE`.
      report: of its collectives; None where xcoll did not see them.
      compile_s: time to trace, lower and compile.
      losses: of each step, nats a byte.
      spans: start and end of each step on this process, by `time.monotonic`.
    """

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        init: Callable[[], tuple[Tree, Tree]],
        tokens: jax.Array,
        mesh: Mesh,
    ) -> None:
        self.name, self.mesh = name, mesh
        start = time.monotonic()
        self.params, self.opt_state = init()
        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.program = jitted.lower(self.params, self.opt_state, tokens).compile()
        self.compile_s = time.monotonic() - start
        reports = getattr(step, "reports", [None])  # what xcoll.optimize returns has them
        self.report: xcoll.Report | None = reports[-1]
        # Connections are made in the first step, so that one comes before those that are timed.
        jax.block_until_ready(self.program(*init(), tokens))
        self.losses: list[float] = []
        self.spans: list[tuple[float, float]] = []

    def step(self, tokens: jax.Array) -> None:
        """Takes a step, and times it to the end of all that it computes."""
        start = time.monotonic()
        out = jax.block_until_ready(self.program(self.params, self.opt_state, tokens))
        self.spans.append((start, time.monotonic()))
        self.params, self.opt_state, loss = out
        self.losses.append(float(loss))

    def sent(self) -> dict[str, Any]:
        """Counts bytes of a step in the compiled program."""
        slow = self.mesh.axis_names[0]
        return {
            "busiest_device_bytes": hlo.wire_bytes(self.program, self.mesh),
            "crossing_bytes": hlo.crossing_bytes(self.program, self.mesh, slow),
            "wire_dtypes": lm_runs.wire_dtypes(self.program, self.mesh, slow),
        }


def make_variants(
    job: Job,
    make_step: Callable[..., Any],
    tokens: jax.Array,
    *,
    topology: xcoll.Topology | str | None,
    seed: int,
    told: Callable[[str], None],
) -> dict[str, Variant]:
    """Compiles plain, exact, each of `compressions`, and the step `ALONE`; all start alike.

    Args:
      job: model, optimizer and mesh.
      make_step: makes the step of a job.
      tokens: a batch, for its shape.
      topology: what to plan for.
      seed: of the parameters.
      told: is called with the name of each before it is compiled.
    """

    def optimised(job: Job, policy: xcoll.Policy) -> Any:
        return xcoll.optimize(make_step(job), policy=policy, topology=topology)

    jobs: dict[str, tuple[Job, Any]] = {
        "plain": (job, make_step(job)),
        "exact": (job, optimised(job, xcoll.Policy())),
    }
    for name, compression in compressions(job.mesh).items():
        optimizer, policy = compression.apply(job.optimizer, xcoll.Policy(), job.mesh)
        lossy = replace(job, optimizer=optimizer, syncs=True)
        jobs[name] = lossy, optimised(lossy, policy)
    jobs[ALONE] = job, make_step(job, alone=True)
    made: dict[str, Variant] = {}
    start = parameters(job, seed)
    for name, (own, step) in jobs.items():
        told(name)
        made[name] = Variant(name, step, initializer(own, start), tokens, job.mesh)
    return made
