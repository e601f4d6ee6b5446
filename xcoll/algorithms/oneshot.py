"""Direct and native forms: whole XLA collectives, with an explicit fold where values combine.

The direct sums are ``((x0 + x1) + x2) + ...`` in rank order whatever the payload and mesh, which
is what makes them deterministic.

References:
  Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
  MPICH", IJHPCA 19(1), 2005. TensorRT-LLM and NCCL call the two all-reduce forms one-shot and
  two-shot.
"""

from __future__ import annotations

from xcoll.schedule import ClosedForm, FoldStep, NativeStep, Phase, Schedule, Step

_NATIVE: dict[str, NativeStep] = {
    "all_reduce": NativeStep("all_reduce"),
    "reduce_scatter": NativeStep("reduce_scatter"),
    "all_gather": NativeStep("all_gather"),
    "all_to_all": NativeStep("all_to_all"),
}


def direct_all_reduce(num_ranks: int, *, shots: int = 2) -> Schedule:
    """Builds the direct all-reduce.

    Args:
      num_ranks: number of ranks.
      shots: 1: every rank gathers every payload and folds them all, one step, ``n - 1``
        payloads received. 2: all-to-all, fold the own share, all-gather: ``2 (n - 1) / n``.
    """
    gather = NativeStep("all_gather")
    steps: tuple[Step, ...] = (NativeStep("all_to_all"), FoldStep(), gather)
    if shots == 1:
        steps = (gather, FoldStep())
    return Schedule(
        algorithm="direct",
        collective="all_reduce",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=steps if num_ranks > 1 else (),
        enter="own" if shots == 1 else "full",
        # One-shot: every rank folds for itself, and all must round alike.
        replicates_sums=shots == 1,
    )


def direct_reduce_scatter(num_ranks: int) -> Schedule:
    """Builds the direct reduce-scatter: all-to-all, then fold the own share."""
    return Schedule(
        algorithm="direct",
        collective="reduce_scatter",
        num_ranks=num_ranks,
        num_slots=num_ranks,
        steps=(NativeStep("all_to_all"), FoldStep()) if num_ranks > 1 else (),
    )


def direct_all_gather(num_ranks: int) -> Schedule:
    """Builds the direct all-gather: XLA's own."""
    return _whole("direct", "all_gather", num_ranks)


def direct_all_to_all(num_ranks: int) -> Schedule:
    """Builds the direct all-to-all: XLA's own."""
    return _whole("direct", "all_to_all", num_ranks)


def native_schedule(collective: str, num_ranks: int) -> Schedule:
    """Builds the schedule that is one XLA collective."""
    return _whole("native", collective, num_ranks)


def _whole(algorithm: str, collective: str, num_ranks: int) -> Schedule:
    return Schedule(
        algorithm=algorithm,
        collective=collective,
        num_ranks=num_ranks,
        num_slots=1 if collective == "all_reduce" else num_ranks,
        steps=(_NATIVE[collective],) if num_ranks > 1 else (),
        enter="own" if collective == "all_gather" else "full",
    )


def native_form(collective: str, num_ranks: int) -> ClosedForm:
    """Returns the closed form of one XLA collective."""
    if num_ranks == 1:
        return ClosedForm(1, ())
    if collective == "all_reduce":
        return ClosedForm(1, (Phase(1, 1, kind=collective, reduce=True),))
    operand = 1 if collective == "all_gather" else num_ranks
    reduce = collective == "reduce_scatter"
    return ClosedForm(num_ranks, (Phase(1, operand, kind=collective, reduce=reduce),))


def direct_form(collective: str, num_ranks: int, *, shots: int = 2) -> ClosedForm:
    """Returns the closed form of every direct schedule."""
    n = num_ranks
    if n == 1:
        return ClosedForm(1, ())
    exchange, gather = Phase(1, n, kind="all_to_all"), Phase(1, 1, kind="all_gather")
    fold = Phase(1, n, kind="fold", reduce=True)
    if collective == "all_reduce":
        return ClosedForm(n, (gather, fold) if shots == 1 else (exchange, fold, gather))
    if collective == "reduce_scatter":
        return ClosedForm(n, (exchange, fold))
    return ClosedForm(n, (gather,) if collective == "all_gather" else (exchange,))
