"""The grid: what is measured, in which order, and what a plan of it is asked for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.cluster.quantities import readable_rate
from xcoll.plan import Request
from xcoll.policy import Policy
from xcoll.units import readable_bytes

AXES = ("host", "device")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""By the schedules' names: jax.lax's psum, psum_scatter, all_gather and all_to_all."""

REDUCING = ("all_reduce", "reduce_scatter")

POLICIES = {"exact": Policy(), "int8@host": Policy(codec={"host": "int8"})}
"""What is permitted, by how the tables call it."""

SIZES = tuple(4096 << shift for shift in (0, 4, 8, 10, 12, 14))
"""4 KiB, 64 KiB, 1, 4, 16 and 64 MiB."""

_ITEMSIZE = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster.

    Attributes:
      hosts: hosts.
      devices: of each.
      rate_bits_per_s: what each host's link carries, either way.
    """

    hosts: int
    devices: int
    rate_bits_per_s: int

    @property
    def ranks(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The mesh's axes and sizes."""
        return dict(zip(AXES, (self.hosts, self.devices), strict=True))

    @property
    def rate(self) -> str:
        """The rate as `bench.cluster` reads it."""
        return readable_rate(self.rate_bits_per_s)

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices} at {self.rate}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective of one size on one cluster.

    Attributes:
      setting: the cluster.
      collective: the schedules' name.
      num_bytes: of the payload on each device: the larger of operand and result, float32.
    """

    setting: Setting
    collective: str
    num_bytes: int

    @property
    def operand_elements(self) -> int:
        """Elements that enter on each device."""
        parts = self.setting.ranks if self.collective == "all_gather" else 1
        return self.num_bytes // _ITEMSIZE // parts

    def request(self) -> Request:
        """Returns what the planner is asked for."""
        return Request(
            collective=self.collective,
            op="sum" if self.collective in REDUCING else "none",
            axes=AXES,
            axis_sizes=(self.setting.hosts, self.setting.devices),
            dtype="float32",
            itemsize=_ITEMSIZE,
            shapes=((self.operand_elements,),),
        )

    def __str__(self) -> str:
        return f"{self.collective} of {readable_bytes(self.num_bytes)}, {self.setting}"


def cases(
    setting: Setting, collectives: Sequence[str] = COLLECTIVES, sizes: Sequence[int] = SIZES
) -> Iterator[Case]:
    """Yields the cases of a cluster, shuffled: wherever time ends, all kinds have had their turn.

    The order is another for every cluster, and the same every time.
    """
    pairs = list(itertools.product(collectives, sizes))
    random.Random(str(setting)).shuffle(pairs)
    for collective, num_bytes in pairs:
        yield Case(setting=setting, collective=collective, num_bytes=num_bytes)
