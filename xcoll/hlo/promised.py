"""What a report says that the compiled program will contain, operation by operation."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xcoll import accounting
from xcoll.algorithms import native
from xcoll.hlo.written import Written, WrittenProgram
from xcoll.names import COLLECTIVE_OF
from xcoll.pieces import HLO_KIND
from xcoll.plan import Request, Span, Stage
from xcoll.report import Report, Site
from xcoll.rewrite import INNER_REGION

_PLANNED = frozenset(
    {
        "psum",
        "pmax",
        "pmin",
        "psum_scatter",
        "all_gather",
        "all_to_all",
        "ppermute",
        "pbroadcast",
    }
)
"""Kept sites whose operations are those of XLA's own collective."""
_OTHERS = {"ragged_all_to_all": "ragged-all-to-all", "psend": "send", "precv": "recv"}


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Operations of one kind that one plan, or one kept site, puts into the program.

    Attributes:
      kind: HLO name.
      axes: mesh axes larger than one, in the mesh's order.
      num_bytes: bytes of the operand, per device.
      count: executions in one run of the program; those of one iteration where the plan stands in
        a loop of unknown length.
      in_unknown_loop: it does.
      written: executions if loops of the program run once.
      is_certain: the bytes are known; not so for some kept sites (`Report.kept` says why).
      source: ``file:line`` of the user's code.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    count: int
    in_unknown_loop: bool
    written: int
    is_certain: bool
    source: str


def promises(report: Report, axis_sizes: Mapping[str, int], platform: str) -> tuple[Promise, ...]:
    """Returns everything that a report says will be in the program, kept sites included.

    Args:
      report: made when the program was lowered.
      axis_sizes: the mesh's axes, in its order.
      platform: that it is compiled for.
    """
    found = []
    for site in _firsts(report):
        for kind, axes, num_bytes, count in _operations(site, axis_sizes, platform):
            # An axis of one device is in no group that a program shows.
            shown = tuple(a for a, size in axis_sizes.items() if size > 1 and a in axes)
            if shown and num_bytes:
                found.append(
                    Promise(
                        kind=kind,
                        axes=shown,
                        num_bytes=num_bytes,
                        count=count * (1 if site.count is None else site.count),
                        in_unknown_loop=site.count is None,
                        written=count,
                        is_certain=site.plan is not None
                        or site.collective in ("ppermute", "barrier"),
                        source=site.source,
                    )
                )
    return tuple(found)


class Given:
    """The program that XLA was given, read only where it is asked.

    Args:
      lowered: the program; without it, nothing is known of it.
      axis_sizes: the mesh's axes.
    """

    def __init__(self, lowered: jax.stages.Lowered | None, axis_sizes: Mapping[str, int]):
        self.axis_sizes = axis_sizes
        self._lowered = lowered

    @functools.cached_property
    def _program(self) -> WrittenProgram | None:
        num_axes = sum(size > 1 for size in self.axis_sizes.values())
        return None if self._lowered is None else WrittenProgram(self._lowered, num_axes)

    @property
    def is_partitioned(self) -> bool:
        """Whether something in it is left to the partitioner."""
        return self._program is not None and not self._program.is_manual

    @property
    def collectives(self) -> list[Written]:
        """Those that its text has; loops count once."""
        return [] if self._program is None else self._program.collectives

    def writes(self, kind: str, num_bytes: int, carried_on: str | None = None) -> int:
        """Returns how many operations of a kind and size its text has; loops count once.

        Args:
          kind: the operations'.
          num_bytes: of their operands.
          carried_on: a platform: the size is what its own collectives carry, or that of the text.
        """
        sizes = (
            {w.num_bytes, w.carried_bytes(carried_on)} for w in self.collectives if w.kind == kind
        )
        return sum(num_bytes in found for found in sizes)


def _firsts(report: Report) -> Iterator[Site]:
    """Yields one site of each plan, and every site that has none."""
    yield from (first for first, *_ in report.groups())
    for site in report.sites:
        # In a region with a policy of its own, the sites of a plan after the first send nothing.
        if site.group is None and not (site.kept_reason == INNER_REGION and site.sent == {}):
            yield site


def _operations(
    site: Site, axis_sizes: Mapping[str, int], platform: str
) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
    """Yields kind, axes, bytes and count of what one plan, or a kept site, puts in."""
    if site.plan is not None:
        for o in site.plan.operations:
            yield o.kind, o.axes, o.operand_bytes, o.count
    elif site.collective == "ppermute":
        moved = {axis for axis, ranks in (site.sent or {}).items() if any(ranks)}
        # A TPU sends complex numbers as two arrays.
        pieces = 2 if platform == "tpu" and site.dtype.startswith("complex") else 1
        axes = tuple(moved) if site.sent else site.axes
        yield _kind(site), axes, site.num_bytes // pieces, pieces
    elif site.collective == "barrier":
        yield _kind(site), site.axes, 4, 1
    elif site.collective not in _PLANNED or site.dtype.startswith("key<"):
        yield _kind(site), site.axes, site.num_bytes, 1
    else:
        axes = tuple(axis for axis in site.axes if axis in axis_sizes)
        itemsize = jnp.dtype(site.dtype).itemsize
        request = Request(
            collective=COLLECTIVE_OF[site.collective],
            op="none",
            axes=axes,
            axis_sizes=tuple(axis_sizes[a] for a in axes),
            dtype=site.dtype,
            itemsize=itemsize,
            shapes=((site.num_bytes // itemsize,),),
            platform=platform,
        )
        stage = Stage(request.collective, Span(axes, request.num_ranks), native())
        for o in accounting.operations(request, [stage]):
            yield o.kind, o.axes, o.operand_bytes, o.count


def _kind(site: Site) -> str:
    if site.collective == "barrier":
        return HLO_KIND["all_reduce"]
    if site.collective in _OTHERS:
        return _OTHERS[site.collective]
    return HLO_KIND[COLLECTIVE_OF[site.collective]]
