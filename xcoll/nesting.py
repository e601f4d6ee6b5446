"""One more `jax.shard_map` around a plan, over the axes that the partitioner still owns.

In a `jax.shard_map` that is manual over some axes of the mesh, a plan that cuts its operand anew
could make the partitioner gather over the others, and a kernel does not compile. Inside another
one, over the rest of the axes, the plan works on what one device holds::

    psum(x, "data")  ->  shard_map(plan, in_specs=spec, out_specs=spec, axis_names={"model"})(x)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Nest:
    """How a group's operands are cut over the axes that are the partitioner's.

    Attributes:
      axes: those axes.
      in_specs: of the operands.
      out_specs: of the results.
    """

    axes: tuple[str, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``fn``, of what one device holds, as a function of whole arrays.

        Args:
          fn: a function of the operands, and perhaps of more that every device has whole, to a list
            of results.
        """

        def nested(*xs: Any) -> Any:
            whole = (PartitionSpec(),) * (len(xs) - len(self.in_specs))
            return jax.shard_map(
                fn,
                in_specs=(*self.in_specs, *whole),
                out_specs=list(self.out_specs),
                axis_names=set(self.axes),
                check_vma=False,
            )(*xs)

        return nested
