"""Programs run once and compared with what they have to return, before anything is timed."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from bench.timing import Meeting
from bench.wire.expected import REPLICATED, Expected
from bench.wire.programs import Program, ranks_here
from xcoll.costmodel import block_of


class WrongResultError(Exception):
    """A program returned something else than it has to."""


@dataclass(frozen=True)
class Checked:
    """What the first run showed.

    Attributes:
      deviation: the largest over all ranks, as `Expected.deviation` has it.
      limit: the largest that is right.
      first_s: what it took, the longest of all processes.
    """

    deviation: float
    limit: float
    first_s: float


def check(
    name: str, program: Program, x: jax.Array, expected: Expected, meeting: Meeting, mesh: Mesh
) -> Checked:
    """Runs a program and checks its results on all processes.

    Returns:
      What it showed, on every process the same.

    Raises:
      WrongResultError: on every process, where any rank's result deviates by more than is right,
        or replicas differ in any bit.
    """
    plan = program.plan
    is_lossy = plan is not None and plan.is_lossy
    limit = plan.max_error if plan is not None and is_lossy else expected.roundoff
    block = block_of(plan.stages) if plan is not None and is_lossy else 1
    ranks = ranks_here(mesh)
    worst, digests, wrong = 0.0, set(), ""
    meeting.wait()
    start = time.monotonic()
    results = jax.block_until_ready(program.run(x))
    first_s = time.monotonic() - start
    for shard in results.addressable_shards:
        result = np.asarray(shard.data)
        digests.add(hashlib.sha256(result.tobytes()).hexdigest())
        try:
            worst = max(worst, expected.deviation(ranks[shard.device], result, block))
        except ValueError as err:
            wrong = wrong or f"rank {ranks[shard.device]}: {err}"
    everyones = meeting.share([worst, sorted(digests), wrong, first_s])
    worst = max(one[0] for one in everyones)
    if first := next((one[2] for one in everyones if one[2]), None):
        raise WrongResultError(f"{name}: {first}")
    if worst > limit:
        raise WrongResultError(f"{name}: a deviation of {worst:.3g}, and {limit:.3g} is allowed")
    copies = {digest for one in everyones for digest in one[1]}
    if expected.collective in REPLICATED and len(copies) > 1:
        raise WrongResultError(f"{name}: {len(copies)} different results on replicas")
    return Checked(worst, limit, max(one[3] for one in everyones))
