"""Which devices are sure to run the same equations at the same time, and which need not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from jax.extend import core

from xcoll import _compat

_RUN_ALIKE = frozenset(
    {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call", "scan"}
)
"""Primitives whose bodies run as often on all devices."""


@dataclass(frozen=True)
class Lockstep:
    """What is known of the devices that run an equation, along each manual axis.

    Attributes:
      together: axes along which all devices are sure to run it at the same time.
      apart: axes along which some devices may not run it: it stands in a branch, or in a loop
        whose turns are found as it runs, and their condition may differ along the axis.
      is_typed: types tell along which axes values differ (``check_vma=True``).
    """

    together: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    is_typed: bool = False

    def inside(self, eqn: core.JaxprEqn, manual: Iterable[str]) -> Lockstep:
        """Returns what is known in the bodies of an equation.

        Args:
          eqn: the equation.
          manual: axes that are manual around it, in the mesh's order.
        """
        name = eqn.primitive.name
        if name in _RUN_ALIKE:
            return self
        if name not in ("cond", "while"):
            return replace(self, together=())
        condition = eqn.params["cond_jaxpr"].out_avals[0] if name == "while" else eqn.invars[0].aval
        differs = _compat.varying_axes(condition) if self.is_typed else frozenset(manual)
        return replace(
            self,
            together=tuple(axis for axis in self.together if axis not in differs),
            apart=tuple(axis for axis in manual if axis in differs or axis in self.apart),
        )

    def in_shard_map(
        self, eqn: core.JaxprEqn, around: Collection[str], manual: Iterable[str]
    ) -> Lockstep:
        """Returns what is known in the body of a `jax.shard_map`.

        Along its own axes, what stands around it is the same for all devices. Its types say
        nothing of axes around it where those are not checked.

        Args:
          eqn: the shard_map.
          around: axes that are manual around it.
          manual: those and its own, in the mesh's order.
        """
        return replace(
            self,
            together=tuple(a for a in manual if a not in around or a in self.together),
            is_typed=bool(eqn.params["check_vma"]) and (self.is_typed or not around),
        )


UNKNOWN = Lockstep()
"""Nothing is known of what stands around."""
