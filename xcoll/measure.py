"""`measure_error`: the error that a program's collectives really make, site by site."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from xcoll.deviation import deviation
from xcoll.policy import Policy
from xcoll.primitives import Region, bind
from xcoll.printing import as_text, plain_table
from xcoll.recording import Recorded, Recorder, Sample, recording
from xcoll.report import Report, Site
from xcoll.topology import Topology
from xcoll.transform import checked, flattened

NOT_RUN = "it did not run"
NOT_SEEN = "ranks of other processes, whose arrays are not seen here, take part"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The error of one collective.

    Attributes:
      source: ``file:line`` of the user's code.
      collective: jax.lax's name.
      axes: mesh axes it acts over.
      dtype: name of the operand's dtype.
      plan: how its plan reads; None where it was not planned.
      bound: the plan's bound on ``measured``; None where it was not planned.
      measured: ``max over blocks |result - exact| / sum over ranks of the block's largest
        magnitude``, over all ranks and all times that it ran; None where it was not measured.
      reason: why it was not measured; None where it was.
    """

    source: str
    collective: str
    axes: tuple[str, ...]
    dtype: str
    plan: str | None
    bound: float | None
    measured: float | None
    reason: str | None


class Measurement(tuple[Measured, ...]):
    """The rows of `measure_error`, in the order of the program; prints as a table."""

    def to_json(self) -> str:
        """Returns the rows as JSON text."""
        return json.dumps([asdict(row) for row in self], indent=1)

    def __rich__(self) -> Any:
        from rich.console import Group

        table = plain_table("xcoll: errors")
        for name in ("collective", "over", "dtype", "plan"):
            table.add_column(name, overflow="fold")
        for name in ("bound", "measured"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("source", overflow="fold")
        for row in self:
            numbers = ["-" if v is None else f"{v:.2e}" for v in (row.bound, row.measured)]
            what = (row.collective, ", ".join(row.axes), row.dtype, row.plan or "-")
            table.add_row(*what, *numbers, os.path.basename(row.source))
        reasons = dict.fromkeys(row.reason for row in self if row.reason is not None)
        return Group(table, *(f"not measured: {reason}" for reason in reasons))

    def __str__(self) -> str:
        return as_text(self, least_width=100)


def measure_error(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    topology: Topology | str | None = None,
    **kwargs: Any,
) -> Measurement:
    """Runs ``fn`` once and returns the error that each of its collectives really made.

    Every rank's operands and results of what the policy rewrites are brought to the host and
    compared with the exact results in double precision. Slow, and as much host memory is needed as
    they take: to choose a policy with, not to train with. Collectives of ``fn``'s derivatives are
    measured where ``fn`` takes them. NNX arguments are not updated.

    Args:
      fn: as for `optimize`.
      *args: arguments of ``fn``, real arrays.
      policy: as for `optimize`.
      topology: as for `optimize`.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      A tuple with a row for each collective; what is kept has no error measured, and the reason.

    Raises:
      TypeError: an argument is not an array with values, or as for `optimize`.
      ValueError: the policy names an unknown algorithm or codec.

    Example:
      >>> import jax.numpy as jnp
      >>> from xcoll.policy import Policy
      >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
      >>> f = jax.shard_map(
      ...     lambda x: jax.lax.psum(x, "data"),
      ...     mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(),
      ... )
      >>> policy = Policy(codec="int8", algorithm="direct", min_bytes=0)
      >>> (row,) = measure_error(f, jnp.sin(jnp.arange(1024.0)), policy=policy)
      >>> row.plan, row.measured <= row.bound < 0.02
      ('direct/int8', True)
    """
    policy = checked("measure_error", policy, topology)
    call, leaves = flattened(fn, args, kwargs)
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"measure_error: it runs the function, and {leaf} has no values; pass arrays, and"
                " call it outside jax.jit"
            )

    reports: list[Report] = []
    recorder = Recorder()
    with recording(recorder):
        region = Region(policy, topology, sink=reports.append)
        jax.block_until_ready(jax.jit(lambda *xs: bind(call, region, *xs))(*leaves))
        jax.effects_barrier()
    sites = reports[0].sites if reports else ()
    return Measurement(_rows(sites, recorder.groups.values()))


_Result = tuple[float | None, str | None]
"""An error, or why there is none."""


def _rows(sites: Iterable[Site], groups: Iterable[Recorded]) -> Iterator[Measured]:
    """Yields a row a site, each with the next record of one like it."""
    found: dict[Any, list[_Result]] = {}
    for group in groups:
        errors = _errors(group)
        for site, copy in zip(group.record.sites, group.record.copies, strict=True):
            found.setdefault(_key(site), []).append(errors[copy])
    for site in sites:
        plan, error, reason = site.plan, None, site.kept_reason
        if plan is not None and not plan.is_native:
            # What an inner policy rewrites is kept by the outer one, and measured all the same.
            like_it = found.get(_key(site), [])
            error, reason = like_it.pop(0) if like_it else (None, NOT_RUN)
        yield Measured(
            source=site.source,
            collective=site.collective,
            axes=site.axes,
            dtype=site.dtype,
            plan=plan.name if plan else None,
            bound=plan.max_error if plan else None,
            measured=error,
            reason=reason,
        )


def _key(site: Site) -> Any:
    return site.collective, site.axes, site.dtype, site.num_bytes, site.source, site.plan


def _errors(group: Recorded) -> list[_Result]:
    """Returns the largest error of each distinct site of a group, or why there is none."""
    num_ranks = group.plan.request.num_ranks
    by_place: dict[int, dict[int, list[Sample]]] = {}
    for sample in group.samples:
        by_place.setdefault(sample.replica, {}).setdefault(sample.rank, []).append(sample)
    reason = NOT_SEEN if any(len(ranks) < num_ranks for ranks in by_place.values()) else NOT_RUN
    if reason == NOT_SEEN or not by_place:
        return [(None, reason)] * len(group.params)
    errors: list[_Result] = []
    for number, params in enumerate(group.params):
        worst = 0.0
        for ranks in by_place.values():
            for run in zip(*(ranks[rank] for rank in range(num_ranks)), strict=True):
                operands = [sample.operands[number] for sample in run]
                results = [sample.results[number] for sample in run]
                worst = max(worst, deviation(group.plan, params, operands, results))
        errors.append((worst, None))
    return errors
