"""What the author of a compiled program is likely to want to change, where that is certain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from xcoll.hlo.advising.accumulated import accumulated_sums
from xcoll.hlo.advising.flow import Flow
from xcoll.hlo.advising.gathers import repeated_gathers
from xcoll.hlo.advising.narrow import late_casts
from xcoll.hlo.advising.plans import better_plans
from xcoll.hlo.advising.reshards import reshardings
from xcoll.hlo.advising.small import small_reductions
from xcoll.hlo.reader import Collective
from xcoll.hlo.rows import Advice, Row
from xcoll.hlo.text import Module
from xcoll.topology import Topology

KINDS = {
    "gather-in-loop": "a loop gathers an argument of the program anew in every iteration",
    "resharding": "the partitioner moves a value to another sharding and nothing needs it there",
    "sum-in-loop": "a loop sums over devices in every iteration what it only adds up",
    "small-reductions": "many small reductions over the same axes, none waiting for another",
    "late-cast": "a sum in bfloat16 or float16 is cast to float32 when it has been rounded",
    "hierarchy": "xcoll has an exact plan that is faster over a link between machines",
    "codec": "xcoll has a plan with a codec that is faster over a link between machines",
}
"""The kinds of advice."""


def advise(
    module: Module,
    rows: Sequence[Row],
    collectives: Sequence[Collective],
    topology: Topology,
    axis_sizes: Mapping[str, int],
) -> tuple[Advice, ...]:
    """Returns advice on a compiled program, that which saves most first.

    Nothing that xcoll has put in is complained of, nor what computation hides altogether.

    Args:
      module: the program.
      rows: its collectives, as audited.
      collectives: the same as read, in the same order.
      topology: what the mesh lies on; where it is not known, no time is predicted and no plan
        proposed.
      axis_sizes: the mesh's axes and their sizes.
    """
    flow, by_name = Flow(module), {c.name: c for c in collectives}
    others = [row for row in rows if row.made_by != "xcoll" and not row.unread]
    found = [
        *repeated_gathers(flow, others),
        *reshardings(flow, others, by_name),
        *accumulated_sums(flow, others),
        *small_reductions(module, others, by_name, topology, axis_sizes),
        *late_casts(flow, others),
        *better_plans(module, others, topology, axis_sizes),
    ]
    found = [advice for advice in found if advice.saves_s != 0]
    return tuple(sorted(found, key=lambda a: -(math.inf if a.saves_s is None else a.saves_s)))
