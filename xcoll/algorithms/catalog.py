"""The table of algorithms: what each can do, how it is built, and its closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from xcoll.algorithms import (
    doubling,
    exchanges,
    logarithmic,
    oneshot,
    pipelines,
    rings,
    tori,
    trees,
    twin_trees,
    two_way,
)
from xcoll.choosing import OPTIONS, Option
from xcoll.schedule import COLLECTIVES, ClosedForm, Schedule

Builder = Callable[..., Schedule]
Former = Callable[..., ClosedForm]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm.

    Attributes:
      name: its name in the API.
      builders: for each collective it can do, the function that builds the schedule: called with
        the number of ranks, the options, ``root`` for a rooted collective, and ``dims``
        where `needs_dims`.
      form: ``(collective, num_ranks, **options[, dims])`` to its closed form.
      needs_dims: it spans several levels or axes at once, whose sizes it must know.
    """

    name: str
    builders: Mapping[str, Builder] = field(repr=False)
    form: Former = field(repr=False)
    needs_dims: bool = False

    @property
    def options(self) -> Mapping[str, Option]:
        """Its options, by name."""
        return OPTIONS[self.name]

    @property
    def collectives(self) -> tuple[str, ...]:
        """What it can do, in the order of `xcoll.schedule.COLLECTIVES`."""
        return tuple(c for c in COLLECTIVES if c in self.builders)


def _native(collective: str) -> Builder:
    return lambda num_ranks: oneshot.native_schedule(collective, num_ranks)


_TABLE = (
    Algorithm(
        name="native",
        builders={
            c: _native(c) for c in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        },
        form=oneshot.native_form,
    ),
    Algorithm(
        name="ring",
        builders={
            "all_reduce": rings.ring_all_reduce,
            "reduce_scatter": rings.ring_reduce_scatter,
            "all_gather": rings.ring_all_gather,
            "broadcast": rings.ring_broadcast,
        },
        form=rings.ring_form,
    ),
    Algorithm(
        name="bidirectional_ring",
        builders={
            "all_reduce": two_way.bidirectional_ring_all_reduce,
            "reduce_scatter": two_way.bidirectional_ring_reduce_scatter,
            "all_gather": two_way.bidirectional_ring_all_gather,
        },
        form=two_way.two_way_form,
    ),
    Algorithm(
        name="recursive_doubling",
        builders={
            "all_reduce": doubling.recursive_doubling_all_reduce,
            "all_gather": doubling.recursive_doubling_all_gather,
        },
        form=doubling.doubling_form,
    ),
    Algorithm(
        name="halving_doubling",
        builders={
            "all_reduce": doubling.halving_doubling_all_reduce,
            "reduce_scatter": doubling.halving_doubling_reduce_scatter,
            "broadcast": logarithmic.halving_doubling_broadcast,
        },
        form=logarithmic.halving_doubling_form,
    ),
    Algorithm(
        name="tree",
        builders={
            "all_reduce": trees.tree_all_reduce,
            "broadcast": trees.tree_broadcast,
            "reduce": trees.tree_reduce,
            "gather": trees.tree_gather,
            "scatter": trees.tree_scatter,
        },
        form=trees.tree_form,
    ),
    Algorithm(
        name="double_tree",
        builders={"all_reduce": twin_trees.double_tree_all_reduce},
        form=twin_trees.double_tree_form,
    ),
    Algorithm(
        name="bruck",
        builders={
            "all_gather": logarithmic.bruck_all_gather,
            "all_to_all": logarithmic.bruck_all_to_all,
        },
        form=logarithmic.bruck_form,
    ),
    Algorithm(
        name="pairwise",
        builders={
            "all_reduce": exchanges.pairwise_all_reduce,
            "reduce_scatter": exchanges.pairwise_reduce_scatter,
            "all_gather": exchanges.pairwise_all_gather,
            "all_to_all": exchanges.pairwise_all_to_all,
        },
        form=exchanges.pairwise_form,
    ),
    Algorithm(
        name="direct",
        builders={
            "all_reduce": oneshot.direct_all_reduce,
            "reduce_scatter": lambda n, shots=2: oneshot.direct_reduce_scatter(n),
            "all_gather": lambda n, shots=2: oneshot.direct_all_gather(n),
            "all_to_all": lambda n, shots=2: oneshot.direct_all_to_all(n),
        },
        form=oneshot.direct_form,
    ),
    Algorithm(
        name="torus",
        builders={
            "all_reduce": tori.torus_all_reduce,
            "reduce_scatter": tori.torus_reduce_scatter,
            "all_gather": tori.torus_all_gather,
        },
        form=tori.torus_form,
        needs_dims=True,
    ),
    Algorithm(
        name="hierarchical",
        builders={"all_reduce": pipelines.pipelined_all_reduce},
        form=pipelines.pipelined_form,
        needs_dims=True,
    ),
)

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _TABLE}
"""Every algorithm, by name. An addition is one entry here, and its options in `xcoll.choosing`."""
